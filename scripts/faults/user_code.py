"""Faults of the user's own functions: clients, tools and callbacks."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.events.event import Event
from scripts.faults.cell import DEEP, QUERY
from scripts.faults.stage import Stage

Gate = Callable[[LMRequest], Awaitable[object]]


def nothing(_stage: Stage) -> None:
    """Inject no further fault: the user's function is the fault."""


# -- clients -----------------------------------------------------------------------------------------------------------


def client_raises(make: Callable[[], BaseException]) -> Callable[[Stage], None]:
    """Have the client raise at the phase."""

    async def gate(_request: LMRequest) -> object:
        raise make()

    return _with_gate(gate)


def client_returns(value: object) -> Callable[[Stage], None]:
    """Have the client return at the phase what is no reply."""

    async def gate(_request: LMRequest) -> object:
        return value

    return _with_gate(gate)


async def _never(_request: LMRequest) -> object:
    await asyncio.Event().wait()
    return None


async def _deaf(_request: LMRequest) -> object:
    """Ignore the first cancellations; then give in, or the process could not be looked at afterwards."""
    for _ in range(3):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
    return None


async def _cancels_itself(_request: LMRequest) -> object:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    return None


def _with_gate(gate: Gate) -> Callable[[Stage], None]:
    def prepare(stage: Stage) -> None:
        async def armed(request: LMRequest) -> object:
            return await gate(request) if stage.is_armed else None

        stage.at_gate = armed
        stage.limits = stage.limits.model_copy(update={"call_timeout_s": 1.0})

    return prepare


client_never_returns = _with_gate(_never)
client_is_deaf = _with_gate(_deaf)
client_cancels_itself = _with_gate(_cancels_itself)


# -- tools -------------------------------------------------------------------------------------------------------------


def tool(call: Callable[[], Any]) -> Callable[[Stage], None]:
    """Have a plain tool do `call` at the phase."""

    def prepare(stage: Stage) -> None:
        def at_phase(number: int) -> Any:
            """Do what the fault says."""
            del number
            stage.reach(QUERY)
            stage.reach(DEEP)
            return call()

        _offer(stage, at_phase)

    return prepare


def async_tool(call: Callable[[], Awaitable[Any]]) -> Callable[[Stage], None]:
    """Have an awaited tool do `call` at the phase."""

    def prepare(stage: Stage) -> None:
        async def at_phase(number: int) -> Any:
            """Do what the fault says."""
            del number
            stage.reach(QUERY)
            stage.reach(DEEP)
            return await call()

        _offer(stage, at_phase)

    return prepare


def _offer(stage: Stage, function: Callable[..., Any]) -> None:
    stage.options["tools"] = {"at_phase": function}
    stage.asks = "at_phase(1)"


def exits() -> None:
    """Raise SystemExit."""
    raise SystemExit(3)


def interrupts() -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


def hangs() -> None:
    """Block the thread."""
    threading.Event().wait(120)


async def deaf() -> None:
    """Ignore the first cancellations."""
    for _ in range(3):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


def circular() -> object:
    """Make a value that contains itself."""
    value: list[object] = []
    value.append(value)
    return value


# -- callbacks ---------------------------------------------------------------------------------------------------------


def callback_raises(make: Callable[[], BaseException]) -> Callable[[Stage], None]:
    """Have the callback raise at each event from the phase on."""

    def prepare(stage: Stage) -> None:
        def on_event(_event: Event) -> None:
            if stage.arrived.is_set() and stage.is_armed:
                raise make()

        stage.on_event = on_event

    return prepare
