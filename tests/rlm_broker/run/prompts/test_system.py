"""The system prompt: each variant as a file in `snapshots/`, its numbers as the limits that are enforced, its names as
those that a REPL has.

A prompt that was changed on purpose is written anew by

    RENEW_SNAPSHOTS=1 python -m pytest tests/rlm_broker/run/prompts/test_system.py
"""

import inspect
import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from rlm_broker.limits import Limits
from rlm_broker.run.prompts.instructions import Profile
from rlm_broker.run.prompts.system import SMALL_WINDOW_TOKENS, Facts, ending, fitting, rounded_down, system_prompt
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.repl.queries import Queries

SNAPSHOTS = Path(__file__).with_name("snapshots")
FLAT, DEEP = Limits(max_depth=1), Limits(max_depth=3)
RICH: dict[str, Any] = {
    "reads_chars": 380_000,
    "window_tokens": 128_000,
    "models": [("small", "reads 48,000 characters"), ("large", "of the user's")],
    "packages": ["numpy", "pandas"],
    "python": "3.11",
    "tools": ["- `in_stock(name)`: how many there are.", "- `PRICES`: a dict."],
}
VARIANTS: dict[str, tuple[Facts, Profile]] = {
    **{f"root_{profile}": (Facts(FLAT), profile) for profile in get_args(Profile)},
    **{f"root_with_children_{profile}": (Facts(DEEP), profile) for profile in get_args(Profile)},
    "child": (Facts(DEEP, depth=2), "both"),
    "child_with_children": (Facts(DEEP, depth=1), "both"),
    "child_compact": (Facts(DEEP, depth=2), "compact"),
    "child_with_children_compact": (Facts(DEEP, depth=1), "compact"),
    "small_window": (Facts(DEEP, window_tokens=SMALL_WINDOW_TOKENS - 1, reads_chars=24_000), "both"),
    "small_window_final": (Facts(DEEP, window_tokens=SMALL_WINDOW_TOKENS - 1, reads_chars=24_000), "final"),
    "rich": (Facts(DEEP, **RICH), "both"),
    "rich_compact": (Facts(DEEP, **RICH), "compact"),
    "rich_child": (Facts(DEEP, depth=2, **RICH), "answer"),
}
NO_NAMES = {
    *("repl", "Error", "await"),
    *("part", "parts", "pattern", "text", "size", "overlap", "first", "last", "value", "the", "report"),
}
"""Words in backticks that are not names in the REPL: a fence's tag, how an error begins, a keyword of Python; and
arguments, and what code has made itself."""


@pytest.mark.parametrize("name", VARIANTS)
def test_prompt_matches_its_snapshot(name: str) -> None:
    prompt = system_prompt(*VARIANTS[name]) + "\n"
    file = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("RENEW_SNAPSHOTS"):
        file.write_text(prompt)
    assert file.read_text() == prompt, "changed on purpose? see the docstring of this module"


def test_snapshots_exist_only_for_known_variants() -> None:
    assert {file.stem for file in SNAPSHOTS.iterdir()} == VARIANTS.keys()


def test_compact_prompt_is_used_for_a_small_window() -> None:
    """The compact prompt is short, and a small window gets it unless another was chosen."""
    facts = Facts(DEEP)
    assert len(system_prompt(facts, "compact")) < len(system_prompt(facts)) / 2
    assert fitting("both", SMALL_WINDOW_TOKENS - 1) == "compact"
    assert fitting("both", SMALL_WINDOW_TOKENS) == fitting("both", None) == "both"
    assert fitting("final", 100) == "final"


@pytest.mark.parametrize("profile", get_args(Profile))
def test_prompt_tells_one_way_to_end_by_default(profile: Profile) -> None:
    """A prompt tells one way to end unless both are wanted."""
    prompt = system_prompt(Facts(DEEP), profile)
    assert ("FINAL" in prompt) == (profile != "answer")
    assert ("answer['ready']" in prompt) == (profile in ("both", "answer"))
    if profile != "compact":
        assert ending(profile) in prompt


@pytest.mark.parametrize("has_children", [False, True])
@pytest.mark.parametrize("profile", ["both", "compact"])
def test_children_are_told_of_only_where_there_are_any(has_children: bool, profile: Profile) -> None:
    prompt = system_prompt(Facts(DEEP if has_children else FLAT), profile)
    assert ("contexts=parts" in prompt) == (has_children and profile == "both")
    assert ("in a REPL of its own" in prompt or "with a REPL of its own" in prompt) == has_children


# -- numbers ---------------------------------------------------------------------------------------------------------

CHANGED = {
    "max_concurrent_calls": 37,
    "max_batch_prompts": 1_234,
    "max_concurrent_children": 29,
    "max_children_total": 7_531,
    "max_observation_chars": 54_321,
    "block_timeout_s": 86.5,
    "max_iterations": 47,
}
"""Each limit that a prompt tells, with a value that no other number of the prompt has."""
COMPACT = {"max_observation_chars", "max_iterations"}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("profile", ["both", "final", "answer", "compact"])
def test_each_number_is_the_limit(name: str, profile: Profile) -> None:
    if profile == "compact" and name not in COMPACT:
        return
    value = CHANGED[name]
    before = system_prompt(Facts(Limits(max_depth=2)), profile)
    after = system_prompt(Facts(Limits.model_validate({"max_depth": 2, name: value})), profile)
    assert f"{value:,}" not in before
    assert f"{value:,}" in after


def test_no_other_number_is_told_than_those() -> None:
    limits = Limits.model_validate({"max_depth": 2, **CHANGED})
    prompt = system_prompt(Facts(limits, reads_chars=660_000), "both")
    told = set(re.findall(r"\d[\d,_.]*\d|\d", re.sub(r"```.*?```", "", prompt, flags=re.DOTALL)))
    numbered_steps = set("123456")
    assert told == {f"{value:,}" for value in CHANGED.values()} | {"660,000", "20", "0"} | numbered_steps


def test_turns_are_those_of_the_depth() -> None:
    limits = Limits(max_depth=3, max_iterations=(41, 17, 5))
    for depth, turns in enumerate((41, 17, 5)):
        for profile in get_args(Profile):
            assert f"You have {turns} turns" in system_prompt(Facts(limits, depth=depth), profile)


def test_children_without_a_bound_are_told_without_a_number() -> None:
    assert " in all." not in system_prompt(Facts(Limits(max_depth=2, max_children_total=None)))


def test_call_size_is_told_and_used_in_examples() -> None:
    """The size that a call reads is told and is the size of the parts in the example."""
    prompt = system_prompt(Facts(DEEP, reads_chars=380_000))
    assert "It can read 380,000 characters." in prompt
    assert "chunks(context, 200_000, overlap=500)" in prompt
    assert "It can read" not in system_prompt(Facts(DEEP))


@pytest.mark.parametrize(
    ("number", "digits", "rounded"), [(384_000, 2, 380_000), (99, 1, 90), (7, 2, 7), (100_000, 1, 100_000), (0, 1, 0)]
)
def test_a_round_number_is_no_larger(number: int, digits: int, rounded: int) -> None:
    assert rounded_down(number, digits) == rounded <= number


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Names that code finds in a REPL, and the keywords of what it may call there."""
    with Sandbox() as sandbox, sandbox.repl({"a.txt": "text"}) as repl:
        block = repl.execute("print(*globals(), *vars(__builtins__))")
    functions = (Queries.llm_query, Queries.llm_query_batched, Queries.rlm_query, Queries.rlm_query_batched)
    return {*block.stdout.split()} | {name for each in functions for name in inspect.signature(each).parameters}


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("rich")])
def test_every_name_in_backticks_is_there(name: str, known: set[str]) -> None:
    prompt = re.sub(r"```.*?```", "", system_prompt(*VARIANTS[name]), flags=re.DOTALL)
    told = re.findall(r"`([^`]*)`", prompt)
    assert told
    strangers = {
        word
        for text in told
        for word in re.findall(r"\b[A-Za-z_]\w*", re.sub(r"'[^']*'", "", text))
        if word not in known
    }
    assert strangers <= NO_NAMES


@pytest.mark.parametrize("name", VARIANTS)
def test_examples_are_python_and_call_existing_functions(name: str, known: set[str]) -> None:
    examples = re.findall(r"```repl\n(.*?)```", system_prompt(*VARIANTS[name]), flags=re.DOTALL)
    assert examples
    for code in examples:
        compile(code, "example", "exec")
        called = set(re.findall(r"(?<![.\w])([a-z_]\w*)\(", code))
        assert called <= known
