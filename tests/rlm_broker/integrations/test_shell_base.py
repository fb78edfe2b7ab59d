"""A sandbox as a machine with a shell: command lines and files, as the adapters for agents use it."""

import asyncio
import gc
import os
from collections.abc import Iterator

import pytest

from rlm_broker import ConfigurationError, FileRefused, ReplClosed, ReplLimits, Sandbox
from rlm_broker.integrations.shell_base import LIMITS, Shell, absolute, exit_code_of, stderr_of
from tests.support.scratch import TEMPORARY
from tests.support.waiting import WAIT_S, until_now


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS, "strict", warm=0) as opened:
        yield opened


@pytest.fixture
def shell(sandbox: Sandbox) -> Iterator[Shell]:
    with Shell(sandbox=sandbox, env={"NAME": "lens"}) as opened:
        yield opened


def test_line_runs_as_in_a_shell(shell: Shell) -> None:
    result = shell.run(
        "pwd; echo $NAME $MORE; cat; echo err >&2; exit 3", input="in\n", env={"MORE": "x"}, cwd=TEMPORARY
    )
    assert (result.stdout, result.stderr, result.exit_code) == ("/w\nlens x\nin\n", "err\n", 3)
    mixed = shell.run("echo 1; echo 2 >&2; echo 3\nif", is_mixed=True)
    assert mixed.stdout.startswith("1\n2\n3\n")
    assert "yntax error" in mixed.stdout
    assert shell.run(["printf", "%s", "$NAME"]).stdout == "$NAME"


def test_line_longer_than_an_argument_runs_as_it_is(shell: Shell) -> None:
    text = "é'" * 200_000
    shell.run(f"cat > out.txt <<'END'\n{text}\nEND\necho $# > count.txt")
    assert shell.read("out.txt") == f"{text}\n".encode()
    assert shell.read("count.txt") == b"0\n"


def test_end_is_one_number(shell: Shell) -> None:
    codes = [exit_code_of(shell.run(line, timeout_s=1)) for line in ("exit 3", "kill -9 $$", "sleep 1000", "none")]
    assert codes == [3, 137, 124, 127]
    said = stderr_of(shell.run("echo mine >&2; sleep 1000", timeout_s=0.1))
    assert said.startswith("mine\n\nit ran longer than timeout_s")


def test_paths_are_absolute_or_from_the_home(shell: Shell) -> None:
    shell.write("a/b.txt", b"b")
    for path in ("/w/a/b.txt", f"{TEMPORARY}/a/b.txt", "a/../a/./b.txt", "/w/x/../a/b.txt"):
        assert shell.read(path) == b"b", path
    assert absolute("../etc") == "/etc"
    for call, kind in (
        (lambda: shell.read("none"), "missing"),
        (lambda: shell.read("/w/a"), "folder"),
        (lambda: shell.write("/usr/x", b""), "permission"),
        (lambda: shell.write("../usr/x", b""), "permission"),
        (lambda: shell.read("a/b.txt", 0), "too_large"),
        (lambda: shell.run("ls", cwd="none"), "missing"),
    ):
        with pytest.raises(FileRefused) as refused:
            call()
        assert refused.value.kind == kind


async def test_commands_run_at_the_same_time_and_end_with_their_caller(sandbox: Sandbox) -> None:
    async with Shell(sandbox=sandbox) as shell:
        meets = "echo > {}; while [ ! -e {} ]; do sleep 0.01; done"
        both = await asyncio.gather(shell.arun(meets.format("a", "b")), shell.arun(meets.format("b", "a")))
        assert [result.exit_code for result in both] == [0, 0]
        waiting = asyncio.create_task(shell.arun("echo > begun; sleep 1000"))
        assert (await shell.arun("while [ ! -e begun ]; do sleep 0.01; done")).exit_code == 0
        waiting.cancel()
        await asyncio.wait([waiting], timeout=WAIT_S)
        assert waiting.cancelled()
        await shell.awrite("x", b"1")
        assert await shell.aread("x") == b"1"
    with pytest.raises(ReplClosed):
        await shell.arun("true")
    assert shell.is_closed


def test_files_outlive_a_command_past_a_limit(sandbox: Sandbox) -> None:
    with Shell(sandbox=sandbox, limits=ReplLimits(memory_bytes=64 << 20)) as shell:
        shell.write("kept", b"kept")
        result = shell.run(["python3", "-c", "x = [bytearray(1 << 20) for _ in range(1000)]"])
        assert exit_code_of(result) in (1, 137)
        assert shell.read("kept") == b"kept"


async def test_folder_that_cannot_be_packed_whole_is_refused(sandbox: Sandbox) -> None:
    async with Shell(sandbox=sandbox, limits=LIMITS.replace(scratch_bytes="1MB")) as shell:
        await shell.aunpack(await shell.apack("/w"), "made/by it")
        await shell.arun("for n in 1 2 3 4 5 6; do truncate --size=1M made/$n; done")
        for work, why in (
            (shell.apack("made"), "made cannot be packed: it is too large"),
            (shell.apack("none"), "'/w/none'"),
            (shell.aunpack(b"no archive", "x"), "x cannot be written: tar: "),
        ):
            with pytest.raises(FileRefused, match=why):
                await work


def test_dropped_shell_ends_its_commands(sandbox: Sandbox) -> None:
    shell = Shell(sandbox=sandbox)
    repl = shell.open()
    del shell
    gc.collect()
    until_now(lambda: repl.is_closed)


def test_sandbox_that_runs_no_programs_is_refused() -> None:
    with Sandbox(isolation="standard", warm=0) as sandbox, pytest.raises(ConfigurationError, match="'strict'"):
        Shell(sandbox=sandbox).run("true")


def test_forked_process_cannot_use_a_shell(shell: Shell) -> None:
    shell.run("true")
    pid = os.fork()
    if pid == 0:
        try:
            shell.run("true")
        except ConfigurationError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
