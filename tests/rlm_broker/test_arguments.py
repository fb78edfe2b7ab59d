"""Arguments of `RLM`: their names, and pairs that both have an effect or are refused together."""

import ast
import inspect
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest

import rlm_broker
from rlm_broker import (
    RLM,
    ConfigurationError,
    FunctionClient,
    Instructions,
    Limits,
    LMHandler,
    Model,
    Models,
    ReplLimits,
    Route,
    Sandbox,
    ScriptedClient,
    Tools,
)
from rlm_broker.values.first_guesses import RLM_ARGUMENTS, SANDBOX_ARGUMENTS
from tests.support.places import PROJECT
from tests.support.venvs import a_venv


def reply(_messages: object) -> str:
    return "FINAL(1)"


GIVEN: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "model": ("model", lambda _: "offline"),
    "sub_model": ("sub_model", lambda _: FunctionClient(reply)),
    "models": ("models", lambda _: {"x": reply}),
    "Models": ("models", lambda _: Models({"x": reply})),
    "limits": ("limits", lambda _: Limits(max_depth=2)),
    "limits of REPLs": ("limits", lambda _: Limits(memory_bytes=1 << 28)),
    "tools": ("tools", lambda _: {"f": reply}),
    "Tools": ("tools", lambda _: Tools({"f": reply})),
    "instructions": ("instructions", lambda _: "Be short."),
    "Instructions": ("instructions", lambda _: Instructions(prologue="Hello.")),
    "recursion": ("recursion", lambda _: "auto"),
    "on_event": ("on_event", lambda _: print),
    "persistent": ("persistent", lambda _: True),
    "function": ("recursion", lambda _: lambda _run, _depth, handler: handler),
    "sandbox": ("sandbox", lambda _: "strict"),
    "Sandbox": ("sandbox", lambda _: Sandbox()),
    "handler": ("handler", lambda _: LMHandler(ScriptedClient([]))),
    "routes": ("models", lambda _: Models(routes=[Route(to="offline", depths="2-")])),
    "policy": ("models", lambda _: Models(policy="pinned")),
    "cache": ("models", lambda folder: Models(cache=folder / "cache.sqlite")),
    "record": ("models", lambda folder: Models(record=folder / "new.jsonl")),
    "replay": ("models", lambda folder: Models(replay=folder / "recorded.jsonl")),
    "verbose": ("verbose", lambda _: True),
}
"""Maps the name of a way to give an argument to the argument and to the function that makes its value."""
REFUSED = {"handler": "model sub_model models Models routes policy cache replay", "replay": "model sub_model"}
"""Pairs in which one argument decides what the other sets, so that they must be refused together."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    RLM(reply, models=Models(record=folder / "recorded.jsonl")).completion("text", "?")
    return folder


def test_table_has_each_argument_of_rlm() -> None:
    names = RLM.__init__.__annotations__.keys() - {"return", "unknown"}
    assert {argument for argument, _ in GIVEN.values()} == names
    assert len(names) == 12


def test_conflicting_arguments_are_refused(folder: Path) -> None:
    refused = {frozenset((name, other)) for name, others in REFUSED.items() for other in others.split()}
    for pair in combinations(GIVEN, 2):
        arguments = {GIVEN[name][0]: GIVEN[name][1](folder) for name in pair}
        if len(arguments) == 1:
            continue
        if frozenset(pair) not in refused:
            RLM(**arguments)
            continue
        with pytest.raises(ConfigurationError) as why:
            RLM(**arguments)
        assert len(str(why.value)) < 300


def test_other_name_is_answered_with_the_way_to_write_it() -> None:
    ways = {
        "record": 'RLM takes no record: write RLM(model, models=Models(record="run.jsonl"))',
        "isolation": 'RLM takes no isolation: write RLM(model, sandbox="strict")',
        "query_handler": "RLM takes no query_handler: write RLM(model, recursion=function)",
        "backend": 'RLM takes no backend: write RLM("openai/gpt-5-mini")',
        "max_depth": "RLM takes no max_depth: it is a limit: write RLM(model, limits=Limits(max_depth=...))",
        "max_dept": "RLM takes no max_dept; did you mean RLM(model, limits=Limits(max_depth=...))?",
        "sub_mode": "RLM takes no sub_mode; did you mean sub_model?",
    }
    for name, way in ways.items():
        other: Any = {name: 3}
        with pytest.raises(ConfigurationError) as why:
            RLM("offline", **other)
        assert str(why.value) == way
    with pytest.raises(
        ConfigurationError, match=r"^RLM takes no nonsense; there are: model, sub_model, models, .*handler$"
    ):
        RLM("offline", **{"nonsense": 3})  # type: ignore[arg-type]


def test_every_way_to_write_an_argument_is_a_way() -> None:
    """The arguments, limits and classes that the table names exist."""
    public = {*dir(rlm_broker), "dict"}
    for name, way in {**RLM_ARGUMENTS, **SANDBOX_ARGUMENTS}.items():
        tree = ast.parse(way.partition(": it is no")[0].replace("{...}", "{}"))
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]:
            assert isinstance(call.func, ast.Name)
            assert call.func.id in public, name
            kind = getattr(rlm_broker, call.func.id)
            known = getattr(kind, "fields", None) or inspect.signature(kind).parameters
            assert {each.arg for each in call.keywords} <= {*known}, name


@pytest.mark.parametrize(("page", "section"), [("rlms", ""), ("others", "\n## DSPy\n")])
def test_arguments_of_a_page_for_other_systems_are_answered(page: str, section: str) -> None:
    text = (PROJECT / f"docs/coming-from/{page}.md").read_text()
    text = text.partition(section)[2].partition("\n## ")[0] if section else text
    example = text.partition('=== "rlm-broker"')[0].partition("RLM(")[2]
    rows = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", row)}
    named |= set(re.findall(r"^        ([a-z_]+)=", example, re.MULTILINE))
    ours = {"completion", "start", "stop", "port", "address", "tool_code", *inspect.signature(RLM).parameters}
    assert len(named - ours) >= 8
    for name in named - ours:
        with pytest.raises(ConfigurationError, match=r"write RLM\(|write rlm\.|there is one loop"):
            RLM("offline", **{name: 3})  # type: ignore[arg-type]


def _of(module: str) -> Any:
    """Return a class of models as another library has it: it can be called, but not as a client."""

    def call(_self: object, prompt: object = None, *, messages: object = None) -> list[object]:
        return [prompt, messages]

    return type("LM", (), {"__module__": module, "__init__": lambda *_: None, "__call__": call, "completion": call})


def test_first_guesses_of_other_calls_are_answered() -> None:
    guesses: dict[str, Callable[[], object]] = {
        "write limits=Limits(max_depth=...)": lambda: RLM("offline", limits={"max_depth": 2}),  # type: ignore[arg-type]
        "limits=Limits(max_tokens=...)": lambda: RLM("offline").completion("a", "?", limits={"max_tokens": 2}),  # type: ignore[call-overload]
        "Model takes its fields by name: write Model(name='qwen3')": lambda: Model("qwen3"),  # type: ignore[call-arg]
        'write Model(name="gpt-5-mini"': lambda: RLM(type("OpenAI", (), {"__module__": "openai"})()),
        "lambda messages: lm(messages=messages)[0]": lambda: RLM(_of("dspy.clients.lm")("openai/x")),
        "model.invoke(messages).content": lambda: RLM("offline", type("Mine", (_of("langchain_core.models"),), {})()),
        'LM: write "openai/gpt-5-mini", or Model(name=': lambda: RLM(_of("litellm.router")()),
        "write `with Sandbox() as sandbox:`": Sandbox.create,
        "Sandbox takes no image: write": lambda: Sandbox(image="python:3.12"),  # type: ignore[arg-type]
        "Sandbox takes no memory: write": lambda: Sandbox(memory=512),  # type: ignore[arg-type]
        "it is a limit: write Sandbox(ReplLimits(cpu_s=...))": lambda: Sandbox(cpu_s=5),  # type: ignore[arg-type]
    }
    for sentence, call in guesses.items():
        with pytest.raises(ConfigurationError) as why:
            call()
        assert sentence in str(why.value)


def test_limits_of_other_systems_are_answered() -> None:
    ours = {"max_errors": "max_consecutive_errors", "max_cost": "max_budget_usd", "max_timeout": "run_timeout_s"}
    ours |= {"max_output_chars": "max_observation_chars", "max_concurrent_subcalls": "max_concurrent_children"}
    for theirs, name in {**ours, "memory_mb": "memory_bytes"}.items():
        with pytest.raises(ConfigurationError, match=rf"^there is no limit '{theirs}'; did you mean {name}\?$"):
            Limits(**cast("Any", {theirs: 3}))


def test_run_model_beside_a_replay_is_refused(folder: Path) -> None:
    each: list[dict[str, Any]] = [{"model": "offline"}, {"sub_model": "offline"}]
    for given in each:
        with pytest.raises(ConfigurationError, match="it brings its own models"):
            RLM(models=Models(replay=folder / "recorded.jsonl")).start("text", "?", **given).result()


def test_run_limits_of_a_kept_repl_are_refused() -> None:
    with RLM(reply, persistent=True) as rlm:
        assert rlm.start("text", "?", limits=Limits(max_depth=2)).result().response == "1"
        with pytest.raises(ConfigurationError, match="a persistent RLM has one REPL: give memory_bytes to RLM"):
            rlm.start("text", "?", limits=Limits(memory_bytes=1 << 29))


SANDBOX: dict[str, Any] = {
    "limits": Limits(memory_bytes=1 << 28),
    "isolation": "strict",
    "allow_exec": True,
    "exact_memory": True,
    "warm": 2,
    "seed": 7,
    "packages": ["six"],
}


def test_sandbox_arguments_agree_or_are_refused(tmp_path: Path) -> None:
    given = SANDBOX | {"python": a_venv(tmp_path)}
    for pair in combinations(given, 2):
        if set(pair) == {"python", "packages"}:
            with pytest.raises(ConfigurationError, match="either python or packages"):
                Sandbox(**{name: given[name] for name in pair})
            continue
        Sandbox(**{name: given[name] for name in pair})
    with pytest.raises(ConfigurationError, match="standard"):
        Sandbox(isolation="standard", allow_exec=True)


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
