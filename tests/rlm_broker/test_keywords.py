"""Arguments of `RLM`: objects, their short forms, and refused ones with the way to give them."""

import re
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import RLM, ConfigurationError, Limits, LMHandler, ReplLimits, Sandbox, ScriptedClient
from rlm_broker.handler.routing import Route
from rlm_broker.keywords import Keywords, instructions_with, models_with, sandbox_with, tools_with
from rlm_broker.models.models import Models
from rlm_broker.prompts.instructions import Instructions
from rlm_broker.run.tools import Tools
from tests.support.venvs import a_venv

SHORT: dict[str, Any] = {
    "routes": [Route(to="x")],
    "model_policy": "pinned",
    "cache": "cache.sqlite",
    "record": "run.jsonl",
    "replay": "run.jsonl",
    "sub_tools": {},
    "system_prompt": "Be short.",
    "prompt_profile": "final",
    "user_prologue": "Hello.",
    "isolation": "strict",
    "allow_exec": False,
    "seed": 7,
    "python": "venv",
    "packages": ["six"],
    "verbose": True,
    "cluster": None,
}


def sorted_lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_each_short_form_is_a_keyword() -> None:
    assert SHORT.keys() == Keywords.__annotations__.keys()


@pytest.mark.parametrize("name", ["routes", "model_policy", "cache", "record", "replay"])
def test_keyword_of_models_says_what_the_object_says(name: str) -> None:
    field = {"model_policy": "policy"}.get(name, name)
    assert models_with(None, {name: SHORT[name]}) == Models(**{field: SHORT[name]})


@pytest.mark.parametrize("name", ["system_prompt", "prompt_profile", "user_prologue"])
def test_keyword_of_instructions_says_what_the_object_says(name: str) -> None:
    field = {"system_prompt": "system", "prompt_profile": "profile", "user_prologue": "prologue"}[name]
    assert instructions_with(None, {name: SHORT[name]}) == Instructions(**{field: SHORT[name]})


@pytest.mark.parametrize("name", ["isolation", "allow_exec", "seed", "python", "packages"])
def test_keyword_of_a_sandbox_says_what_the_object_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_venv(tmp_path / "venv")
    monkeypatch.chdir(tmp_path)
    assert getattr(sandbox_with(None, {name: SHORT[name]}), name) == SHORT[name]


def test_keyword_of_tools_gives_children_their_own() -> None:
    tools = tools_with({"x": sorted_lines}, {"sub_tools": {}})
    assert (tools.names, tools.for_children.names) == (["x"], [])


@pytest.mark.parametrize(
    ("whole", "name"),
    [
        *(({"models": Models()}, name) for name in ("routes", "model_policy", "cache", "record", "replay")),
        *(({"instructions": Instructions()}, name) for name in ("system_prompt", "prompt_profile", "user_prologue")),
        ({"tools": Tools()}, "sub_tools"),
    ],
)
def test_keyword_beside_its_whole_object_is_refused(whole: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"so give {name} there"):
        RLM(**whole, **{name: SHORT[name]})


@pytest.mark.parametrize("name", ["isolation", "allow_exec", "seed", "python", "packages"])
def test_keyword_beside_a_sandbox_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"sandbox is a Sandbox, so give {name} there: Sandbox\({name}=...\)"):
        RLM(sandbox=Sandbox(), **{name: SHORT[name]})


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("backend", 'RLM("openai/gpt-5-mini")'),
        ("environment", 'sandbox="strict"'),
        ("max_depth", "limits=Limits(max_depth=...)"),
        ("max_iterations", "limits=Limits(max_iterations=...)"),
        ("custom_tools", "tools={"),
        ("logger", "on_event=TraceWriter("),
        ("sub_mode", "did you mean sub_model?"),
        ("nonsense", "there are: model, sub_model, models"),
    ],
)
def test_unknown_keyword_suggests_the_right_form(name: str, how: str) -> None:
    given: dict[str, Any] = {name: 3}
    with pytest.raises(ConfigurationError, match=rf"^RLM takes no {name}.*{re.escape(how)}"):
        RLM("offline", **given)


@pytest.mark.parametrize(
    "models",
    [Models(routes=[Route(to="x")]), Models(policy="pinned"), Models(cache="x"), Models(replay="x"), {"a": "b"}],
)
def test_models_beside_a_lent_handler_are_refused(models: Any) -> None:
    with pytest.raises(ConfigurationError, match="a handler brings its own models"):
        RLM(models=models, handler=LMHandler(ScriptedClient([])))


def test_lent_handler_may_be_recorded(tmp_path: Path) -> None:
    with LMHandler(ScriptedClient(["FINAL(1)"])) as handler:
        RLM(handler=handler, models=Models(record=tmp_path / "run.jsonl")).completion("text", "?")
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2


async def test_limits_of_repls_beside_a_sandbox_are_effective() -> None:
    sandbox = Sandbox(Limits(memory_bytes=1 << 28, max_open_files=64))
    limits = RLM(sandbox=sandbox, limits=Limits(max_depth=2, max_open_files=99)).limits
    assert (limits.memory_bytes, limits.max_depth, limits.max_open_files) == (1 << 28, 2, 99)
    code = "```repl\nimport resource\nFINAL(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n```"
    async with RLM(ScriptedClient([code] * 2), sandbox=sandbox, limits=Limits(max_open_files=99)) as rlm:
        assert (await rlm.acompletion("text", "?")).response == "99"
        run = rlm.start("text", "?", limits=ReplLimits(max_open_files=77))
        assert (await run).response == "77"


def test_closed_sandbox_is_opened_while_used() -> None:
    sandbox = Sandbox(Limits(max_open_files=64))
    with RLM(ScriptedClient(["FINAL(1)"]), sandbox=sandbox) as rlm:
        assert rlm.sandbox is sandbox
        assert rlm.completion("text", "?").response == "1"
        assert rlm.limits.max_open_files == 64
        with sandbox.repl() as repl:
            assert repl.execute("1").status == "ok"
    with pytest.raises(Exception, match="the sandbox is not open"):
        sandbox.repl()


async def test_closed_sandbox_shared_by_runs_ends_with_the_last() -> None:
    sandbox = Sandbox()
    one, other = (RLM(ScriptedClient(["FINAL(1)"] * 2), sandbox=sandbox) for _ in range(2))
    async with one:
        async with other:
            assert (await other.acompletion("text", "?")).response == "1"
        assert (await one.acompletion("text", "?")).response == "1"
    assert sandbox.event_loop is None  # it may be opened again, on another loop


def test_open_sandbox_stays_its_owners() -> None:
    with Sandbox() as sandbox:
        RLM(ScriptedClient(["FINAL(1)"]), sandbox=sandbox).completion("text", "?")
        with sandbox.repl() as repl:
            assert repl.execute("1").status == "ok"
