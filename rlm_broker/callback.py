"""A function of the user's that is called with what happens."""

import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any, Self

from rlm_broker.errors import ConfigurationError
from rlm_broker.redaction import redact, secrets_of_environment

_log = logging.getLogger("rlm_broker")


class Callback:
    """Calls a function of the user's. What it raises is logged once, and reaches nothing else.

    Args:
        name: Of the argument that the function was given as.

    Raises:
        ConfigurationError: It is no function, or one that would have to be awaited.
    """

    def __init__(self, call: Callable[..., object], name: str) -> None:
        if not callable(call) or inspect.iscoroutinefunction(call):
            raise ConfigurationError(f"{name} is a plain function: it is called, and never awaited")
        self._call = call
        self._name = name
        self._has_failed = False

    @classmethod
    def of(cls, call: Callable[..., object] | None, name: str) -> Self:
        """Return the one of `call`; of None one that does nothing."""
        return cls(_nothing if call is None else call, name)

    def __call__(self, *given: Any) -> None:
        """Call the function."""
        try:
            self._call(*given)
        except BaseException:  # noqa: BLE001 - not even its sys.exit breaks a run
            if not self._has_failed:
                self._has_failed = True
                why = redact(traceback.format_exc(), secrets_of_environment())
                _log.warning("%s raised; what else it raises is not logged\n%s", self._name, why)


def _nothing(*_given: object) -> None:
    pass
