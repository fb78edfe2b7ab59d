"""Functions of the user's may do anything: it ends only their call."""

import multiprocessing
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_broker.clients.function import FunctionClient
from rlm_broker.clients.scripted import ScriptedClient
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed, OutputInvalid, RlmBrokerError
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.transport.connection import QueryHandler
from tests.support.waiting import WAIT_S, for_ever

CATCHES = "try: result = t()\nexcept Exception as error: result = str(error)\nFINAL(str(result))"


def block(code: str) -> str:
    return f"```repl\n{code}\n```"


def still_works() -> None:
    assert RLM(ScriptedClient(["FINAL(fine)"])).completion("c", "q").response == "fine"


def test_an_async_tool_that_exits_ends_its_call_alone() -> None:
    async def t() -> None:
        sys.exit(3)

    done = RLM(ScriptedClient([block(CATCHES)]), tools={"t": t}).completion("c", "q")
    assert "SystemExit: 3" in (done.response or "")
    still_works()


def test_an_async_model_that_exits_is_a_failed_call() -> None:
    async def model(_messages: list[dict[str, Any]]) -> str:
        sys.exit(3)

    with pytest.raises(ModelFailed, match="SystemExit"):
        RLM(model).completion("c", "q")
    still_works()


def test_a_callback_that_exits_stops_nothing() -> None:
    done = RLM(ScriptedClient(["FINAL(1)"]), on_event=lambda _: sys.exit(1)).completion("c", "q")
    assert done.response == "1"


def test_a_prompt_function_that_exits_ends_its_run_and_not_the_loop_that_all_share() -> None:
    with pytest.raises(SystemExit):
        RLM(ScriptedClient([]), system_prompt=lambda _: sys.exit(3)).completion("c", "q")
    still_works()


def test_a_generator_is_no_result_and_is_not_run() -> None:
    def t() -> Iterator[int]:
        yield 1
        raise AssertionError("it is run")

    done = RLM(ScriptedClient([block(CATCHES)]), tools={"t": t}).completion("c", "q")
    assert done.response == "t(): its result is a generator, which does not cross: return a list"


def test_a_timeout_of_the_tools_own_is_told_as_its_own() -> None:
    def t() -> None:
        raise TimeoutError("the database did not answer")

    done = RLM(ScriptedClient([block(CATCHES)]), tools={"t": t}).completion("c", "q")
    assert (done.response or "").startswith("t() raised TimeoutError: the database did not answer")


def test_paths_of_this_machine_do_not_reach_the_model() -> None:
    def t() -> None:
        open("/home/somebody/private/file.txt")  # noqa: SIM115

    done = RLM(ScriptedClient([block(CATCHES)]), tools={"t": t}).completion("c", "q")
    assert "somebody" not in (done.response or "")
    assert "file.txt" in (done.response or "")


def test_an_object_that_can_be_called_is_a_tool() -> None:
    class Adder:
        def __call__(self, a: int = 1) -> int:
            return a + 1

    assert RLM(ScriptedClient([block(CATCHES)]), tools={"t": Adder()}).completion("c", "q").response == "2"


def test_hung_tools_of_one_rlm_leave_those_of_another_alone() -> None:
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
        )
        assert hangs.completion("c", "q").response == "1"
        other = RLM(ScriptedClient([block(CATCHES)]), tools={"t": lambda: 7}, limits=Limits(tool_timeout_s=30))
        assert other.completion("c", "q").response == "7"
    finally:
        stop.set()


SHARED = RLM(FunctionClient(lambda _: block(CATCHES)), tools={"t": lambda: 7})


def _ask_shared(_number: int) -> str | None:
    return SHARED.completion("c", "q").response


def test_what_was_made_and_used_before_a_fork_works_after_it() -> None:
    assert _ask_shared(0) == "7"
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map_async(_ask_shared, range(2)).get(WAIT_S) == ["7", "7"]


def test_a_child_that_fails_in_the_users_code_leaves_its_siblings_alone() -> None:
    def handler(run: str, _depth: int, ours: QueryHandler) -> QueryHandler:
        if run == "1.2":
            raise ValueError("boom")
        return ours

    replies = [block("FINAL(str(rlm_query_batched(['a', 'b', 'c'])))"), *["FINAL(fine)"] * 3]
    limits = Limits(max_depth=2, max_concurrent_children=1)
    done = RLM(ScriptedClient(replies), query_handler=handler, limits=limits).completion("", "q")
    assert done.response == "['fine', 'Error: ValueError: boom', 'fine']"


def test_calls_that_were_never_sent_are_not_counted() -> None:
    async def model(messages: list[dict[str, Any]]) -> str:
        if messages[-1]["content"].startswith("p"):
            await for_ever()
        return block("llm_query_batched([f'p{n}' for n in range(18)], timeout_s=0.5)\nFINAL(budget()['max_llm_calls'])")

    limits = Limits(max_concurrent_calls=1, max_llm_calls=19)
    assert RLM(model, limits=limits).completion("c", "q").response == "17"


@pytest.mark.parametrize("replies", [["hm", " ", " ", " "], ["I think it is 5.", "perhaps", "who knows", "no"]])
@pytest.mark.parametrize("max_depth", [0, 1])
def test_an_answer_of_no_type_is_never_taken_for_one_of_it(replies: list[str], max_depth: int) -> None:
    limits = Limits(max_iterations=1, max_depth=max_depth)
    with pytest.raises(OutputInvalid):
        RLM(ScriptedClient(replies), limits=limits).completion("c", "q", output_type=int)


def test_what_a_block_printed_is_seen_though_its_answer_is_refused() -> None:
    client = ScriptedClient([block("print('important')\nFINAL('x')"), "FINAL(5)"])
    assert RLM(client).completion("c", "q", output_type=int).parsed == 5
    told = str(client.requests[1].messages[-1].content)
    assert "important" in told
    assert "Your answer is not of the type that is wanted" in told


def test_a_persistent_rlm_has_its_restarts_anew_for_each_question() -> None:
    replies = [reply for _ in range(4) for reply in (block("import os; os._exit(1)"), "FINAL(on)")]
    with RLM(ScriptedClient(replies), persistent=True, limits=Limits(max_repl_restarts=1)) as rlm:
        assert [rlm.completion("c", "q").response for _ in range(4)] == ["on"] * 4


def test_many_contexts_and_long_histories_spoil_no_later_question() -> None:
    script = [block("print('x' * 30_000)\nFINAL(1)")] * 4 + [
        block("import os; os._exit(1)"),
        block("FINAL(context_3[:3])"),
    ]
    limits = Limits(max_frame_bytes=1 << 16, max_observation_chars=100_000)
    with RLM(ScriptedClient(script), persistent=True, limits=limits) as rlm:
        for _ in range(4):
            assert rlm.completion("abc" * 10_000, "q").response == "1"
        assert rlm.completion("small", "q").response == "abc"


def test_a_value_too_large_for_a_message_is_refused_with_the_reason() -> None:
    rlm = RLM(ScriptedClient([]), limits=Limits(max_frame_bytes=1 << 16), tools={"BIG": "x" * (1 << 17)})
    with pytest.raises(ConfigurationError, match="the value BIG is too large for a message to a REPL"):
        rlm.completion("c", "q")


def test_closing_a_persistent_rlm_while_it_answers_is_an_error_of_ours() -> None:
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
