"""A task of NeMo Gym's interface for sandboxes, with our provider by its name."""

import asyncio
import contextlib
from collections.abc import Iterator

from nemo_gym.sandbox.api import AsyncSandbox
from nemo_gym.sandbox.providers.base import SandboxSpec


async def _task() -> None:
    sandbox = AsyncSandbox({"rlm_broker": {"limits": {"max_processes": 100}}})
    await sandbox.start(SandboxSpec(files={"/w/numbers.txt": "3\n1\n"}, env={"A": "x"}, resources={"memory_mib": 512}))
    done = await sandbox.exec("sort -n numbers.txt; echo $A >&2; exit 3")
    assert (done.stdout, done.stderr, done.return_code) == ("1\n3\n", "x\n", 3), done
    assert (await sandbox.exec("sleep 1000", timeout_s=0.1)).error_type == "timeout"
    await sandbox.stop()


def task() -> None:
    """A sandbox with files, variables and a limit; a command, and one that takes too long."""
    asyncio.run(_task())


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """A sandbox that has run a command."""
    with asyncio.Runner() as runner:
        sandbox = AsyncSandbox({"rlm_broker": {}})
        runner.run(sandbox.start(SandboxSpec()))
        assert runner.run(sandbox.exec("echo 1")).stdout == "1\n"
        yield
        runner.run(sandbox.stop())
