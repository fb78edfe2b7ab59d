"""A runtime of verifiers as a rollout uses it: programs, files, its views and its end."""

import asyncio
import contextlib
from collections.abc import Iterator

from verifiers.v1.errors import SandboxError

from rlm_broker.integrations.verifiers import SandboxRuntime, SandboxRuntimeConfig


async def _task() -> None:
    runtime = SandboxRuntime(SandboxRuntimeConfig(limits={"max_processes": 100}))
    await runtime.start()
    await runtime.write("numbers.txt", b"3\n1\n")
    view = runtime.with_env({"A": "x"})
    done = await view.run_program(["sh", "-c", "sort -n numbers.txt; echo $A $B >&2; exit 3"], {"B": "y"})
    assert (done.exit_code, done.stdout, done.stderr) == (3, "1\n3\n", "x y\n"), done
    assert await runtime.read("numbers.txt", max_bytes=4) == b"3\n1\n"
    for call in (runtime.read("numbers.txt", max_bytes=3), runtime.read("none")):
        try:
            await call
        except SandboxError:
            continue
        raise AssertionError
    assert await runtime.alive()
    await runtime.stop()
    assert not await runtime.alive()


def task() -> None:
    """A rollout's steps, one after the other."""
    asyncio.run(_task())


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """A runtime that has run a program."""
    with asyncio.Runner() as runner:
        runtime = SandboxRuntime(SandboxRuntimeConfig())
        runner.run(runtime.start())
        assert runner.run(runtime.run(["echo", "1"], {})).stdout == "1\n"
        yield
        runner.run(runtime.stop())
