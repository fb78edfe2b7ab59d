"""A sandbox as the backend of a deep agent: answers in place of exceptions, and a provider by name."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_broker import ConfigurationError, ReplClosed, ReplLimits
from tests.support.scratch import TEMPORARY
from tests.support.tables import table


@pytest.fixture
def adapter() -> Any:
    from rlm_broker.integrations import langchain

    return langchain


@pytest.fixture
def provider() -> Any:
    from rlm_broker.integrations.deepagents_code import CodeProvider

    return CodeProvider()


@pytest.fixture
def backend(adapter: Any) -> Iterator[Any]:
    with adapter.Backend(env={"NAME": "lens"}) as opened:
        yield opened


def test_command_has_its_errors_in_its_output(backend: Any) -> None:
    answer = backend.execute("echo $NAME; echo err >&2; exit 3")
    assert (answer.output, answer.exit_code, answer.truncated) == ("lens\nerr\n", 3, False)
    late = backend.execute("echo begun; sleep 1000", timeout=1)
    assert late.exit_code == 124
    assert late.output.startswith("begun\n\nError: it ran longer than timeout_s = 1 s")
    assert backend.execute("yes | head -c 3000000").truncated
    refused = backend.execute("x" * (3 << 20))
    assert refused.exit_code == 1
    assert refused.output.startswith("Error: argv and env have")


def test_files_fail_one_by_one_with_codes(backend: Any) -> None:
    up = backend.upload_files([(f"{TEMPORARY}/a/b", b"\xff"), ("b", b""), ("/usr/b", b""), ("/w/a", b"")])
    assert [each.error for each in up] == [None, "invalid_path", "permission_denied", "is_directory"]
    down = backend.download_files(["/w/a/b", "/w/none", "/w/a", "a/b", "/w/a\0"])
    assert [each.content for each in down] == [b"\xff", None, None, None, None]
    assert [each.error for each in down] == [None, "file_not_found", "is_directory", "invalid_path", "invalid_path"]
    full = backend.upload_files([("/w/large", bytes(257 << 20))])
    assert "scratch_bytes leaves room" in full[0].error
    assert backend.read("/w/a/b") == "\ufffd"


async def test_tools_of_an_agent_run_at_the_same_time(adapter: Any) -> None:
    backend = adapter.Backend()
    meets = "echo > {}; while [ ! -e {} ]; do sleep 0.01; done; echo met"
    both = await asyncio.gather(backend.aexecute(meets.format("a", "b")), backend.aexecute(meets.format("b", "a")))
    assert [answer.output for answer in both] == ["met\n", "met\n"]
    await asyncio.to_thread(backend.close)
    with pytest.raises(ReplClosed):
        await backend.aexecute("true")


def test_provider_finds_and_ends_its_sandboxes(provider: Any) -> None:
    assert (provider.metadata.name, provider.metadata.working_dir) == ("rlm_broker", "/w")
    backend = provider.get_or_create(memory_bytes=1 << 30)
    assert backend.execute("echo 1").output == "1\n"
    assert asyncio.run(provider.aget_or_create(sandbox_id=backend.id)) is backend
    provider.delete(sandbox_id=backend.id)
    provider.delete(sandbox_id=backend.id)
    with pytest.raises(ReplClosed):
        backend.execute("true")
    with pytest.raises(Exception, match=f"no sandbox '{backend.id}' lives in this process") as missing:
        provider.get_or_create(sandbox_id=backend.id)
    assert type(missing.value).__name__ == "SandboxNotFoundError"


@table("option", ["image", "network", "snapshot"])
def test_option_beyond_the_walls_is_refused_by_its_name(provider: Any, option: str) -> None:
    with pytest.raises(ConfigurationError, match=option):
        provider.get_or_create(**{option: "x"})


def test_limits_hold_for_all_commands(adapter: Any) -> None:
    with adapter.Backend(limits=ReplLimits(max_processes=8)) as backend:
        assert "Cannot fork" in backend.execute("for i in $(seq 20); do sleep 1 & done; wait").output
