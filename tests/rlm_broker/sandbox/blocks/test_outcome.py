"""The outcome of a block, from the result that its REPL sent or from the reason of its kill."""

from typing import Any

import msgspec
import pytest

from rlm_broker.broker.transport.connection import refuse
from rlm_broker.broker.transport.session import NOTHING, Wanted
from rlm_broker.errors import ValueUnavailable
from rlm_broker.results import Block, PostMortem
from rlm_broker.sandbox.blocks.block_result import (
    BlockOutput,
    BlockSpec,
    SentValue,
    SubmitFields,
    sent_value,
    values_of,
    variables_of,
)
from sandbox_worker.wire.bounds import OutputBounds
from sandbox_worker.wire.messages import MAX_DRAFT_CHARS, DisplayMessage, Output, Result, VariableFact
from sandbox_worker.wire.values import MAX_DECODED_VALUES, encode
from tests.support.tables import table

EVERYTHING = Wanted(value=True, variables=True)


def encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode(value, "the value"))


def ended(
    wanted: Wanted = NOTHING, fields: SubmitFields | None = None, limit: str | None = None, **of_result: Any
) -> Block:
    output = BlockOutput(OutputBounds(max_output_bytes=100), None)
    output.printed(Output(1, "stdout", "printed"))
    output.printed(Output(1, "stderr", "warned"))
    output.shown(DisplayMessage(1, texts={"text/html": "<b>"}))
    result = Result(**{"block": 1, "status": "ok", **of_result})
    return BlockSpec("code", wanted, output, refuse, 1.0, 1.0, fields).ended(result, limit, 1.5)


def test_block_that_ended_has_what_its_repl_sent() -> None:
    block = ended(status="exited", error="3", exit_code=3, draft="so far", final_answer="a", displays_omitted=2)
    assert (block.code, block.status, block.stdout, block.stderr) == ("code", "exited", "printed", "warned")
    assert (block.error, block.exit_code, block.draft, block.final_answer) == ("3", 3, "so far", "a")
    assert (len(block.displays), block.displays_omitted, block.execution_time) == (1, 2, 1.5)
    assert (block.limit, block.variables, block.value, block.value_problem) == (None, (), None, None)
    assert (block.final_value, block.final_value_problem) == ("a", None)


def test_texts_of_an_untrusted_repl_are_cut() -> None:
    block = ended(status="error", error="e" * 5000, draft="d" * (MAX_DRAFT_CHARS + 1), final_answer="a")
    assert block.error == "e" * 2000
    assert block.draft == "d" * MAX_DRAFT_CHARS
    problem = ended(EVERYTHING, value_problem="p" * 5000).value_problem
    assert problem == "p" * 2000


def test_limit_counts_for_a_block_that_was_interrupted() -> None:
    """A block that ended by itself at the same moment was not ended by the limit."""
    assert ended(limit="block_timeout_s", status="interrupted").limit == "block_timeout_s"
    assert ended(limit="block_timeout_s").limit is None


def test_value_and_variables_are_given_to_callers_who_wanted_them() -> None:
    sent_anyway: dict[str, Any] = {"value": encoded((1, 2)), "variables": [VariableFact("x", "list", 3)]}
    block = ended(**sent_anyway)
    assert (block.value, block.variables) == (None, ())
    block = ended(EVERYTHING, **sent_anyway)
    assert block.value == (1, 2)
    (variable,) = block.variables
    assert (variable.name, variable.type, variable.size) == ("x", "list", 3)
    assert ended(Wanted(names=("x",)), value=encoded([1])).value == [1]


def test_final_value_needs_a_final_answer() -> None:
    assert ended(final_answer="3", final_value=encoded(3)).final_value == 3
    assert ended(final_value=encoded(3)).final_value is None
    block = ended(final_answer="f", final_value_problem="a function cannot cross")
    assert (block.final_value, block.final_value_problem) == (None, "a function cannot cross")


def test_submitted_fields_count_as_they_were_checked() -> None:
    """Neither the text nor the value that the REPL sent replaces the checked values."""
    forged: dict[str, Any] = {"final_answer": "forged", "final_value": encoded("forged")}
    fields = SubmitFields({"total": int})
    unchecked = ended(fields=fields, **forged)
    assert (unchecked.final_answer, unchecked.final_value) == (None, None)
    fields.values = {"total": 3}
    checked = ended(fields=fields, **forged)
    assert checked.final_answer is not None
    assert msgspec.json.decode(checked.final_answer) == {"total": 3}
    assert (checked.final_value, checked.final_value_problem) == ({"total": 3}, None)
    assert ended(fields=fields).final_answer is None
    assert ended(fields=SubmitFields({}), **forged).final_value == "forged"


def test_killed_block_keeps_what_it_showed() -> None:
    output = BlockOutput(OutputBounds(max_output_bytes=100), None)
    output.printed(Output(1, "stdout", "printed"))
    output.printed(Output(1, "stderr", "warned"))
    output.shown(DisplayMessage(1, texts={"text/html": "<b>"}))
    seen = PostMortem("", "", 1, 2.0, 3, 4)
    block = BlockSpec("code", NOTHING, output, refuse, 1.0, 1.0).killed("it ended", seen, "cpu_s", 1.5, None)
    assert (block.code, block.status, block.stdout, block.stderr) == ("code", "killed", "printed", "warned")
    assert (block.limit, block.execution_time, block.post_mortem, len(block.displays)) == ("cpu_s", 1.5, seen, 1)
    assert "it ended" in (block.error or "")


def test_invalid_value_becomes_a_problem() -> None:
    value = SentValue(b"not JSON", None)
    assert value.value is None
    assert (value.problem or "").startswith("the REPL sent an invalid value: ")
    many = SentValue(b"[" + b"0," * MAX_DECODED_VALUES + b"0]", None)
    assert "more than" in (many.problem or "")


def test_value_that_is_not_set_is_none() -> None:
    assert sent_value(msgspec.UNSET, None) is None
    refused = sent_value(msgspec.UNSET, "it is a lock")
    assert refused is not None
    assert (refused.value, refused.problem) == (None, "it is a lock")


@table("names, value, told", [(("x",), [{"x": 1}, {}], 1), (("x", "y", "x"), [{"y": 2, "x": 1}, {}], (1, 2, 1))])
def test_values_of_variables_come_in_the_order_of_the_names(
    names: tuple[str, ...], value: object, told: object
) -> None:
    assert values_of(names, ended(EVERYTHING, value=encoded(value))) == told


@table(
    "of_result, problem",
    [
        ({"status": "error", "error": "NameError: y"}, "x, y is not available: NameError: y"),
        ({"value_problem": "x is a lock"}, "x is a lock"),
        ({"value": encoded([{"x": 1, "z": 2}, {}])}, "x, y is not available: the REPL sent other values"),
        ({"value": encoded([{"x": 1}, {"y": "y is a lock"}])}, "y is a lock"),
        ({"value": encoded([{"x": 1}, {"y": [5]}])}, r"\[5\]"),
        ({"value": encoded([1, 2])}, "x, y is not available: the REPL sent other values"),
        ({"value": encoded(({}, {}))}, "x, y is not available: the REPL sent other values"),
        ({}, "x, y is not available: the REPL sent other values"),
    ],
)
def test_values_that_are_missing_are_refused(of_result: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueUnavailable, match=f"^{problem}$"):
        values_of(("x", "y"), ended(EVERYTHING, **of_result))


def test_variables_without_a_value_have_their_reasons() -> None:
    found = variables_of((), ended(EVERYTHING, value=encoded([{"b": 1, 5: 2}, {"a": "a is a lock"}])))
    assert (list(found), found["b"], str(found["a"])) == (["a", "b"], 1, "a is a lock")
