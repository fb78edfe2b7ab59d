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


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": 42}, "a model must be a name, a Model, a client or a function, not int"),
        ({"model": ""}, "name is empty"),
        ({"model": "offline", "limits": {"max_depth": 2}}, "limits must be a Limits, not dict"),
        ({"on_event": 5}, "on_event is a plain function"),
        ({"on_event": asyncio.sleep}, "never awaited"),
        ({"handler": "x"}, "handler must be a LMHandler, not str"),
        ({"sandbox": "x"}, "no isolation level 'x'"),
        ({"models": ["offline"]}, "models must be a dict from name to model, or a Models, not ['offline']"),
        ({"tools": [asyncio.sleep]}, "tools must be a dict from name to function, not list: give {'sleep': sleep}"),
        ({"tools": "search"}, "tools must be a dict from name to function, not str: give {'name': function}"),
    ],
)
def test_constructor_refuses_unusable_arguments(given: dict[str, Any], why: str) -> None:
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


@pytest.mark.parametrize("text", ["notes.txt", "logs/server.log", "./logs", "logs/"])
def test_text_naming_a_path_is_refused_with_remedy(folder: Path, text: str, open_sandbox: Sandbox) -> None:
    """A text that names a path is refused with what to write instead."""
    for name in (text, str(folder / text)):
        with pytest.raises(ContextRefused, match=re.escape(f"if that is meant, give Path({name!r}); if the text")):
            RLM(ScriptedClient([])).completion(name, "?")
    with pytest.raises(ContextRefused, match=re.escape(f"Path({text!r})")):
        open_sandbox.repl(text)
    with pytest.raises(ContextRefused, match="the context comes first, then the question"):
        RLM(ScriptedClient([])).completion("When did it fail?", text)


@pytest.mark.parametrize("answer", ["yes", None, 5, LMHandler(FunctionClient(lambda _: ""))])
def test_uncallable_answer_is_refused_with_remedy(answer: Any, open_sandbox: Sandbox) -> None:
    """An answer function that cannot be called is refused with what to give instead."""
    said = re.escape(f"not {type(answer).__name__}: with an LMHandler give answer=handler.answers(...)")
    with open_sandbox.template() as template:
        for make in (open_sandbox.repl, template.repl):
            with pytest.raises(ConfigurationError, match=said):
                make(answer=answer)


def test_an_address_is_refused_as_a_context() -> None:
    with pytest.raises(ContextRefused, match="is an address, not its content: fetch the content first"):
        RLM(ScriptedClient([])).completion("https://example.org/report.txt", "?")


@pytest.mark.parametrize(
    "text",
    ["notes.txt\n", "see notes.txt", "nowhere.txt", "Is https://example.org up?", "x" * 5000, "a\0b", "\ud800", ""],
)
def test_a_text_that_is_meant_is_a_context(folder: Path, text: str, open_sandbox: Sandbox) -> None:
    del folder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rlm = RLM(FunctionClient(lambda _: "```repl\nFINAL(str(len(context)))\n```"), sandbox=open_sandbox)
        assert rlm.completion(text, "?").response == str(len(text))


def test_context_named_like_a_folder_gives_a_warning(folder: Path, open_sandbox: Sandbox) -> None:
    """A word that is also the name of a folder is a context with a warning."""
    del folder
    with pytest.warns(UserWarning, match="a path of that name exists"):
        assert RLM(lambda _messages: ANSWERS, sandbox=open_sandbox).completion("logs", "?").response == "logs"


def test_context_and_question_in_the_wrong_order_are_noticed(folder: Path, open_sandbox: Sandbox) -> None:
    with pytest.raises(ConfigurationError, match="not PosixPath: the context comes first, then the question"):
        RLM(ScriptedClient([])).completion("When?", folder)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="the context comes first, then the question"):
        RLM(lambda _messages: ANSWERS, sandbox=open_sandbox).completion("When did it fail?", "a line of a log\n" * 1000)


def test_prompts_of_children_may_name_what_they_like(folder: Path, open_sandbox: Sandbox) -> None:
    del folder
    asks = "```repl\nFINAL(rlm_query('notes.txt'))\n```"
    rlm = RLM(ScriptedClient([asks, "FINAL(of the child)"]), limits=Limits(max_depth=2), sandbox=open_sandbox)
    assert rlm.completion("text", "?").response == "of the child"


def test_a_question_is_text() -> None:
    with pytest.raises(ConfigurationError, match="the question must be text or None, not int"):
        RLM(ScriptedClient([])).completion("text", 5)  # type: ignore[arg-type]


def test_limits_of_a_sandbox_are_limits() -> None:
    with pytest.raises(ConfigurationError, match="limits must be a ReplLimits or a Limits, not int"):
        Sandbox(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 0, -1, "5", True])
def test_invalid_timeout_is_refused_and_keeps_the_repl(timeout_s: Any, open_sandbox: Sandbox) -> None:
    """A timeout that is no positive number is refused, and the REPL stays usable."""
    with open_sandbox.repl() as repl:
        with pytest.raises(ConfigurationError, match="give a positive number of seconds"):
            repl.execute("1", timeout_s=timeout_s)
        assert repl.execute("1").stdout == "1\n"


@pytest.mark.parametrize("code", [5, None, b"x"])
def test_code_is_text_and_nothing_else_costs_variables(code: Any, open_sandbox: Sandbox) -> None:
    with open_sandbox.repl() as repl:
        repl.execute("v = 1")
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
    """An RLM whose loop has ended says so and can be closed."""
    rlm = RLM(FunctionClient(lambda _: ANSWERS))

    async def opened() -> None:
        await rlm.__aenter__()

    asyncio.run(opened())
    with pytest.raises(ConfigurationError, match="on an event loop that has ended"):
        rlm.completion("text", "?")
    rlm.close()


def test_completion_names_the_limit_that_ended_its_turns(open_sandbox: Sandbox) -> None:
    """An answer that was asked for at a limit says so."""
    looks = "I am looking.\n```repl\nprint(1)\n```"
    done = RLM(ScriptedClient([looks, looks]), limits=Limits(max_iterations=1), sandbox=open_sandbox).completion(
        "text", "?"
    )
    assert (done.response, done.limit) == ("I am looking.", "max_iterations")
    assert RLM(ScriptedClient([ANSWERS]), sandbox=open_sandbox).completion("text", "?").limit is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tools": {"f": print}}, "tools must be a list of names of functions"),
        ({"tools": ["f", "f"]}, "tools has a name twice"),
        ({"tools": ["f"], "values": {"f": 1}}, "f: a name is that of a tool or of a value, not of both"),
        ({"answer": 3}, "answer must be an async function of one query"),
    ],
)
def test_repl_refuses_unusable_arguments(given: dict[str, Any], why: str, open_sandbox: Sandbox) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        open_sandbox.repl(**given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"limits": 3}, "limits must be a ReplLimits or a Limits"),
        ({"isolation": []}, "no isolation level []"),
        ({"warm": []}, "warm must be a number of REPLs"),
        ({"allow_exec": 0}, "allow_exec must be a bool, not int"),
        ({"allow_exec": "no"}, "allow_exec must be a bool, not str"),
    ],
)
def test_sandbox_settings_are_refused_before_sharing(given: dict[str, Any], why: str) -> None:
    for make in (Sandbox, Sandbox.shared):
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


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"recursion": 3}, "recursion must be 'always', 'auto' or a function, not 3"),
        ({"persistent": "no"}, "persistent must be a bool, not str"),
        ({"models": {"a": 1}}, "model 'a': a model must be a name, a Model, a client or a function, not int"),
        ({"models": {1: "offline"}}, "the name of a model must be a str, not int"),
        ({"model": ScriptedClient}, "a model must be an object, not the class ScriptedClient"),
        ({"tools": {"get": {"type": "function", "function": {}}}}, "tool 'get': that describes a function"),
        ({"tools": {"get": {"tool": print, "description": 3}}}, "the description of tool 'get' must be a str"),
    ],
)
def test_constructor_refuses_what_would_fail_later(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        RLM(**given)
