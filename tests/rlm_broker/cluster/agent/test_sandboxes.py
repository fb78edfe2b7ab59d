"""Sandboxes of a node: one for equal settings, and few without a run."""

import asyncio

import pytest

from rlm_broker.cluster.agent import sandboxes as module
from rlm_broker.cluster.agent.sandboxes import Sandboxes
from rlm_broker.cluster.described import limits_spec
from rlm_broker.cluster.messages import EngineSpec
from rlm_broker.errors import ConfigurationError, SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.processes import living_below

pytestmark = pytest.mark.filterwarnings("ignore::rlm_broker.sandbox.workers.levels.IsolationWarning")


def engine(seed: int) -> EngineSpec:
    return EngineSpec(limits_spec(Limits(memory_bytes=1 << 30)), "process", seed=seed)


async def test_equal_settings_share_one_sandbox() -> None:
    """Runs at the same time open one; its settings are those of the message."""
    sandboxes = Sandboxes()

    async def used() -> Sandbox:
        async with sandboxes.held(engine(1)) as sandbox, sandbox.repl("x") as repl:
            assert (await repl.aexecute("print(context)")).stdout == "x\n"
            return sandbox

    first, *others = await asyncio.gather(*(used() for _ in range(3)))
    assert all(other is first for other in others)
    assert (first.level, first.seed, first.limits.memory_bytes) == ("process", 1, 1 << 30)
    await sandboxes.aclose()


async def test_only_few_stay_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used one is closed, and none that a run has."""
    monkeypatch.setattr(module, "MOST_IDLE", 1)
    sandboxes = Sandboxes()
    async with sandboxes.held(engine(1)) as one, sandboxes.held(engine(2)):
        pass
    async with sandboxes.held(engine(1)) as again:
        assert again is not one or again.stats().started
    before = living_below()
    await sandboxes.aclose()
    assert not living_below()
    assert before


async def test_a_failure_is_no_settings_fault_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that could not be opened is tried again by the next run."""
    sandboxes = Sandboxes()
    entered = Sandbox.__aenter__

    async def failing(_: Sandbox) -> Sandbox:
        monkeypatch.setattr(Sandbox, "__aenter__", entered)
        raise SandboxFailed("no process")

    monkeypatch.setattr(Sandbox, "__aenter__", failing)
    with pytest.raises(SandboxFailed, match="no process"):
        async with sandboxes.held(engine(1)):
            pass
    async with sandboxes.held(engine(1)) as sandbox:
        assert sandbox.level == "process"
    with pytest.raises(ConfigurationError):
        async with sandboxes.held(EngineSpec({}, "no such level")):
            pass
    await sandboxes.aclose()
    assert not living_below()
