"""Which client answers: a known name wins, then the depth decides. No I/O, no clients' code is called."""

from collections.abc import Callable
from typing import Literal

from rlm_broker.clients.base import Client
from rlm_broker.errors import ConfigurationError, UnknownModel

ModelPolicy = Literal["allow", "pinned", "open"]
"""What a model that model-written code names is worth.

- `allow`: the registered names and the sub-model. The root model only where it is the sub-model too, so that a cheap
  fan-out cannot silently become an expensive one.
- `pinned`: nothing, the depth decides.
- `open`: any name, the root model's as well.
"""

_POLICIES = ("allow", "pinned", "open")
_SHOWN_NAME_CHARS = 80


class Routing:
    """From a model's name and a depth to a client.

    Args:
        default: The root client: depth 0, and everything else where there is no sub client.
        sub: Serves depth 1 and deeper.
        model_policy: See `ModelPolicy`.
        open_client: For `open`: makes the client of a name that is not registered, or raises `UnknownModel`; it is
            called once for each name. Without it such a call goes to the client of its depth, which finds the name in
            the request.

    Raises:
        ConfigurationError: There is no such policy.
    """

    def __init__(
        self,
        default: Client,
        sub: Client | None = None,
        *,
        model_policy: ModelPolicy = "allow",
        open_client: Callable[[str], Client] | None = None,
    ) -> None:
        if model_policy not in _POLICIES:
            raise ConfigurationError(
                f"model policy {model_policy!r} does not exist; choose one of {', '.join(_POLICIES)}"
            )
        self._default = default
        self._sub = sub
        self._policy = model_policy
        self._open_client = open_client
        self._registered: dict[str, Client] = {}
        self._opened: dict[str, Client] = {}

    @property
    def clients(self) -> tuple[Client, ...]:
        """Every client object once, the default first: what there is to close, and whose usage there is to sum."""
        candidates = [self._default, self._sub, *self._registered.values(), *self._opened.values()]
        return tuple({id(client): client for client in candidates if client is not None}.values())

    def register(self, name: str, client: Client) -> None:
        """Make `client` available under `name`, to model-written code too.

        The root or the sub client under its own name is known already, and stays bound to its policy.

        Raises:
            ConfigurationError: The name is empty, or another client has it.
        """
        if not name:
            raise ConfigurationError("a model cannot be registered under an empty name")
        if name == client.model_name and any(client is own for own in self._own()):
            return
        if self._registered.setdefault(name, client) is not client:
            raise ConfigurationError(
                f"the model name {name!r} is taken by another client; register this one under its own"
            )

    def pick(self, model: str | None, depth: int) -> Client:
        """The client of a call that the orchestrator's own code makes. An empty name is no name.

        Raises:
            UnknownModel: `model` is none of the names that there are; it lists them.
        """
        if not model:
            return self._by_depth(depth)
        client = self._listed(model, depth)
        if client is None:
            known = dict.fromkeys([*(own.model_name for own in self._own()), *self._registered])
            raise UnknownModel(f"no client for model {_shown(model)}; known: {', '.join(known)}")
        return client

    def pick_for_code(self, model: str | None, depth: int) -> Client:
        """The client of a call that model-written code makes, whose wish for a model the policy judges.

        Raises:
            UnknownModel: `model` is none of the names that code may use; it lists them.
        """
        if not model or self._policy == "pinned":
            return self._by_depth(depth)
        if self._policy == "open":
            return self._open(model, depth)
        sub = self._sub or self._default
        if model in self._registered:
            return self._registered[model]
        if model == sub.model_name:
            return sub
        allowed = dict.fromkeys([sub.model_name, *self._registered])
        raise UnknownModel(f"code may not call model {_shown(model)}; allowed: {', '.join(allowed)}")

    def _open(self, model: str, depth: int) -> Client:
        client = self._listed(model, depth)
        if client is not None:
            return client
        if self._open_client is None:
            return self._by_depth(depth)
        if model not in self._opened:
            self._opened[model] = self._open_client(model)
        return self._opened[model]

    def _by_depth(self, depth: int) -> Client:
        return self._sub if depth >= 1 and self._sub is not None else self._default

    def _listed(self, model: str, depth: int) -> Client | None:
        if model in self._registered:
            return self._registered[model]
        # Root and sub client may have one name (the same model with other options): then the depth tells them apart.
        for client in (self._by_depth(depth), *self._own()):
            if client.model_name == model:
                return client
        return None

    def _own(self) -> tuple[Client, ...]:
        return (self._default,) if self._sub is None else (self._default, self._sub)


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_NAME_CHARS else name[:_SHOWN_NAME_CHARS] + "...")
