"""Choice of the client for a call: a registered name decides first, then a route, then the depth. It does no I/O."""

import fnmatch
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlm_broker.broker.clients.adapters import FieldLike, adapted
from rlm_broker.broker.clients.base import BaseClient, Client
from rlm_broker.errors import ConfigurationError, UnknownModel, require_kind
from rlm_broker.values.text import clip
from rlm_broker.values.validation import did_you_mean

ModelPolicy = Literal["allow", "pinned", "open"]
"""Models that model code may name.

- `allow`: the registered names, the routes and the sub-model. The root model only if it is the sub-model, too: a cheap
  fan-out must not silently become an expensive one.
- `pinned`: none. A name in a query is ignored, and the depth decides.
- `open`: any name, also the root model's.
"""

_POLICIES = ("allow", "pinned", "open")
_SHOWN_NAME_CHARS = 80
"""Characters of a model's name that an error shows. Model code may give a name of any length."""
_DEPTHS = re.compile(r"(\d{1,9})(-(\d{1,9})?)?")
"""Depths of a route: "1", "1-3" or "2-"."""
DEEPEST = sys.maxsize
"""Last depth of a route without end."""


@dataclass(frozen=True, slots=True)
class Route:
    """A rule for sending calls to the client of a given name.

    Example:
        ```python
        routes = [Route("small", depths="1-"), Route("large", match="gpt-*")]
        models = Models({"small": "openai/gpt-5-mini", "large": "openai/gpt-5"}, routes=routes)
        RLM("openai/gpt-5", models=models)
        ```

    Args:
        to: A registered name, or the name of the root or the sub client.
        match: Requested model: a name, or a pattern with `*` for any text. None takes calls without a name.
        depths: Depths of its calls: "0", "1-3", "2-". 0 is a root's own loop, 1 the queries of its REPL.

    Raises:
        ConfigurationError: `depths` has another form, or holds no depth.
    """

    to: str
    match: str | None = None
    depths: str = "0-"

    def __post_init__(self) -> None:
        require_kind("a route's to", self.to, str)
        require_kind("a route's match", self.match, str, type(None))
        require_kind("a route's depths", self.depths, str)
        first, last = self.range
        if self.match == "":
            raise ConfigurationError(
                "a route's match must be a name or a pattern, not empty; leave it out for calls that name no model"
            )
        if first > last:
            raise ConfigurationError(f"{self}: there is no depth in the range {self.depths!r}")

    def __str__(self) -> str:
        return f"route {'(no model named)' if self.match is None else self.match} at depth {self.depths} to {self.to}"

    @property
    def range(self) -> tuple[int, int]:
        """First and last depth."""
        found = _DEPTHS.fullmatch(self.depths)
        if found is None:
            raise ConfigurationError(f"a route's depths must look like '1', '1-3' or '2-', not {self.depths!r}")
        first, rest, last = found.groups()
        return int(first), int(first) if rest is None else DEEPEST if last is None else int(last)

    def takes(self, model: str | None, depth: int) -> bool:
        """Whether the route takes a call of this model at this depth.

        Example:
            ```python
            Route("large", match="gpt-*", depths="1-").takes("gpt-5", 0)  # False
            ```
        """
        first, last = self.range
        return first <= depth <= last and _matches(self.match, model or None)

    def hides(self, later: "Route") -> bool:
        """Whether this route takes all calls of `later`."""
        first, last = self.range
        return first <= later.range[0] and later.range[1] <= last and _matches(self.match, later.match)


class Routing:
    """Chooses the client for a model's name and a depth.

    Args:
        default: Root client: for depth 0, and for all calls without another client.
        sub: Client for depth 1 and deeper.
        model_policy: See `ModelPolicy`.
        open_client: For the policy `open`: makes the client of an unregistered name, once for each, or raises
            `UnknownModel`. Without it such a call goes to the client of its depth, with the name in the request.

    Attributes:
        root: Client for depth 0.
        sub: Client for depth 1 and deeper; None if the root client serves these, too.
        routes: Routes in the order in which they are tried, see `add`.

    Raises:
        ConfigurationError: `model_policy` is none of the policies.
    """

    def __init__(
        self,
        default: Client | FieldLike,
        sub: Client | FieldLike | None = None,
        *,
        model_policy: ModelPolicy = "allow",
        open_client: Callable[[str], Client] | None = None,
    ) -> None:
        if model_policy not in _POLICIES:
            raise ConfigurationError(f"the model policy must be one of {', '.join(_POLICIES)}, not {model_policy!r}")
        self.root = adapted(default)
        self.sub = None if sub is None else adapted(sub)
        self.policy: ModelPolicy = model_policy
        self.routes: list[Route] = []
        self._open_client = open_client
        self._registered: dict[str, BaseClient] = {}
        self._opened: dict[str, BaseClient] = {}

    @property
    def clients(self) -> tuple[BaseClient, ...]:
        """Every client object once, the root first."""
        candidates = [self.root, self.sub, *self._registered.values(), *self._opened.values()]
        return tuple({id(client): client for client in candidates if client is not None}.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names."""
        return tuple(self._registered)

    @property
    def by_name(self) -> dict[str, BaseClient]:
        """The root, the sub client and the registered ones by name."""
        own = {client.model_name: client for client in reversed(self._own())}  # if both have one name, the root wins
        return own | self._registered

    def instead(self, default: BaseClient | None, sub: BaseClient | None) -> "Routing":
        """Return the same routing with another root or sub client. None keeps the present one.

        Raises:
            ConfigurationError: A route leads to the replaced client.
        """
        changed = Routing(default or self.root, sub or self.sub, model_policy=self.policy)
        changed._open_client, changed._opened = self._open_client, self._opened
        changed._registered = self._registered
        for route in self.routes:
            changed.add(route)
        return changed

    def register(self, name: str, client: Client | FieldLike) -> None:
        """Make `client` available under `name`, also to model code.

        Has no effect on the root and the sub client under their own names: they stay bound to the policy.

        Raises:
            ConfigurationError: The name is empty, or another client has it.
        """
        registered = adapted(client)
        if not name:
            raise ConfigurationError("a model cannot be registered under an empty name")
        if name == registered.model_name and any(registered is own for own in self._own()):
            return
        if self._registered.setdefault(name, registered) is not registered:
            raise ConfigurationError(
                f"the model name {name!r} is taken by another client; register this one under its own"
            )

    def add(self, route: Route) -> None:
        """Add a route to a client that is there already. If two routes take a call, the first one decides.

        Raises:
            ConfigurationError: It leads to no client, or no call can ever take it.
        """
        self._client_of(route)
        if route.match in self._registered:
            raise ConfigurationError(f"{route} is never taken: a client is registered under that very name")
        for earlier in self.routes:
            if earlier.hides(route):
                raise ConfigurationError(f"{route} is never taken: {earlier} comes before it")
        self.routes.append(route)

    def pick(self, model: str | None, depth: int) -> BaseClient:
        """Return the client of a call from the orchestrator's own code. An empty name is no name.

        Raises:
            UnknownModel: No client has the name `model`; the error lists the known ones.
        """
        return self.explain(model, depth, is_code=False)[0]

    def pick_for_code(self, model: str | None, depth: int) -> BaseClient:
        """Return the client of a call from model code. The policy judges the name.

        Raises:
            UnknownModel: Code may not use the name `model`; the error lists the allowed ones.
        """
        if not model and not self.routes:  # nearly every call: `explain` would format a reason that is not read
            return self._of_depth(depth)
        return self.explain(model, depth)[0]

    def explain(self, model: str | None, depth: int, *, is_code: bool = True) -> tuple[BaseClient, str]:
        """Return the client of a call, and why it is that one.

        Raises:
            UnknownModel: As for `pick` and `pick_for_code`.
        """
        if not model:
            return self._by_depth(depth)
        if is_code and self.policy == "pinned":
            client, why = self._by_depth(depth)
            return client, f"the model policy is pinned, so the name does not count: {why}"
        if model in self._registered:
            return self._registered[model], "it is registered under that name"
        for route in self.routes:
            if route.takes(model, depth):
                return self._client_of(route), str(route)
        if not is_code or self.policy == "open":
            return self._of_any_name(model, depth, may_open=is_code)
        sub = self.sub or self.root
        if model == sub.model_name:
            return sub, "it is the name of what code may ask anyway"
        allowed = dict.fromkeys([sub.model_name, *self._registered, *self._matches()])
        likely = did_you_mean(model[:_SHOWN_NAME_CHARS], [sub.model_name, *self._registered])
        raise UnknownModel(f"code may not call model {_shown(model)}; allowed: {', '.join(allowed)}{likely}")

    def _of_any_name(self, model: str, depth: int, *, may_open: bool) -> tuple[BaseClient, str]:
        # Root and sub client may have one name (the same model with other options), so the depth is asked first.
        for client in (self._by_depth(depth)[0], *self._own()):
            if client.model_name == model:
                return client, "it is the name of the root or the sub model"
        if not may_open:
            known = dict.fromkeys([*(own.model_name for own in self._own()), *self._registered, *self._matches()])
            raise UnknownModel(f"no client for model {_shown(model)}; known: {', '.join(known)}")
        if self._open_client is None:
            client, why = self._by_depth(depth)
            return client, f"the model policy is open, and the client takes any name: {why}"
        if model not in self._opened:
            self._opened[model] = adapted(self._open_client(model))
        return self._opened[model], "the model policy is open"

    def _by_depth(self, depth: int) -> tuple[BaseClient, str]:
        for route in self.routes:
            if route.takes(None, depth):
                return self._client_of(route), str(route)
        is_sub = depth >= 1 and self.sub is not None
        return self._of_depth(depth), f"depth {depth} goes to the {'sub' if is_sub else 'root'} model"

    def _of_depth(self, depth: int) -> BaseClient:
        return self.sub if depth >= 1 and self.sub is not None else self.root

    def _client_of(self, route: Route) -> BaseClient:
        if route.to in self._registered:
            return self._registered[route.to]
        for client in self._own():
            if client.model_name == route.to:
                return client
        known = dict.fromkeys([*self._registered, *(own.model_name for own in self._own())])
        raise ConfigurationError(f"{route} leads to no client: choose one of {', '.join(known)}")

    def _matches(self) -> list[str]:
        return [route.match for route in self.routes if route.match is not None]

    def _own(self) -> tuple[BaseClient, ...]:
        return (self.root,) if self.sub is None else (self.root, self.sub)


def _matches(match: str | None, model: str | None) -> bool:
    if match is None or model is None:
        return match is model
    if "*" not in match:
        return match == model
    return fnmatch.fnmatchcase(model, match.replace("[", "[[]").replace("?", "[?]"))


def _shown(name: str) -> str:
    return repr(clip(name, _SHOWN_NAME_CHARS))
