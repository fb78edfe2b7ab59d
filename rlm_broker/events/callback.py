"""Functions of the user's, called with events: they cannot break a run."""

import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any, Self

from rlm_broker.errors import ConfigurationError
from rlm_broker.events.redaction import redact, secrets_of_environment

_log = logging.getLogger("rlm_broker")


class Callback:
    """Calls a function of the user's. Its first exception is logged; all of them end here.

    Args:
        call: A plain function; it runs on the run's event loop, and must not block.
        name: Name of the argument as which the function was given, for errors and the log.

    Raises:
        ConfigurationError: `call` is not a function, or is a coroutine function.
    """

    def __init__(self, call: Callable[..., object], name: str) -> None:
        if not callable(call) or inspect.iscoroutinefunction(call):
            raise ConfigurationError(f"{name} is a plain function: it is called, and never awaited")
        self._call = call
        self._name = name
        self._has_failed = False

    @classmethod
    def of(cls, call: Callable[..., object] | None, name: str) -> Self:
        """Return a callback of `call`; None becomes a callback without effect."""
        return cls(_nothing if call is None else call, name)

    def __call__(self, *given: Any) -> None:
        """Call the function with these arguments."""
        try:
            self._call(*given)
        except BaseException:  # noqa: BLE001 - SystemExit, too: it would end the loop of the run
            if not self._has_failed:
                self._has_failed = True
                why = redact(traceback.format_exc(), secrets_of_environment())
                _log.warning("%s raised; what else it raises is not logged\n%s", self._name, why)


def _nothing(*_given: object) -> None:
    pass
