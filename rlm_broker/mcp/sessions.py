"""Sessions of each owner. The SDK bounds those of all clients together, so one owner could take them all."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from rlm_broker.hosting.owner import Busy, Owner

MOST_OF_OWNER: Final = 100
"""Sessions of one owner at the same time."""
IDLE_S: Final = 1_800.0
"""Seconds without a request after which the SDK has closed a session."""
RETRY_AFTER_S: Final = 60.0
"""Seconds after which another attempt is reasonable."""


class Sessions:
    """Sessions by owner, as requests show them.

    Args:
        most_of_owner: Sessions of one owner.
        clock: Source of monotonic time in seconds.
    """

    def __init__(self, most_of_owner: int = MOST_OF_OWNER, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_of_owner = most_of_owner
        self._clock = clock
        self._used: dict[Owner, OrderedDict[str, float]] = {}
        """Sessions of each owner with the time of their last use, the least recently used first."""

    def require_room(self, owner: Owner) -> None:
        """Refuse a further session.

        Raises:
            Busy: The owner has too many.
        """
        self._forget_idle(owner)
        if len(self._used.get(owner, ())) >= self._most_of_owner:
            raise Busy(f"this key has {self._most_of_owner:,} sessions: end one first", RETRY_AFTER_S)

    def use(self, owner: Owner, session: str) -> None:
        """Take note of a request of a session, which may be its first."""
        used = self._used.setdefault(owner, OrderedDict())
        used[session] = self._clock()
        used.move_to_end(session)

    def end(self, owner: Owner, session: str) -> None:
        """Take note of the end of a session. Has no effect for an unknown one."""
        self._used.get(owner, OrderedDict()).pop(session, None)

    def _forget_idle(self, owner: Owner) -> None:
        used = self._used.get(owner, OrderedDict())
        while used and next(iter(used.values())) < self._clock() - IDLE_S:
            used.popitem(last=False)
