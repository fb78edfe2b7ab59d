"""Texts in Markdown: fenced or escaped, and cut."""

import re

from hypothesis import given
from hypothesis import strategies as st

from rlm_broker.results import Block, Completion
from rlm_broker.usage import Usage, UsageSummary
from rlm_broker.values.pages import FENCED_CHARS, fenced, of, plain

HOSTILE = "</pre><script>alert(1)</script>\n```\n# [l](//evil) ![p](//evil)\n~~~\n````\n<b>"


def run(response: str | None, model: str = "m") -> Completion:
    return Completion(response, model, 0, 2, 1.5, UsageSummary({"m": Usage(2, 3000, 4, 0.25)}))


def test_run_is_its_answer_and_its_facts() -> None:
    facts = r"m, 2 turns, 1.5 s, 2 calls, 3,000 tokens in and 4 out, \$0.2500"
    assert of(run("yes"))["text/markdown"] == f"```text\nyes\n```\n\n{facts}"
    assert of(run(None))["text/markdown"] == f"```text\nno answer\n```\n\n{facts}"


def test_block_is_what_came_of_it() -> None:
    block = Block("1 / 0", "error", "printed\n", error="ZeroDivisionError", execution_time=0.5, limit="cpu_s")
    assert of(block)["text/markdown"] == (
        "error after 0.50 s at the limit cpu\\_s\n\ncode:\n\n```text\n1 / 0\n```\n\n"
        "output:\n\n```text\nprinted\n\n```\n\nerror:\n\n```text\nZeroDivisionError\n```"
    )


@given(st.text(st.sampled_from("`~a\n"), max_size=30))
def test_no_text_ends_its_fence(text: str) -> None:
    first, *lines, last = fenced(text).split("\n")
    assert first == f"{last}text"
    assert set(last) == {"`"}
    assert all(last not in line for line in lines)
    assert "\n".join(lines) == text


def test_hostile_text_stands_in_fences_or_is_escaped() -> None:
    for shown in (run(HOSTILE, HOSTILE), Block(HOSTILE, "ok", HOSTILE)):
        lines = iter(of(shown)["text/markdown"].splitlines())
        outside = ""
        for line in lines:
            if fence := re.match("`{3,}", line):
                assert len(fence[0]) == 5
                while next(lines) != fence[0]:
                    pass
            else:
                outside += line
        assert not re.search(r"(?<!\\)[<>`~\[(#!*_|&]", outside)


def test_text_is_cut_in_its_middle_and_printable() -> None:
    assert fenced("a" * FENCED_CHARS) == f"```text\n{'a' * FENCED_CHARS}\n```"
    assert "\n... [1 characters cut] ...\n" in fenced("a" * (FENCED_CHARS + 1))
    assert FENCED_CHARS == 10_000
    assert fenced("a\x1b\ud800\tb") == "```text\na\\x1b\\ud800\tb\n```"
    assert plain("a\x1b\n b") == r"a\\x1b b"
