"""Shared sandboxes of the process: the same for all callers, new after a fork, closed at exit."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from rlm_broker import ConfigurationError, Limits, ReplLimits, Sandbox
from rlm_broker.sandbox.shared import close_all
from tests.support.forked_python import python
from tests.support.places import PROJECT
from tests.support.waiting import until, until_now


def test_equal_settings_share_a_sandbox_from_any_thread() -> None:
    found: list[Sandbox] = []
    threads = [threading.Thread(target=lambda: found.append(Sandbox.shared(ReplLimits(cpu_s=5)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(sandbox) for sandbox in found}) == 1
    assert Sandbox.shared(ReplLimits(cpu_s=6)) is not found[0]
    with found[0].repl("text") as repl:
        assert repl.execute("len(context)").stdout == "4\n"
    close_all()
    assert Sandbox.shared(ReplLimits(cpu_s=5)) is not found[0]  # a closed sandbox is not returned again
    close_all()


def test_equal_bounds_share_a_sandbox() -> None:
    """Equal bounds share a sandbox, even if other settings differ."""
    try:
        assert Sandbox.shared() is Sandbox.shared(ReplLimits()) is Sandbox.shared(Limits(max_depth=3))
    finally:
        close_all()


def test_bad_settings_of_a_shared_sandbox_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no isolation level 'x'"):
        Sandbox.shared(isolation="x")


@pytest.mark.parametrize("isolation", ["auto", "standard", "process"])
def test_shared_sandbox_is_cleaned_up_at_exit_and_fork(isolation: str, tmp_path: Path) -> None:
    """A shared sandbox leaves no process or folder at exit or in a fork."""
    program = (
        "import os, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from rlm_broker import Sandbox\n"
        "def use():\n"
        f"    with Sandbox.shared(isolation={isolation!r}).repl('text') as repl:\n"
        "        assert repl.execute('len(context)').stdout == '4\\n'\n"
        "use()\n"
        "pid = os.fork()\n"
        "use()\n"
        "if pid:\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    print('both')\n"
    )
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    done = python("-c", program, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "both\n", "")
    assert list(tmp_path.iterdir()) == []


def test_sandbox_that_opens_keeps_no_caller_of_another_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for a sandbox that is open returns while another one opens; calls for that one open it once."""
    slow, may_open, openings, open_it = ReplLimits(cpu_s=7), threading.Event(), list[Sandbox](), Sandbox._open

    async def slowly(self: Sandbox) -> None:
        if self.limits == slow:
            openings.append(self)
            await until(may_open.is_set)
        await open_it(self)

    monkeypatch.setattr(Sandbox, "_open", slowly)
    try:
        fast = Sandbox.shared()
        callers = [threading.Thread(target=Sandbox.shared, args=(slow,)) for _ in range(2)]
        for caller in callers:
            caller.start()
        until_now(lambda: openings)
        assert Sandbox.shared() is fast
        assert asyncio.run(Sandbox.ashared()) is fast
        may_open.set()
        for caller in callers:
            caller.join()
        assert openings == [Sandbox.shared(slow)]
    finally:
        close_all()


def test_stats_say_what_lives_and_what_was_started() -> None:
    with Sandbox(warm=0) as sandbox:
        before = sandbox.stats()
        with sandbox.repl() as repl, sandbox.repl():
            during = sandbox.stats()
            repl.execute("1")
        after = sandbox.stats()
    assert (before.workers, during.workers, after.workers) == (0, 2, 0)
    assert during.started - before.started == 2
    assert after.started == during.started
    assert sandbox.stats().workers == 0
