"""Chromium for tests: one browser for a module, on a loop of its own, so that each test opens only a page."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from threading import Thread
from typing import Any, TypeVar

import pytest

from scripts.chromium import Chromium, Tab, path_of_chromium, started

T = TypeVar("T")
READY = "document.documentElement?.dataset.ready"
"""Is set when a page has read all rows of its trace."""


class Browser:
    """A browser, and the loop that it is driven from."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._browser: Chromium = self.wait(self._stack.enter_async_context(started()))

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop of the browser."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(150)

    def tab(self) -> Tab:
        """Open an empty page."""
        return self.wait(self._browser.tab())

    def close(self) -> None:
        """End the browser and the loop."""
        self.wait(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, or skip the test if there is none."""
    if path_of_chromium() is None:
        pytest.skip("needs chromium")
    made = Browser()
    try:
        yield made
    finally:
        made.close()
