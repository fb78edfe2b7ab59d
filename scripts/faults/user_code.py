"""Faults of the user's own functions: clients, tools and callbacks."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.events.event import Event
from scripts.faults.cell import DEEP, QUERY
from scripts.faults.stage import Stage

Act = Callable[[], Any]
"""Deed of a user's function at the phase; it may be a coroutine function."""


def nothing(_stage: Stage) -> None:
    """Inject no further fault: the user's function is the fault."""


def client(act: Act) -> Callable[[Stage], None]:
    """Have the client do this at the phase."""

    def prepare(stage: Stage) -> None:
        async def at_gate(_request: LMRequest) -> object:
            done = act() if stage.is_armed else None
            return await done if inspect.isawaitable(done) else done

        stage.at_gate = at_gate
        stage.limits = stage.limits.replace(call_timeout_s=1.0)

    return prepare


def tool(act: Act) -> Callable[[Stage], None]:
    """Have a tool do this at the phase; it is an awaited one if the act is."""

    def prepare(stage: Stage) -> None:
        def reached() -> Any:
            stage.reach(QUERY)
            stage.reach(DEEP)
            return act()

        def plain(number: int) -> Any:  # noqa: ARG001 - code of the run gives it
            """Do what the fault says."""
            return reached()

        async def awaited(number: int) -> Any:  # noqa: ARG001
            """Do what the fault says."""
            return await reached()

        stage.options["tools"] = {"at_phase": awaited if inspect.iscoroutinefunction(act) else plain}
        stage.asks = "at_phase(1)"

    return prepare


def callback(act: Act) -> Callable[[Stage], None]:
    """Have the callback do this at each event from the phase on."""

    def prepare(stage: Stage) -> None:
        def on_event(_event: Event) -> None:
            if stage.arrived.is_set() and stage.is_armed:
                act()

        stage.on_event = on_event

    return prepare


# -- what they do ------------------------------------------------------------------------------------------------------


def raises(make: Callable[[], BaseException]) -> Act:
    """Return an act that raises."""

    def act() -> NoReturn:
        raise make()

    return act


def hangs() -> None:
    """Block the thread."""
    threading.Event().wait(120)


async def never() -> None:
    """Wait for ever."""
    await asyncio.Event().wait()


async def deaf() -> None:
    """Ignore the first cancellations; then give in, or the process could not be looked at afterwards."""
    for _ in range(3):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


async def cancels_itself() -> None:
    """Cancel the own task."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


def circular() -> object:
    """Make a value that contains itself."""
    value: list[object] = []
    value.append(value)
    return value
