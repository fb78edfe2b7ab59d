"""Callbacks around methods."""

import functools
from collections.abc import Callable
from typing import Any


def with_callbacks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call each of the object's callbacks with the method's name and arguments, before the method."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        for callback in self.callbacks:
            callback(method.__name__, args)
        return method(self, *args, **kwargs)

    return called
