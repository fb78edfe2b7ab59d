"""Owners of runs and REPLs, for example keys of the server: refusals, fair places, and eviction.

Eviction of finished things is by age, then the oldest of the owner with the most.
"""

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rlm_broker import ConfigurationError, FairSemaphore, RlmBrokerError, RunLimits

DAY_S: Final = 86_400
"""Seconds of a day. Days begin at midnight UTC."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A party whose runs, REPLs and files are its own: other owners get no answer about them.

    Attributes:
        name: Name of the owner, for people and logs. Unique within a process.
        models: Names of models it may use; None allows all.
        limits: Limits of each of its runs. A request may tighten them; None adds none.
        usd_a_day: US dollars for its runs in one day (UTC); None sets no bound.
    """

    name: str
    models: frozenset[str] | None = None
    limits: RunLimits | None = None
    usd_a_day: float | None = None

    def require_model(self, name: str) -> None:
        """Refuse a model forbidden to the owner.

        Raises:
            NotAllowed: The model is not among `models`.
        """
        if self.models is not None and name not in self.models:
            raise NotAllowed(f"this key may not use the model {name!r}: it has {', '.join(sorted(self.models))}")


class Busy(RlmBrokerError):
    """All places are taken, or the service ends; the same request may succeed later.

    Attributes:
        retry_after_s: Seconds until another attempt is reasonable.
    """

    kind = "busy"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MoneySpent(RlmBrokerError):
    """The owner has spent what it may spend in one day.

    Attributes:
        retry_after_s: Seconds until the next day begins.
    """

    kind = "money"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotAllowed(RlmBrokerError):
    """The owner may not do what it asked for."""

    kind = "not_allowed"


class UnknownHandle(ConfigurationError):
    """The owner has no run, REPL or file of that id: it never had one, or its time is over."""

    kind = "unknown_handle"


class Purse:
    """Money that one owner spends, day by day."""

    def __init__(self, owner: Owner, clock: Callable[[], float] = time.time) -> None:
        self._owner = owner
        self._clock = clock
        self._day = 0
        self._spent_usd = 0.0

    def add(self, usd: float) -> None:
        """Count money spent now."""
        self._today()
        self._spent_usd += usd

    @property
    def left_usd(self) -> float | None:
        """US dollars left today; None if there is no bound."""
        self._today()
        return None if self._owner.usd_a_day is None else max(0.0, self._owner.usd_a_day - self._spent_usd)

    def require_some(self) -> None:
        """Refuse a run if no money is left.

        Raises:
            MoneySpent: No money is left today.
        """
        if self.left_usd == 0:
            wait_s = DAY_S - self._clock() % DAY_S
            raise MoneySpent(f"this key has spent its {self._owner.usd_a_day:g} US dollars of today (UTC)", wait_s)

    def _today(self) -> None:
        today = int(self._clock() // DAY_S)
        if today != self._day:
            self._day, self._spent_usd = today, 0.0


T = TypeVar("T")


class EndedThings(Generic[T]):
    """Finished things kept by their ids. The too old ones go, then the oldest of the owner with the most.

    An owner with few things loses none because another one has many. The cost is the same however many are kept.

    Args:
        most: Number of things kept.
        most_weight: Weight of all of them together, in any unit.
        keep_s: Seconds each is kept.
        clock: Source of Unix time in seconds.
    """

    def __init__(self, most: int, most_weight: int, keep_s: float, clock: Callable[[], float] = time.time) -> None:
        self._most = most
        self._most_weight = most_weight
        self._keep_s = keep_s
        self._clock = clock
        self._things: dict[str, tuple[T, str, int, float]] = {}
        """Id → thing, name of its owner, weight and time of its end; the oldest first."""
        self._ids: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """Name of an owner → ids of its things, the oldest first."""
        self._weights: Counter[str] = Counter()

    def add(self, id: str, thing: T, owner: str, weight: int) -> None:
        """Keep a thing that has ended now."""
        self._things[id] = thing, owner, weight, self._clock()
        self._ids[owner][id] = None
        self._weights[owner] += weight
        self._forget_old()
        while len(self._things) > self._most:
            most = max(self._ids, key=lambda owner: len(self._ids[owner]))
            self.pop(next(iter(self._ids[most])))
        while self._weights.total() > self._most_weight:
            heaviest = max(self._weights, key=self._weights.__getitem__)
            self.pop(next(iter(self._ids[heaviest])))

    def get(self, id: str) -> T | None:
        """Return a thing by its id; None if it is not kept."""
        self._forget_old()
        return self._things[id][0] if id in self._things else None

    def pop(self, id: str) -> None:
        """Drop a thing by its id, if it is kept."""
        if id in self._things:
            _, owner, weight, _ = self._things.pop(id)
            self._weights[owner] -= weight
            del self._ids[owner][id]

    def __iter__(self) -> Iterator[T]:
        self._forget_old()
        return iter([thing for thing, *_ in self._things.values()])

    def _forget_old(self) -> None:
        oldest_at = self._clock() - self._keep_s
        while (id := next(iter(self._things), None)) is not None and self._things[id][3] < oldest_at:
            self.pop(id)


RETRY_AFTER_S: Final = 1.0
"""Seconds until a refused request may find a place in the queue."""


class Places:
    """Places for work of all owners. Lives on one event loop."""

    def __init__(self, most: int, most_waiting: int) -> None:
        self._places = FairSemaphore(most)
        self._most_waiting = most_waiting

    @contextlib.asynccontextmanager
    async def place(self, owner: Owner) -> AsyncIterator[None]:
        """Wait for a place, and have it within the block. Owners take turns.

        Where the queue is full, an owner that does not wait in it may still wait once.

        Raises:
            Busy: Too many wait already.
        """
        if not self._places.take():
            if self._places.waiting >= self._most_waiting and (
                self._places.has_waiting(owner.name) or not self._most_waiting
            ):
                raise Busy(f"all places are taken, and {self._most_waiting:,} wait: try again later", RETRY_AFTER_S)
            await self._places.acquire(owner.name)
        try:
            yield
        finally:
            self._places.release()
