"""Wrong use of the Python API: values of wrong types are refused where they are given."""

import asyncio
import multiprocessing
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import (
    ConfigurationError,
    ContextRefused,
    FunctionClient,
    Limits,
    LMHandler,
    ReplClosed,
    Sandbox,
    ScriptedClient,
)
from rlm_broker.rlm import RLM

ANSWERS = "```repl\nFINAL(context)\n```"


def test_constructor_refuses_unusable_arguments() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": 42}, "a model must be a name, a Model, a client or a function, not int"),
        ({"model": ""}, "name is empty"),
        ({"model": None}, "the model is None: name one, such as 'openai/gpt-5-mini'; 'offline' is the stand-in"),
        ({"model": "offline", "limits": {"max_depth": 2}}, "limits must be a Limits, not dict"),
        ({"model": ScriptedClient}, "a model must be an object, not the class ScriptedClient"),
        ({"on_event": 5}, "on_event is a plain function"),
        ({"on_event": asyncio.sleep}, "never awaited"),
        ({"handler": "x"}, "handler must be a LMHandler, not str"),
        ({"sandbox": "x"}, "no isolation level 'x'"),
        ({"recursion": 3}, "recursion must be 'always', 'auto' or a function, not 3"),
        ({"persistent": "no"}, "persistent must be a bool, not str"),
        ({"models": ["offline"]}, "models must be a dict from name to model, or a Models, not ['offline']"),
        ({"models": {"a": 1}}, "model 'a': a model must be a name, a Model, a client or a function, not int"),
        ({"models": {1: "offline"}}, "the name of a model must be a str, not int"),
        ({"tools": [asyncio.sleep]}, "tools must be a dict from name to function, not list: give {'sleep': sleep}"),
        ({"tools": "search"}, "tools must be a dict from name to function, not str: give {'name': function}"),
        ({"tools": {"get": {"type": "function", "function": {}}}}, "tool 'get': that describes a function"),
        ({"tools": {"get": {"tool": print, "description": 3}}}, "the description of tool 'get' must be a str"),
    ]
    for given, why in cases:
        with pytest.raises(ConfigurationError, match=re.escape(why)):
            RLM(**given)


def test_a_function_is_a_model(open_sandbox: Sandbox) -> None:
    assert RLM(lambda _messages: ANSWERS, sandbox=open_sandbox).completion("text", "?").response == "text"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server.log").write_text("all is well\n")
    (tmp_path / "notes.txt").write_text("all is well\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_text_naming_a_path_is_refused_with_remedy(folder: Path, open_sandbox: Sandbox) -> None:
    for text in ("notes.txt", "logs/server.log", "./logs", "logs/"):
        for name in (text, str(folder / text)):
            with pytest.raises(ContextRefused, match=re.escape(f"if that is meant, give Path({name!r}); if the text")):
                RLM(ScriptedClient([])).completion(name, "?")
        with pytest.raises(ContextRefused, match=re.escape(f"Path({text!r})")):
            open_sandbox.repl(text)
        with pytest.raises(ContextRefused, match="the context comes first, then the question"):
            RLM(ScriptedClient([])).completion("When did it fail?", text)


def test_uncallable_answer_is_refused_with_remedy(open_sandbox: Sandbox) -> None:
    answers: tuple[Any, ...] = ("yes", None, 5, LMHandler(FunctionClient(lambda _: "")))
    with open_sandbox.template() as template:
        for answer in answers:
            said = re.escape(f"not {type(answer).__name__}: with an LMHandler give answer=handler.answers(...)")
            for make in (open_sandbox.repl, template.repl):
                with pytest.raises(ConfigurationError, match=said):
                    make(answer=answer)


def test_an_address_is_refused_as_a_context() -> None:
    with pytest.raises(ContextRefused, match="is an address, not its content: fetch the content first"):
        RLM(ScriptedClient([])).completion("https://example.org/report.txt", "?")


def test_a_text_that_is_meant_is_a_context(folder: Path, open_sandbox: Sandbox) -> None:
    del folder
    rlm = RLM(FunctionClient(lambda _: "```repl\nFINAL(str(len(context)))\n```"), sandbox=open_sandbox)
    texts = [
        "notes.txt\n",
        "see notes.txt",
        "nowhere.txt",
        "Is https://example.org up?",
        "x" * 5000,
        "a\0b",
        "\ud800",
        "",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [rlm.completion(text, "?").response for text in texts] == [str(len(text)) for text in texts]


def test_context_named_like_a_folder_gives_a_warning(folder: Path, open_sandbox: Sandbox) -> None:
    del folder
    with pytest.warns(UserWarning, match="a path of that name exists"):
        assert RLM(lambda _messages: ANSWERS, sandbox=open_sandbox).completion("logs", "?").response == "logs"


def test_context_and_question_in_the_wrong_order_are_noticed(folder: Path, open_sandbox: Sandbox) -> None:
    with pytest.raises(ConfigurationError, match="not PosixPath: the context comes first, then the question"):
        RLM(ScriptedClient([])).completion("When?", folder)  # type: ignore[call-overload]
    with pytest.warns(UserWarning, match="the context comes first, then the question"):
        RLM(lambda _messages: ANSWERS, sandbox=open_sandbox).completion("When did it fail?", "a line of a log\n" * 1000)


def test_prompts_of_children_may_name_what_they_like(folder: Path, open_sandbox: Sandbox) -> None:
    del folder
    asks = "```repl\nFINAL(rlm_query('notes.txt'))\n```"
    rlm = RLM(ScriptedClient([asks, "FINAL(of the child)"]), limits=Limits(max_depth=2), sandbox=open_sandbox)
    assert rlm.completion("text", "?").response == "of the child"


def test_a_question_is_text() -> None:
    with pytest.raises(ConfigurationError, match="the question must be text or None, not int"):
        RLM(ScriptedClient([])).completion("text", 5)  # type: ignore[call-overload]


def test_invalid_block_is_refused_and_keeps_the_variables(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl() as repl:
        repl.execute("v = 1")
        odd: tuple[Any, ...] = (float("nan"), float("inf"), 0, -1, "5", True)
        for timeout_s in odd:
            with pytest.raises(ConfigurationError, match="give a positive number of seconds"):
                repl.execute("1", timeout_s=timeout_s)
        no_code: tuple[Any, ...] = (5, None, b"x")
        for code in no_code:
            with pytest.raises(ConfigurationError, match="code must be text"):
                repl.execute(code)
        assert repl.execute("v").stdout == "1\n"


def _in_child(number: int) -> str | None:
    return RLM(FunctionClient(lambda _: ANSWERS)).completion(str(number), "?").response


def test_a_forked_process_has_a_loop_of_its_own() -> None:
    assert _in_child(0) == "0"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(_in_child, range(4)).get(60) == ["0", "1", "2", "3"]


def test_rlm_on_an_ended_loop_can_be_closed() -> None:
    rlm = RLM(FunctionClient(lambda _: ANSWERS))

    async def opened() -> None:
        await rlm.__aenter__()

    asyncio.run(opened())
    with pytest.raises(ConfigurationError, match="on an event loop that has ended"):
        rlm.completion("text", "?")
    rlm.close()


def test_repl_and_sandbox_refuse_unusable_arguments(open_sandbox: Sandbox) -> None:
    of_repl: list[tuple[dict[str, Any], str]] = [
        ({"tools": {"f": print}}, "tool 'f': its arguments cannot be validated"),
        ({"tools": ["f", "f"]}, "tools has a name twice"),
        ({"tools": ["f"], "values": {"f": 1}}, "f: a name is that of a tool or of a value, not of both"),
        ({"answer": 3}, "answer must be an async function of one query"),
    ]
    of_sandbox: list[tuple[dict[str, Any], str]] = [
        ({"limits": 3}, "limits must be a ReplLimits or a Limits"),
        ({"isolation": []}, "no isolation level []"),
        ({"warm": []}, "warm must be a number of REPLs"),
        ({"allow_exec": 0}, "allow_exec must be a bool, not int"),
        ({"allow_exec": "no"}, "allow_exec must be a bool, not str"),
    ]
    makers: list[tuple[Any, dict[str, Any], str]] = [
        *((open_sandbox.repl, *case) for case in of_repl),
        *((make, *case) for case in of_sandbox for make in (Sandbox, Sandbox.shared)),
    ]
    for make, given, why in makers:
        with pytest.raises(ConfigurationError, match=re.escape(why)):
            make(**given)


async def test_answer_of_another_kind_fails_its_query(open_sandbox: Sandbox) -> None:
    async def answers(_query: object) -> Any:
        return "x"

    async with open_sandbox.repl("text", answer=answers) as repl:
        block = await repl.aexecute("llm_query('x')")
    assert "the function that answers this REPL must return a list of Slot" in block.stdout


def test_value_for_a_closed_repl_is_refused(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl() as repl:
        pass
    with pytest.raises(ReplClosed, match="this REPL was closed"):
        repl.provide({"a": 1})
