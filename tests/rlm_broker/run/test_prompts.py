"""What a model is told is true: the numbers are the enforced ones, and the user's text is only text."""

import re

from rlm_broker.context.store import ContextInfo
from rlm_broker.limits import Limits
from rlm_broker.parsing import NotRun
from rlm_broker.results import Block
from rlm_broker.run import prompts
from sandbox_worker.wire.names import ANSWER, CONTEXT, FUNCTIONS, LLM_BATCH, SUBMIT

HOSTILE = "{limits} {0} %s %(x)s $y {{"
TEXT = ContextInfo("str", 1234567)


def test_every_number_is_the_one_that_is_enforced() -> None:
    limits = Limits(
        max_batch_prompts=777,
        max_concurrent_calls=5,
        max_observation_chars=4321,
        block_timeout_s=12.5,
        max_iterations=9,
    )
    told = prompts.system(limits, depth=0)
    for number in ("777", "5 at a time", "4,321", "12.5 s", "9 turns"):
        assert number in told


def test_system_prompt_names_only_what_a_repl_has() -> None:
    told = prompts.system(Limits(max_depth=2), depth=0)
    assert set(re.findall(r"`(\w+)[(`\[]", told)) - {"repl"} == {*FUNCTIONS, CONTEXT, ANSWER} - {LLM_BATCH, SUBMIT}


def test_a_child_is_offered_only_where_one_would_be_started() -> None:
    assert "REPL of its own" in prompts.system(Limits(max_depth=2), depth=0)
    assert "the same as `llm_query`" in prompts.system(Limits(max_depth=2), depth=1)
    assert "the same as `llm_query`" in prompts.system(Limits(max_depth=1), depth=0)


def test_the_opening_tells_kind_and_size_and_asks_to_look_first() -> None:
    told = prompts.opening("Who?", TEXT)
    assert "a str with 1,234,567 characters" in told
    assert prompts.NOT_LOOKED_AT in told
    assert told.endswith(prompts.reminder("Who?"))


def test_the_parts_of_a_folder_are_listed_up_to_a_number_and_what_was_left_out_is_counted() -> None:
    parts = tuple((f"file{number}", number) for number in range(40))
    info = ContextInfo("dict", 10, parts, 500, {"binary": 3})
    told = prompts.opening("?", info)
    assert f"file{prompts.PARTS_SHOWN - 1}: {prompts.PARTS_SHOWN - 1}" in told
    assert f"file{prompts.PARTS_SHOWN}:" not in told
    assert f"and {500 - prompts.PARTS_SHOWN} more" in told
    assert "Left out: 3 (binary)" in told


def test_text_of_the_user_and_of_documents_is_no_template() -> None:
    block = Block(HOSTILE, "ok", stdout=HOSTILE, stderr=HOSTILE)
    told = prompts.observation([block], [NotRun(HOSTILE, HOSTILE)], Limits(), HOSTILE)
    assert told.count(HOSTILE) == 5
    assert HOSTILE in prompts.opening(HOSTILE, TEXT)
    assert HOSTILE in prompts.last_request(HOSTILE)


def test_long_output_keeps_its_head_and_tail_and_says_what_was_cut() -> None:
    told = prompts.observation(
        [Block("c", "ok", stdout="H" * 500 + "x" * 9000 + "T" * 500)], [], Limits(max_observation_chars=1000), "?"
    )
    assert "H" * 500 in told
    assert "T" * 250 in told
    assert "[9,000 characters cut]" in told


def test_each_way_to_end_is_told_with_what_it_means_for_the_variables() -> None:
    def told(**fields: object) -> str:
        return prompts.observation([Block(code="c", **fields)], [], Limits(block_timeout_s=7), "go on")  # type: ignore[arg-type]

    assert "called sys.exit (3)" in told(status="exited", error="3")
    assert "raised an exception (ValueError: x)" in told(status="error", error="ValueError: x")
    assert "Your variables are still there" in told(status="interrupted", error="KeyboardInterrupt")
    assert "all your variables are lost" in told(status="killed", error="it was slow")
    assert "(no output)" in told(status="ok")


def test_a_turn_without_code_and_answer_is_said_to_have_had_neither() -> None:
    assert "no code to run and no answer" in prompts.observation([], [], Limits(), "?")


def test_the_question_is_repeated_in_every_turn() -> None:
    assert "Question: Who?" in prompts.observation([Block("c", "ok")], [], Limits(), prompts.reminder("Who?"))
    assert "The task is in the context itself" in prompts.reminder(None)
