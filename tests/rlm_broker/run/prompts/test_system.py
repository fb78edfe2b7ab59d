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
from tests.support.tables import table

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
    *("line", "start", "end", "around"),
    *("child", "children", "k", "keep", "done", "result", "timeout_s", "cancel", "ask"),
}
"""Words in backticks that are not names in the REPL: a fence's tag, how an error begins, a keyword of Python; and
arguments, attributes, and what code has made itself."""


def test_prompts_match_their_snapshots() -> None:
    prompts = {name: system_prompt(*variant) + "\n" for name, variant in VARIANTS.items()}
    if os.environ.get("RENEW_SNAPSHOTS"):
        for name, prompt in prompts.items():
            (SNAPSHOTS / f"{name}.txt").write_text(prompt)
    kept = {file.stem: file.read_text() for file in SNAPSHOTS.iterdir()}
    assert kept == prompts, "changed on purpose? see the docstring of this module"


def test_compact_prompt_is_used_for_a_small_window() -> None:
    facts = Facts(DEEP)
    assert len(system_prompt(facts, "compact")) < len(system_prompt(facts)) / 2
    assert fitting("both", SMALL_WINDOW_TOKENS - 1) == "compact"
    assert fitting("both", SMALL_WINDOW_TOKENS) == fitting("both", None) == "both"
    assert fitting("final", 100) == "final"


def test_prompt_tells_one_way_to_end_by_default() -> None:
    for profile in get_args(Profile):
        prompt = system_prompt(Facts(DEEP), profile)
        assert ("FINAL" in prompt) == (profile != "answer")
        assert ("answer['ready']" in prompt) == (profile in ("both", "answer"))
        assert profile == "compact" or ending(profile) in prompt


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


@table("profile", get_args(Profile))
def test_each_number_is_the_limit(profile: Profile) -> None:
    before = system_prompt(Facts(Limits(max_depth=2)), profile)
    told = COMPACT if profile == "compact" else CHANGED.keys()
    for name in told:
        assert f"{CHANGED[name]:,}" not in before
        after = system_prompt(Facts(Limits.from_dict({"max_depth": 2, name: CHANGED[name]})), profile)
        assert f"{CHANGED[name]:,}" in after, name


def test_no_other_number_is_told_than_those() -> None:
    limits = Limits.from_dict({"max_depth": 2, **CHANGED})
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
    prompt = system_prompt(Facts(DEEP, reads_chars=380_000))
    assert "It can read 380,000 characters." in prompt
    assert "chunks(context, 200_000, overlap=500)" in prompt
    assert "It can read" not in system_prompt(Facts(DEEP))


def test_a_round_number_is_no_larger() -> None:
    rounded = {(384_000, 2): 380_000, (99, 1): 90, (7, 2): 7, (100_000, 1): 100_000, (0, 1): 0}
    assert {each: rounded_down(*each) for each in rounded} == rounded


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Names that code finds in a REPL, and the keywords of what it may call there."""
    with Sandbox() as sandbox, sandbox.repl({"a.txt": "text"}) as repl:
        block = repl.execute("print(*globals(), *vars(__builtins__))")
    functions = (Queries.llm_query, Queries.llm_query_batched, Queries.rlm_query, Queries.rlm_query_batched)
    return {*block.stdout.split()} | {name for each in functions for name in inspect.signature(each).parameters}


def test_every_name_in_backticks_is_there(known: set[str]) -> None:
    for name, variant in VARIANTS.items():
        prompt = re.sub(r"```.*?```", "", system_prompt(*variant), flags=re.DOTALL)
        told = re.findall(r"`([^`]*)`", prompt)
        assert told
        words = {word for text in told for word in re.findall(r"\b[A-Za-z_]\w*", re.sub(r"'[^']*'", "", text))}
        assert name.startswith("rich") or words - known <= NO_NAMES, name


def test_examples_are_python_and_call_existing_functions(known: set[str]) -> None:
    for name, variant in VARIANTS.items():
        examples = re.findall(r"```repl\n(.*?)```", system_prompt(*variant), flags=re.DOTALL)
        assert examples, name
        for code in examples:
            compile(code, "example", "exec")
            assert set(re.findall(r"(?<![.\w])([a-z_]\w*)\(", code)) <= known, name
