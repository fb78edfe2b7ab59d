"""Functions of the user's may do anything: it ends only their call."""

import asyncio
import multiprocessing
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed, OutputInvalid, RlmBrokerError
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from tests.e2e.conftest import MakeRLM
from tests.support.tables import table
from tests.support.waiting import WAIT_S, for_ever, until

CATCHES = "try: result = t()\nexcept Exception as error: result = str(error)\nFINAL(str(result))"


def block(code: str) -> str:
    return f"```repl\n{code}\n```"


def still_works(sandbox: Sandbox) -> None:
    assert RLM(ScriptedClient(["FINAL(fine)"]), sandbox=sandbox).completion("c", "q").response == "fine"


async def exits() -> None:
    sys.exit(3)


def generates() -> Iterator[int]:
    yield 1
    raise AssertionError("it is run")


def takes_long() -> None:
    raise TimeoutError("the database did not answer")


def opens_a_file() -> None:
    open("/home/somebody/private/file.txt")  # noqa: SIM115


class Adder:
    def __call__(self, a: int = 1) -> int:
        return a + 1


@table(
    "tool, told",
    [
        (exits, "SystemExit: 3"),
        (generates, r"^t\(\): its result is a generator, which does not cross: return a list$"),
        (takes_long, r"^t\(\) raised TimeoutError: the database did not answer"),
        (opens_a_file, "^(?!.*somebody).*file.txt"),  # no path of the host reaches the model
        (Adder(), "^2$"),
    ],
)
def test_what_a_tool_does_ends_its_call_alone(tool: Any, told: str, open_sandbox: Sandbox, rlm: MakeRLM) -> None:
    done = rlm(ScriptedClient([block(CATCHES)]), tools={"t": tool}).completion("c", "q")
    assert re.search(told, done.response or "", re.DOTALL)
    still_works(open_sandbox)


def test_async_model_that_exits_fails_its_call(open_sandbox: Sandbox, rlm: MakeRLM) -> None:
    async def model(_messages: list[dict[str, Any]]) -> str:
        sys.exit(3)

    with pytest.raises(ModelFailed, match="SystemExit"):
        rlm(model).completion("c", "q")
    still_works(open_sandbox)


def test_callback_that_exits_stops_nothing(rlm: MakeRLM) -> None:
    done = rlm(ScriptedClient(["FINAL(1)"]), on_event=lambda _: sys.exit(1)).completion("c", "q")
    assert done.response == "1"


def test_prompt_function_that_exits_ends_its_run(open_sandbox: Sandbox, rlm: MakeRLM) -> None:
    with pytest.raises(SystemExit):
        rlm(ScriptedClient([]), instructions=lambda _: sys.exit(3)).completion("c", "q")
    still_works(open_sandbox)


def test_hung_tools_leave_other_rlms_alone(open_sandbox: Sandbox, rlm: MakeRLM) -> None:
    stop = threading.Event()
    code = (
        "import threading\ndef ask():\n    try: hang()\n    except Exception: pass\n"
        "threads = [threading.Thread(target=ask) for _ in range(40)]\n"
        "for t in threads: t.start()\nfor t in threads: t.join()\n"
    )
    try:
        hangs = RLM(
            ScriptedClient([block(code), block(code + "FINAL(1)")]),
            tools={"hang": lambda: stop.wait()},
            limits=Limits(tool_timeout_s=0.3),
            sandbox=open_sandbox,
        )
        assert hangs.completion("c", "q").response == "1"
        other = rlm(ScriptedClient([block(CATCHES)]), tools={"t": lambda: 7}, limits=Limits(tool_timeout_s=30))
        assert other.completion("c", "q").response == "7"
    finally:
        stop.set()


SHARED = RLM(FunctionClient(lambda _: block(CATCHES)), tools={"t": lambda: 7})


def _ask_shared(_number: int) -> str | None:
    return SHARED.completion("c", "q").response


def test_rlm_used_before_a_fork_works_after() -> None:
    assert _ask_shared(0) == "7"
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map_async(_ask_shared, range(2)).get(WAIT_S) == ["7", "7"]


def test_failing_child_leaves_its_siblings_alone(rlm: MakeRLM) -> None:
    """A child that fails in the user's code leaves its siblings alone."""

    def handler(run: str, _depth: int, ours: QueryHandler) -> QueryHandler:
        if run == "1.2":
            raise ValueError("boom")
        return ours

    replies = [block("FINAL(str(rlm_query_batched(['a', 'b', 'c'])))"), *["FINAL(fine)"] * 3]
    limits = Limits(max_depth=2, max_concurrent_children=1)
    done = rlm(ScriptedClient(replies), recursion=handler, limits=limits).completion("", "q")
    assert done.response == "['fine', 'Error: ValueError: boom', 'fine']"


def test_unsent_calls_are_not_counted(rlm: MakeRLM) -> None:
    async def model(messages: list[dict[str, Any]]) -> str:
        if messages[-1]["content"].startswith("p"):
            await for_ever()
        return block("llm_query_batched([f'p{n}' for n in range(18)], timeout_s=0.5)\nFINAL(budget()['max_llm_calls'])")

    limits = Limits(max_concurrent_calls=1, max_llm_calls=19)
    assert rlm(model, limits=limits).completion("c", "q").response == "17"


@table("replies", [["hm", " ", " ", " "], ["I think it is 5.", "perhaps", "who knows", "no"]])
@table("max_depth", [0, 1])
def test_answer_of_wrong_type_is_never_taken(replies: list[str], max_depth: int, rlm: MakeRLM) -> None:
    limits = Limits(max_iterations=1, max_depth=max_depth)
    with pytest.raises(OutputInvalid):
        rlm(ScriptedClient(replies), limits=limits).completion("c", "q", output_type=int)


def test_block_output_is_told_beside_refused_answer(rlm: MakeRLM) -> None:
    client = ScriptedClient([block("print('important')\nFINAL('x')"), "FINAL(5)"])
    assert rlm(client).completion("c", "q", output_type=int).parsed == 5
    told = str(client.requests[1].messages[-1].content)
    assert "important" in told
    assert "Your answer is not of the type that is wanted" in told


def test_persistent_rlm_renews_restarts_per_question() -> None:
    replies = [reply for _ in range(4) for reply in (block("import os; os._exit(1)"), "FINAL(on)")]
    with RLM(ScriptedClient(replies), persistent=True, limits=Limits(max_repl_restarts=1)) as rlm:
        assert [rlm.completion("c", "q").response for _ in range(4)] == ["on"] * 4


def test_long_histories_spoil_no_later_question() -> None:
    script = [block("print('x' * 30_000)\nFINAL(1)")] * 4 + [
        block("import os; os._exit(1)"),
        block("FINAL(context_3[:3])"),
    ]
    limits = Limits(max_frame_bytes=1 << 16, max_observation_chars=100_000)
    with RLM(ScriptedClient(script), persistent=True, limits=limits) as rlm:
        for _ in range(4):
            assert rlm.completion("abc" * 10_000, "q").response == "1"
        assert rlm.completion("small", "q").response == "abc"


def test_value_too_large_is_refused_with_reason() -> None:
    rlm = RLM(ScriptedClient([]), limits=Limits(max_frame_bytes=1 << 16), tools={"BIG": "x" * (1 << 17)})
    with pytest.raises(ConfigurationError, match="the value BIG is too large for a message to a REPL"):
        rlm.completion("c", "q")


def test_close_while_answering_is_a_clear_error() -> None:
    """Closing a persistent `RLM` while it answers is an error of this package."""
    runs = threading.Event()

    def model(messages: list[dict[str, Any]]) -> str:
        if messages[-1]["content"] == "it runs":
            runs.set()
        return block("llm_query('it runs')\nwhile True: pass")

    rlm = RLM(model, persistent=True)
    rlm.__enter__()

    def close_it() -> None:
        runs.wait(WAIT_S)
        rlm.close()

    threading.Thread(target=close_it).start()
    with pytest.raises(RlmBrokerError) as ended:
        rlm.completion("c", "q")
    assert not isinstance(ended.value, LimitReached)


def test_closing_cancels_all_runs_before_it_waits_for_one(open_sandbox: Sandbox) -> None:
    """Two models of which each ends only once the other was cancelled, too."""
    cancelled: list[asyncio.Event] = []
    ended: list[bool] = []

    async def model(_messages: list[dict[str, Any]]) -> str:
        own = asyncio.Event()
        cancelled.append(own)
        try:
            return await for_ever()
        finally:
            own.set()
            for each in cancelled:
                await each.wait()
            ended.append(True)

    async def ask() -> None:
        async with RLM(model, sandbox=open_sandbox) as rlm:
            for _ in range(2):
                rlm.start("text", "?")
            await until(lambda: len(cancelled) == 2)

    asyncio.run(ask())
    assert ended == [True, True]
