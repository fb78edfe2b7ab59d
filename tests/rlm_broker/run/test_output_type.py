"""Answers of a type: which are taken, and what the model is told of the others."""

import json
import threading
from typing import Any, Literal

import pydantic
import pytest

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError, OutputInvalid
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.run.output_type import OutputType
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.values.json_schemas import CheckedSchema


class Person(pydantic.BaseModel):
    name: str
    age: int


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
GOOD = '{"name": "Ada", "age": 36}'


def test_an_answer_becomes_a_value() -> None:
    cases: list[tuple[Any, str, object]] = [
        (Person, GOOD, Person(name="Ada", age=36)),
        (Person, f"```json\n{GOOD}\n```", Person(name="Ada", age=36)),
        (int, "42", 42),
        (int, " 42\n", 42),
        (str, "plain text", "plain text"),
        (list[str], '["a", "b"]', ["a", "b"]),
        (Literal["yes", "no"], "yes", "yes"),
        (bool, "true", True),
        (float | None, "null", None),
        (PERSON, GOOD, {"name": "Ada", "age": 36}),
    ]
    for wanted, answer, value in cases:
        assert OutputType(wanted).judge(answer, 0) == (None, value)


def test_wrong_answer_returns_with_fault_and_schema(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(
        ["FINAL(Ada, aged 36)", '```repl\nFINAL({"name": "Ada", "age": "old"})\n```', f"FINAL({GOOD})"]
    )
    done = RLM(client, sandbox=open_sandbox).completion("text", "Who?", output_type=Person)
    assert done.parsed == Person(name="Ada", age=36)
    assert done.response == GOOD
    told = [str(request.messages[-1].content) for request in client.requests]
    assert '"age"' in told[0]
    assert "the answer: Invalid JSON" in told[1]
    assert "age: Input should be a valid integer" in told[2]


def test_exhausted_retries_end_with_the_last_answer(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(["FINAL(one)", "FINAL(two)", "FINAL(three)", "FINAL(four)"])
    with pytest.raises(OutputInvalid, match="the answer is not of the wanted type") as failed:
        RLM(client, limits=Limits(max_output_retries=1), sandbox=open_sandbox).completion(
            "text", "Who?", output_type=int
        )
    assert failed.value.answer == "two"
    assert len(client.requests) == 2


def test_a_plain_completion_has_a_type_too(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(["many", "42"])
    assert (
        RLM(client, limits=Limits(max_depth=0), sandbox=open_sandbox)
        .completion("text", "How many?", output_type=int)
        .parsed
        == 42
    )


def test_last_answer_without_turns_left_is_judged(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(["```repl\n1\n```", "no number", "FINAL(7)"])
    done = RLM(client, limits=Limits(max_iterations=1), sandbox=open_sandbox).completion("text", "?", output_type=int)
    assert done.parsed == 7


def test_type_without_json_form_is_refused_early() -> None:
    for wanted in (object(), print, type("Own", (), {})):
        client = ScriptedClient([])
        with pytest.raises(ConfigurationError, match="output_type"):
            RLM(client).completion("text", "?", output_type=wanted)
        assert client.requests == []


def test_the_schema_is_what_pydantic_says() -> None:
    assert json.dumps(pydantic.TypeAdapter(Person).json_schema()) in OutputType(Person).schema


def test_answer_against_the_schema_is_named_with_place() -> None:
    problem, value = OutputType(PERSON).judge('{"name": "Ada", "age": "old"}', 1)
    assert value is None
    assert problem is not None
    assert "age: 'old' is not of type 'integer'" in problem
    with pytest.raises(OutputInvalid, match="is not of type"):
        OutputType(PERSON).judge("[]", 0)


async def test_answer_of_client_is_judged_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on meanwhile. A type that the caller of the process has given is judged at once."""
    monkeypatch.setattr(OutputType, "judge", lambda *_: (None, threading.get_ident()))
    _, thread = await OutputType(CheckedSchema({}, "it")).judged("7", 1)
    assert thread != threading.get_ident()
    assert await OutputType({}).judged("7", 1) == (None, threading.get_ident())
