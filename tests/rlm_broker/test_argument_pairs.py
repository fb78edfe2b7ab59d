"""Pairs of arguments: both have an effect, or they are refused together. No argument is silently ignored."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import (
    RLM,
    ConfigurationError,
    FunctionClient,
    Instructions,
    Limits,
    LMHandler,
    Models,
    Nodes,
    Route,
    Sandbox,
    ScriptedClient,
    Tools,
)
from rlm_broker.keywords import Keywords
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
    "query_handler": ("query_handler", lambda _: lambda _run, _depth, handler: handler),
    "sandbox": ("sandbox", lambda _: "strict"),
    "Sandbox": ("sandbox", lambda _: Sandbox()),
    "handler": ("handler", lambda _: LMHandler(ScriptedClient([]))),
    "routes": ("routes", lambda _: [Route(to="offline", depths="2-")]),
    "model_policy": ("model_policy", lambda _: "pinned"),
    "cache": ("cache", lambda folder: folder / "cache.sqlite"),
    "record": ("record", lambda folder: folder / "new.jsonl"),
    "replay": ("replay", lambda folder: folder / "recorded.jsonl"),
    "sub_tools": ("sub_tools", lambda _: {}),
    "system_prompt": ("system_prompt", lambda _: "Be short."),
    "prompt_profile": ("prompt_profile", lambda _: "final"),
    "user_prologue": ("user_prologue", lambda _: "Hello."),
    "isolation": ("isolation", lambda _: "strict"),
    "allow_exec": ("allow_exec", lambda _: False),
    "seed": ("seed", lambda _: 7),
    "python": ("python", lambda folder: a_venv(folder / "venv")),
    "packages": ("packages", lambda _: ["six"]),
    "verbose": ("verbose", lambda _: True),
    "cluster": ("cluster", lambda _: Nodes()),
}
"""Maps the name of a way to give an argument to the argument and to the function that makes its value."""
REFUSED = {
    "handler": "model sub_model models Models routes model_policy cache replay",
    "replay": "model sub_model models Models routes model_policy cache seed Sandbox",
    "Models": "routes model_policy cache record",
    "Sandbox": "isolation allow_exec seed python packages",
    "python": "packages",
    "sandbox": "isolation",
    "Tools": "sub_tools",
    "instructions": "system_prompt prompt_profile user_prologue",
    "Instructions": "system_prompt prompt_profile user_prologue",
    "system_prompt": "prompt_profile",
    "cluster": "persistent query_handler Sandbox record replay",
}
"""Pairs in which one argument decides what the other sets, so that they must be refused together."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    RLM(reply, record=folder / "recorded.jsonl").completion("text", "?")
    return folder


def test_table_has_each_argument_of_rlm() -> None:
    own = RLM.__init__.__annotations__.keys() - {"return", "keywords"}
    assert {argument for argument, _ in GIVEN.values()} == own | Keywords.__annotations__.keys()


@pytest.mark.parametrize("one", GIVEN)
def test_conflicting_arguments_are_refused(one: str, folder: Path) -> None:
    """Arguments that decide the same are refused, and no other pairs are."""
    refused = {frozenset((name, other)) for name, others in REFUSED.items() for other in others.split()}
    for pair in combinations(GIVEN, 2):
        arguments = {GIVEN[name][0]: GIVEN[name][1](folder) for name in pair}
        if one not in pair or len(arguments) == 1:
            continue
        if frozenset(pair) not in refused:
            RLM(**arguments)
            continue
        with pytest.raises(ConfigurationError) as why:
            RLM(**arguments)
        assert len(str(why.value)) < 300


def test_policy_beside_a_handler_is_refused() -> None:
    """A policy beside a handler is refused, also when it is the default."""
    with pytest.raises(ConfigurationError, match="a handler brings its own models"):
        RLM(handler=LMHandler(ScriptedClient([]), model_policy="pinned"), model_policy="allow")


def test_run_model_beside_a_replay_is_refused(folder: Path) -> None:
    each: list[dict[str, Any]] = [{"model": "offline"}, {"sub_model": "offline"}]
    for given in each:
        with pytest.raises(ConfigurationError, match="it brings its own models"):
            RLM(replay=folder / "recorded.jsonl").start("text", "?", **given).result()


def test_run_limits_of_a_kept_repl_are_refused() -> None:
    """Limits of REPLs for one run are refused where the REPL is kept."""
    with RLM(reply, persistent=True) as rlm:
        assert rlm.start("text", "?", limits=Limits(max_depth=2)).result().response == "1"
        with pytest.raises(ConfigurationError, match="a persistent RLM has one REPL: give memory_bytes to RLM"):
            rlm.start("text", "?", limits=Limits(memory_bytes=1 << 29))


def test_persistent_without_with_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="keeps its REPL within `with"):
        RLM(reply, persistent=True).completion("text", "?")


def test_query_handler_decides_beside_each_recursion() -> None:
    asked: list[tuple[str, int]] = []

    def factory(run: str, depth: int, handler: Any) -> Any:
        asked.append((run, depth))
        return handler

    script = ScriptedClient(["```repl\nFINAL(rlm_query('short'))\n```", "a completion"])
    rlm = RLM(script, limits=Limits(max_depth=2), recursion="auto", query_handler=factory)
    assert rlm.completion("text", "?").response == "a completion"  # "auto" gave that child no REPL
    assert asked == [("1", 0)]


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
