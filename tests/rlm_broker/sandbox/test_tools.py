"""Tools: functions of the user's, called by code in a REPL of its own, over the socket."""

import asyncio
import json
import threading
from typing import Any

import pytest

from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.tools import Tools
from tests.support.tables import table


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    More than a model needs to know.
    """
    return a + b


async def shout(text: str) -> dict[str, str]:
    """Say it louder."""
    await asyncio.sleep(0)
    return {"said": text.upper()}


def fails(_what: str) -> None:
    raise LookupError("nothing of that kind")


def answer_of(sandbox: Sandbox, code: str, limits: Limits | None = None, **tools: Any) -> str | None:
    client = ScriptedClient([f"```repl\n{code}\n```"] * 3)
    return RLM(client, limits=limits, tools=tools, sandbox=sandbox).completion("c", "q").response


def test_code_calls_functions_of_the_orchestrator_and_finds_values(open_sandbox: Sandbox) -> None:
    values = "add(2, b=3), add('2'), shout('hello')['said'], LIMIT + len(TABLE['rows']), add.__name__"
    code = f"found = [{values}]\nadd = None\nFINAL(repr(found))"
    answer = answer_of(open_sandbox, code, add=add, shout=shout, LIMIT=10, TABLE={"rows": [1, 2]})
    assert answer == repr([5, 3, "HELLO", 12, "add"])


def test_tool_names_return_after_block_and_restart(open_sandbox: Sandbox) -> None:
    replies = [
        "```repl\nadd = LIMIT = None\n```",
        "```repl\nimport os; os._exit(1)\n```",
        "```repl\nFINAL(add(LIMIT))\n```",
    ]
    done = RLM(ScriptedClient(replies), tools={"add": add, "LIMIT": 10}, sandbox=open_sandbox).completion("c", "q")
    assert done.response == "11"


def test_tool_failure_is_a_readable_exception(open_sandbox: Sandbox) -> None:
    def exits() -> None:
        raise SystemExit(3)

    def returns_a_lock() -> Any:
        return threading.Lock()

    told = {
        "add('two')": "add(): 0: Input should be a valid integer",
        "add()": "a: Missing required argument",
        "add(1, 2, 3)": "Unexpected positional argument",
        "fails('x')": "fails() raised LookupError: nothing of that kind\n  test_tools.py, line",
        "exits()": "exits() raised RuntimeError: SystemExit: 3",
        "returns_a_lock()": "returns_a_lock(): its result is a lock, which does not cross",
        "add(object())": "add(): args[0] is an object, which does not cross",
    }
    code = "\n".join(
        [
            "import json\nsaid = {}",
            *(f"try: {call}\nexcept Exception as error: said[{call!r}] = str(error)" for call in told),
            "FINAL(json.dumps(said))",
        ]
    )
    said = json.loads(
        answer_of(open_sandbox, code, add=add, fails=fails, exits=exits, returns_a_lock=returns_a_lock) or ""
    )
    assert [call for call in told if told[call] not in said[call] or "/tests/" in said[call]] == []


async def test_tool_has_a_deadline_of_its_own() -> None:
    forever = asyncio.Event()

    async def hangs() -> None:
        await forever.wait()

    tools = Tools({"hangs": {"tool": hangs, "timeout_s": 0.05}})
    slot = await tools.call("hangs", '{"args": [], "kwargs": {}}', 3_600)
    assert slot.error == "hangs() took longer than timeout_s = 0.05 s"
    with pytest.raises(ConfigurationError, match="timeout_s of tool 'hangs' must be"):
        Tools({"hangs": {"tool": hangs, "timeout_s": "1"}})


async def test_extended_tools_are_all_there() -> None:
    base = Tools({"add": add, "three": 3})
    more = base.extended({"shout": shout, "four": 4})
    assert (more.names, more.values) == (["add", "shout"], {"three": 3, "four": 4})
    assert (base.names, base.values) == (["add"], {"three": 3})
    assert more.for_children is more
    assert (await more.call("add", '{"args": [1], "kwargs": {}}', 60)).text == "2"
    apart = Tools({"add": add}, for_children={"three": 3}).extended({"shout": shout})
    assert (apart.for_children.names, apart.for_children.values) == (["shout"], {"three": 3})
    for taken in ("add", "three"):
        with pytest.raises(ConfigurationError, match=f"there is a tool '{taken}' already"):
            base.extended({taken: 1})


def test_a_tool_that_hangs_in_a_thread_hangs_nothing(open_sandbox: Sandbox) -> None:
    stop = threading.Event()

    def hangs() -> None:
        stop.wait()

    try:
        code = "try: hangs()\nexcept RuntimeError as error: FINAL(str(error))"
        answer = answer_of(open_sandbox, code, Limits(tool_timeout_s=0.2), hangs=hangs)
        assert answer == "hangs() took longer than tool_timeout_s = 0.2 s"
    finally:
        stop.set()


def test_tool_result_above_a_frame_is_an_error(open_sandbox: Sandbox) -> None:
    code = "try: large()\nexcept RuntimeError as error: FINAL(str(error))"
    answer = answer_of(open_sandbox, code, Limits(max_frame_bytes=1 << 20), large=lambda: "x" * (2 << 20)) or ""
    assert answer == "large(): its result has 2,097,152 bytes, more than max_frame_bytes = 1,048,576"


def test_children_inherit_replace_or_lose_tools(open_sandbox: Sandbox) -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        if "Question: root" in messages[1]["content"]:
            return "```repl\nFINAL(rlm_query('child'))\n```"
        return "```repl\nFINAL(sorted(name for name in ('add', 'other') if name in globals()))\n```"

    for sub_tools, found in ((None, '["add"]'), ({"other": add}, '["other"]'), ({}, "[]")):
        rlm = RLM(
            FunctionClient(reply),
            limits=Limits(max_depth=2),
            tools=Tools({"add": add}, sub_tools),
            sandbox=open_sandbox,
        )
        assert rlm.completion("c", "root").response == found


def test_tools_are_told_by_signature_and_description(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(["FINAL(x)"])
    given = {"add": add, "PI": 3.14, "look": {"tool": lambda word: word, "description": "Looks {up} a word."}}
    RLM(client, tools=given, sandbox=open_sandbox).completion("c", "q")
    told = str(client.requests[0].messages[0].content)
    assert "- `add(a: int, b: int = 1) -> int`: Add two numbers.\n" in told
    assert "- `look(word)`: Looks {up} a word.\n" in told
    assert "- `PI`: a float" in told


def test_invalid_tool_is_refused_at_once() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"llm_query": add}, "that name is taken"),
        ({"print": add}, "that name is taken"),
        ({"__name__": add}, "that name is taken"),
        ({"two words": add}, "not a Python identifier"),
        ({"class": add}, "not a Python identifier"),
        ({"x": threading.Lock()}, "neither a callable nor a value that crosses"),
        ({"x": {"tool": add, "docs": "?"}}, "and no other keys"),
        ({"x": {"tool": 5, "schema": PERSON}}, "a schema needs a function, whose arguments it describes"),
        ({"x": {"tool": tool, "schema": {"type": "string"}}}, 'must be a JSON Schema with "type": "object"'),
        ({"x": {"tool": tool, "schema": []}}, 'must be a JSON Schema with "type": "object"'),
        ({"x": {"tool": tool, "schema": schema_of("not a name", {})}}, "cannot be parameters"),
        ({"x": {"tool": tool, "schema": schema_of("x", {"type": "nonsense"})}}, "is not a JSON Schema"),
    ]
    for given, why in cases:
        with pytest.raises(ConfigurationError, match=why):
            RLM(ScriptedClient([]), tools=given)


async def test_call_that_no_repl_makes_is_an_error() -> None:
    tools = Tools({"add": add})
    for arguments in ("", "[]", "{}", '{"args": 1, "kwargs": {}}', "[" * 100_000):
        assert (await tools.call("add", arguments, 1)).error
    slot = await tools.call("x" * 1000, "{}", 1)
    assert slot.error is not None
    assert slot.error.endswith("there are: add")
    assert len(slot.error) < 200


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


def schema_of(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}}


def tool(**given: Any) -> dict[str, Any]:
    """Say what was given."""
    return given


async def atool(**given: Any) -> dict[str, Any]:
    return given


@table("function", [tool, atool])
def test_tool_is_called_by_the_properties_of_its_schema(open_sandbox: Sandbox, function: Any) -> None:
    code = (
        "```repl\n"
        "print(say('Ada', age=36), say(name='Eve'))\n"
        "try:\n    say(36)\nexcept Exception as error:\n    print(error)\n"
        "try:\n    say()\nexcept Exception as error:\n    print(error)\n"
        "FINAL('done')\n```"
    )
    say = {"tool": function, "description": "Says.", "schema": PERSON}
    done = RLM(ScriptedClient([code]), tools={"say": say}, sandbox=open_sandbox).completion("x", "?")
    printed = done.trajectory[0].blocks[0].stdout
    assert "{'name': 'Ada', 'age': 36} {'name': 'Eve'}" in printed
    assert "say(): name: 36 is not of type 'string'" in printed
    assert "say(): name: Missing required argument" in printed
    assert "`say(name, age=...)`: Says." in str(done.messages[0].content)
