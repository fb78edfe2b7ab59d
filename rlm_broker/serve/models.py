"""Names of models that clients ask for, and what each means: a model of the server, and maybe a context of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlm_broker import RLM, StoredContext
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.values.validation import no_such

AT: Final = "@"
"""Separator of a model and a context, as in "openai/gpt-5@logs"."""
PLAIN: Final = "plain"
"""Word in place of a context for the model itself: one call, without a REPL. A context of that name hides it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a request named.

    Attributes:
        name: Name under which the client asked for it, and is answered.
        model: Model for `RLM.start`; None is the server's own.
        context: Context of the server's, or None.
        is_plain: Whether the model itself is asked, without a REPL.
    """

    name: str
    model: str | None
    context: StoredContext | None
    is_plain: bool = False


class ServedModels:
    """Models that clients may name.

    Args:
        rlm: The open `RLM` that answers.
        contexts: Contexts of the server's by name.
    """

    def __init__(self, rlm: RLM, contexts: Mapping[str, StoredContext]) -> None:
        self._rlm = rlm
        self._contexts = contexts

    @property
    def _root(self) -> str:
        return self._rlm.handler.get_client(depth=0).model_name

    @property
    def known(self) -> tuple[str, ...]:
        """Names of all models, without contexts."""
        return tuple(dict.fromkeys([self._root, *self._rlm.handler.routing.names]))

    def names(self, owner: Owner) -> list[str]:
        """Return all names that an owner may ask for, the plain models last."""
        models = [name for name in self.known if owner.models is None or name in owner.models]
        about = [f"{name}{AT}{context}" for name in models for context in self._contexts]
        plain = [f"{name}{AT}{PLAIN}" for name in models if PLAIN not in self._contexts]
        return [*models, *about, *plain]

    def named(self, owner: Owner, name: str) -> ServedModel:
        """Return the model of that name.

        Raises:
            ApiError: 404: there is no such model or context. 403: the owner may not use it.
        """
        known = self.known
        model, context = name, ""
        if name not in known and AT in name:
            model, _, context = name.rpartition(AT)
        if model != name and context not in self._contexts and context != PLAIN:
            said = no_such("context", context, [*self._contexts, PLAIN])
            raise ApiError(404, said, code="model_not_found", param="model")
        if model not in known:
            said = no_such("model", name, self.names(owner))
            raise ApiError(404, said, code="model_not_found", param="model")
        owner.require_model(model)
        about = self._contexts.get(context)
        return ServedModel(name, None if model == self._root else model, about, context == PLAIN and about is None)
