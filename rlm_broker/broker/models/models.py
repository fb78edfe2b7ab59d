"""The models of an `RLM` besides its root and sub-model, and the files that keep their calls."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from rlm_broker.broker.clients.adapters import is_field_client
from rlm_broker.broker.models.model import Given, Model
from rlm_broker.broker.routing import ModelPolicy, Route
from rlm_broker.errors import ConfigurationError, require_kind

if TYPE_CHECKING:
    from rlm_broker.broker.cache import Cache

FilePath = str | PathLike[str]
"""Path of a file, as `open` takes it."""


@dataclass(frozen=True, slots=True)
class Models:
    """Further models, the rules for calling them, and the files that keep replies.

    Example:
        ```python
        models = Models({"judge": "openai/gpt-5"}, cache="replies.sqlite", policy="allow")
        RLM("openai/gpt-5-mini", models=models)
        ```

    Args:
        named: Name → model. Model code may ask for these names, and routes may lead to them.
        routes: Rules that send calls to models by requested name and depth; the first that matches a call decides. See
            `Route`.
        policy: Models that code in the REPL may choose by name; see `ModelPolicy`.
        cache: File or `Cache` that keeps replies of providers. None keeps no replies.
        record: Path of a new file for all model calls. None records no calls.
        replay: Path of such a file. All replies come from it, and no model is called.

    Raises:
        ConfigurationError: An argument is of the wrong type, or stands beside a `replay`, which brings its own models,
            policy and replies.
    """

    named: Mapping[str, Given] = field(default_factory=dict)
    routes: Sequence[Route] = ()
    policy: ModelPolicy = "allow"
    cache: "FilePath | Cache | None" = None
    record: FilePath | None = None
    replay: FilePath | None = None

    def __post_init__(self) -> None:
        _require_named(self.named)
        if isinstance(self.routes, str) or not isinstance(self.routes, Sequence):
            raise ConfigurationError(f"routes must be a list of Route, not {type(self.routes).__name__}")
        for route in self.routes:
            require_kind("each of the routes", route, Route)
        for name, value in (("record", self.record), ("replay", self.replay)):
            if not isinstance(value, str | PathLike | None):
                raise ConfigurationError(f"{name} must be the path of a file, not {type(value).__name__}")
        if not isinstance(self.cache, str | PathLike | None) and not is_cache(self.cache):
            raise ConfigurationError(f"cache must be a path or a Cache, not {type(self.cache).__name__}")
        if self.replay is not None and (self.named or self.routes):
            raise ConfigurationError("give either models or a recording to replay: it brings its own models")
        if self.replay is not None and self.policy != "allow":
            raise ConfigurationError("give either a policy or a recording to replay: it brings its own policy")
        if self.replay is not None and self.cache is not None:
            raise ConfigurationError("give either a cache or a recording to replay: no provider is called then")

    @property
    def needs_own_handler(self) -> bool:
        """Whether an argument changes the handler, so that it cannot go with a handler of the caller."""
        return bool(self.named or self.routes or self.cache or self.replay) or self.policy != "allow"


def is_cache(given: object) -> bool:
    """Whether a value is a `Cache`. Without one, sqlite is not imported."""
    module = sys.modules.get("rlm_broker.broker.cache")
    return module is not None and isinstance(given, module.Cache)


def models_of(given: Any) -> Models:
    """Return the `Models` that the parameter `models` of `RLM` stands for: itself, or one with these names."""
    if isinstance(given, Models):
        return given
    return Models() if given is None else Models(given)


def _require_named(named: object) -> None:
    if not isinstance(named, Mapping):
        raise ConfigurationError(f"models must be a dict from name to model, or a Models, not {named!r:.80}")
    for name, model in named.items():
        require_kind("the name of a model", name, str)
        is_class = isinstance(model, type)
        is_model = isinstance(model, str | Model) or callable(model) or hasattr(model, "complete")
        if is_class or not (is_model or is_field_client(model)):
            what = f"the class {model.__name__}" if is_class else type(model).__name__
            raise ConfigurationError(
                f"model {name!r}: a model must be a name, a Model, a client or a function, not {what}"
            )
