"""The tools, as the SDK's own client calls them: over stdio and over HTTP, in both eras of the protocol."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from mcp import Client, MCPError
from mcp.types import CallToolResult, ImageContent, TextContent

from rlm_broker import RLM, Model
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.hosting.runs import HostedRuns
from rlm_broker.serve.mcp import forms, work
from rlm_broker.serve.mcp.server import ToolCall
from rlm_broker.serve.mcp.work import Work
from tests.support.fake_openai import FakeOpenAI
from tests.support.mcp_clients import (
    FAILS,
    HELD,
    PAIRED,
    answer_to,
    held,
    over_http,
    over_stdio,
    served,
    server_parameters,
)
from tests.support.waiting import WAIT_S


class Silent(ToolCall):
    """The call of a client that reads no progress."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(None, owner)  # type: ignore[arg-type]

    async def tell(self, doing: str) -> None:
        """Tell the client nothing."""


pytestmark = pytest.mark.asyncio(loop_scope="module")
MODERN, LEGACY = "2026-07-28", "legacy"
CONNECTIONS = [("stdio", "auto"), ("stdio", LEGACY), ("http", MODERN), ("http", LEGACY)]
TOOLS = ["execute_python", "ask_large_context", "get_run", "stop_run", "repl_files", "close_repl"]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # 1 x 1


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeOpenAI]:
    with FakeOpenAI(answer_to) as fake:
        yield fake


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    (folder / "logs").mkdir()
    (folder / "logs" / "a.txt").write_text("one\ntwo\n")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(provider: FakeOpenAI) -> AsyncIterator[str]:
    rlm = RLM(Model(name="test", base_url=provider.base_url, api_key="k"))
    async with rlm, HeldRepls() as repls, held(served(rlm, repls)) as address:
        yield address


@pytest.fixture(scope="module", autouse=True)
def _tells_often() -> Iterator[None]:
    """Let the server of this process tell progress soon. The one over stdio keeps its own period."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "PROGRESS_S", 0.05)
        yield


@pytest.fixture(scope="module", params=CONNECTIONS, ids="-".join)
def connection(request: pytest.FixtureRequest) -> tuple[str, str]:
    transport, mode = request.param
    return transport, mode


@pytest.fixture(scope="module")
def is_http(connection: tuple[str, str]) -> bool:
    return connection[0] == "http"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(connection: tuple[str, str], provider: FakeOpenAI, root: Path, url: str) -> AsyncIterator[Client]:
    transport, mode = connection
    one = over_http(url, mode) if transport == "http" else over_stdio(server_parameters(provider, root), mode)
    async with held(one):
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools(url: str) -> AsyncIterator[Client]:
    """A client for what does not depend on the connection."""
    async with held(over_http(url, MODERN)) as one:
        yield one


def text(result: CallToolResult) -> str:
    first = result.content[0]
    assert isinstance(first, TextContent)
    return first.text


async def called(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """The structured result of a call that succeeds."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, text(result)
    return dict(result.structured_content)


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    """The sentence of a call that fails."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, text(result)
    assert result.structured_content is None
    assert len(text(result).splitlines()) == 1
    return text(result)


async def test_tools_tell_forms_and_limits(client: Client, is_http: bool) -> None:
    """Each tool has typed arguments and results, and says what a model must know of it."""
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(tools) == TOOLS
    assert all(tool.output_schema and tool.input_schema["additionalProperties"] is False for tool in tools.values())
    assert "60 s" in str(tools["execute_python"].description)
    assert "no network" in str(tools["execute_python"].description)
    assert ("paths" in tools["ask_large_context"].input_schema["properties"]) is not is_http


async def test_variables_live_on_by_handle(client: Client) -> None:
    """A block's outcome is text as a REPL shows it, and a structured result; its REPL goes on by its handle."""
    first = await client.call_tool("execute_python", {"code": "a = [1, 2]\nprint('hi')\na"})
    ran = first.structured_content
    assert (ran["status"], ran["stdout"], ran["pictures"]) == ("ok", "hi\n[1, 2]\n", 0)
    assert ran["variables"] == [{"name": "a", "type": "list", "size": 2}]
    assert text(first) == f"hi\n[1, 2]\n[repl: {ran['repl']}]"
    again = await called(client, "execute_python", code="len(a)", repl=ran["repl"])
    assert (again["stdout"], again["repl"]) == ("2\n", ran["repl"])
    other = await client.call_tool("execute_python", {"code": "a"})
    assert not other.is_error
    assert other.structured_content["status"] == "error"
    assert "NameError" in text(other)
    assert await called(client, "close_repl", repl=ran["repl"]) == {"repl": ran["repl"], "closed": True}
    assert "no REPL" in await refused(client, "execute_python", code="a", repl=ran["repl"])


async def test_long_text_says_its_cut(tools: Client) -> None:
    ran = await tools.call_tool("execute_python", {"code": "print('x' * 50_000); 1 / 0"})
    assert len(text(ran)) <= 20_000
    assert "characters cut" in text(ran)
    assert "ZeroDivisionError" in text(ran)
    assert len(ran.structured_content["stdout"]) < 20_100


async def test_picture_comes_as_an_image(client: Client) -> None:
    code = f"""
import base64
class Picture:
    def _repr_png_(self): return base64.b64decode({PIXEL!r})
display(Picture())
"""
    shown = await client.call_tool("execute_python", {"code": code})
    image = shown.content[1]
    assert isinstance(image, ImageContent)
    assert (image.mime_type, image.data, shown.structured_content["pictures"]) == ("image/png", PIXEL, 1)


async def test_files_go_in_out_and_away(tools: Client) -> None:
    repl = (await called(tools, "execute_python", code="import pathlib"))["repl"]
    raw = base64.b64encode(b"\xff\x00").decode()
    written = await called(tools, "repl_files", repl=repl, action="write", path="in/a.txt", text="grün")
    assert written["bytes"] == 5
    await called(tools, "repl_files", repl=repl, action="write", path="b.bin", base64=raw)
    assert (await called(tools, "execute_python", code="open('in/a.txt').read()", repl=repl))["stdout"] == "'grün'\n"
    assert (await called(tools, "repl_files", repl=repl, action="read", path="in/a.txt"))["text"] == "grün"
    assert (await called(tools, "repl_files", repl=repl, action="read", path="b.bin"))["base64"] == raw
    listed = await called(tools, "repl_files", repl=repl, action="list")
    assert listed["entries"] == [
        {"name": "b.bin", "kind": "file", "bytes": 2},
        {"name": "in", "kind": "folder", "bytes": listed["entries"][1]["bytes"]},
    ]
    await called(tools, "repl_files", repl=repl, action="delete", path="b.bin")
    assert "No such file" in await refused(tools, "repl_files", repl=repl, action="read", path="b.bin")
    assert "without '..'" in await refused(tools, "repl_files", repl=repl, action="read", path="../x")
    assert "either text or base64" in await refused(tools, "repl_files", repl=repl, action="write", path="c")
    assert "not for list" in await refused(tools, "repl_files", repl=repl, action="list", text="x")


async def test_question_about_text_is_answered(tools: Client) -> None:
    asked = await tools.call_tool("ask_large_context", {"question": "How long?", "context": "abc"})
    answer = asked.structured_content
    assert (answer["state"], answer["answer"], answer["turns"], answer["tokens"]) == ("ended", "3 characters", 1, 8)
    assert text(asked) == "3 characters"
    assert (await called(tools, "get_run", run=answer["run"]))["answer"] == "3 characters"


async def test_long_run_returns_its_handle(tools: Client) -> None:
    """A run that takes longer than wait_s is waited for by its handle, and tells what it does."""
    asked = await tools.call_tool("ask_large_context", {"question": PAIRED, "context": "abcd", "wait_s": 0})
    run = asked.structured_content["run"]
    assert asked.structured_content["state"] in ("queued", "running")
    assert f'get_run(run="{run}")' in text(asked)
    waits = asyncio.create_task(called(tools, "get_run", run=run, wait_s=WAIT_S))
    second = asyncio.create_task(called(tools, "ask_large_context", question=PAIRED, context="ab"))
    assert (await waits)["answer"] == "4 characters"
    assert (await second)["answer"] == "2 characters"


async def test_progress_is_told_until_stopped(client: Client) -> None:
    """A wait tells its progress, and a run that is stopped tells its best answer, or that it has none."""
    told: list[float] = []
    is_told = asyncio.Event()

    async def tell(progress: float, total: float | None, message: str | None) -> None:
        assert total is None
        told.append(progress)
        if "calls" in str(message):
            is_told.set()

    asked = asyncio.create_task(
        client.call_tool("ask_large_context", {"question": HELD, "context": "abcd"}, progress_callback=tell)
    )
    await asyncio.wait_for(is_told.wait(), WAIT_S)
    assert told[0] > 0
    assert told == sorted(told)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked


async def test_stopped_run_has_ended(tools: Client) -> None:
    run = (await called(tools, "ask_large_context", question=HELD, context="abcd", wait_s=0))["run"]
    stopped = await tools.call_tool("stop_run", {"run": run})
    assert stopped.structured_content["state"] == "ended"
    again = await tools.call_tool("get_run", {"run": run})
    assert again.structured_content == stopped.structured_content


async def test_failed_run_is_a_sentence(tools: Client) -> None:
    failed = await tools.call_tool("ask_large_context", {"question": FAILS, "context": "abcd"})
    assert failed.is_error
    assert failed.structured_content["state"] == "ended"
    assert "no such thing" in failed.structured_content["error"]
    assert text(failed).startswith("The run has ended without an answer: ")


async def test_cancelled_question_ends_its_run(client: Client, provider: FakeOpenAI) -> None:
    """No client knows the handle of a run whose call was cancelled, so the run ends down to the provider's socket."""
    provider.arrived.clear()
    provider.disconnected.clear()
    asked = asyncio.create_task(client.call_tool("ask_large_context", {"question": HELD, "context": "abcd"}))
    assert await asyncio.to_thread(provider.arrived.wait, WAIT_S)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
    assert await asyncio.to_thread(provider.disconnected.wait, WAIT_S)


async def test_cancelled_block_is_interrupted_and_variables_stay(client: Client) -> None:
    repl = (await called(client, "execute_python", code="n = 1"))["repl"]
    endless = "try:\n    open('begun', 'w')\n    while True: pass\nexcept KeyboardInterrupt:\n    n = 2\n    raise"
    block = asyncio.create_task(client.call_tool("execute_python", {"code": endless, "repl": repl}))
    async with asyncio.timeout(WAIT_S):
        while not (await called(client, "repl_files", repl=repl, action="list"))["entries"]:
            await asyncio.sleep(0)
    assert "runs a block" in await refused(client, "execute_python", code="n", repl=repl)
    block.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await block
    async with asyncio.timeout(WAIT_S):  # the cancellation and the next call may overtake each other over HTTP
        while (again := await client.call_tool("execute_python", {"code": "n", "repl": repl})).is_error:
            await asyncio.sleep(0)
    assert again.structured_content["stdout"] == "2\n"


async def test_cancelled_block_leaves_no_repl_that_no_client_knows() -> None:
    """The call is cancelled while its REPL opens, and while its block runs: neither tells the id of the REPL."""
    rlm = RLM("offline")
    async with rlm, HeldRepls() as repls:
        tools = Work(rlm, HostedRuns(rlm), repls)
        for is_running in (False, True):
            call = Silent(Owner("ann"))
            asked = asyncio.create_task(tools.done(call, forms.Code(code="import time; time.sleep(600)")))
            async with asyncio.timeout(WAIT_S):
                while not (repls.all() and repls.all()[0].users) if is_running else not repls._opening:
                    await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            async with asyncio.timeout(WAIT_S):
                while repls._opening or repls.all() or repls._closing:
                    await asyncio.sleep(0)
        kept = await tools.done(call, forms.Code(code="1"))
        assert [held.id for held in repls.all()] == [kept.structured_content["repl"]]


async def test_errors_are_sentences(client: Client) -> None:
    """Wrong arguments, dead handles and wrong paths are answered by one sentence that says what to do."""
    assert (await refused(client, "execute_python")).endswith("cannot be used: code is missing")
    assert "there is no argument 'cod'" in await refused(client, "execute_python", code="1", cod="2")
    assert "no REPL 'x'" in await refused(client, "execute_python", code="1", repl="x")
    assert "no REPL 'x'" in await refused(client, "repl_files", repl="x", action="list")
    assert "no run 'x'" in await refused(client, "get_run", run="x")
    assert "no run 'x'" in await refused(client, "stop_run", run="x")
    assert "wait_s" in await refused(client, "get_run", run="x", wait_s=-1)
    assert "context" in await refused(client, "ask_large_context", question="?")
    assert "question is empty" in await refused(client, "ask_large_context", question=" ", context="a")
    with pytest.raises(MCPError, match="did you mean execute_python"):
        await client.call_tool("execute_pyton", {"code": "1"})


async def test_paths_stay_below_the_root(client: Client, is_http: bool, root: Path, tmp_path: Path) -> None:
    """Files below the root are read; what lies outside, also behind a link, is refused; over HTTP all paths are."""
    if is_http:
        assert "over HTTP no file" in await refused(client, "ask_large_context", question="How long?", paths=["logs"])
        return
    (tmp_path / "secret.txt").write_text("s")
    (root / "way").unlink(missing_ok=True)
    (root / "way").symlink_to(tmp_path)
    answer = await called(client, "ask_large_context", question="How long?", paths=["logs/a.txt"])
    assert answer["answer"] == "8 characters"
    for path in ("../x", "/etc/passwd", "way/secret.txt", "way", "logs/../../x", "way/*.txt"):
        assert "is not below" in await refused(client, "ask_large_context", question="How long?", paths=[path])
    missing = await client.call_tool("ask_large_context", {"question": "How long?", "paths": ["logs/b.txt"]})
    assert "does not exist" in text(missing)
    both = await refused(client, "ask_large_context", question="How long?", paths=["logs"], context="x")
    assert both == "give either paths or context"


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
async def test_handles_of_others_are_unknown(url: str, mode: str) -> None:
    """An owner's handles do not exist for another owner."""
    async with held(over_http(url, mode, "ann")) as ann, held(over_http(url, mode, "bob")) as bob:
        repl = (await called(ann, "execute_python", code="n = 1"))["repl"]
        run = (await called(ann, "ask_large_context", question="How long?", context="abc"))["run"]
        for tool, arguments in {
            "execute_python": {"code": "n", "repl": repl},
            "repl_files": {"repl": repl, "action": "list"},
            "close_repl": {"repl": repl},
            "get_run": {"run": run},
            "stop_run": {"run": run},
        }.items():
            assert f"there is no {'run' if 'run' in tool else 'REPL'}" in await refused(bob, tool, **arguments)
        assert (await called(ann, "execute_python", code="n", repl=repl))["stdout"] == "1\n"
