"""The pages of runs and blocks in a notebook: their parts, their size, and hostile text in them."""

import dataclasses
from itertools import product
from typing import Any

from rlm_broker import RLM, Block, Completion, Display, Iteration, Limits, Sandbox, ScriptedClient, Usage, UsageSummary
from rlm_broker.results import ChildTrace
from rlm_broker.values.pages import (
    BLOCK_PICTURE_BYTES,
    FIRST_TURNS,
    LAST_TURNS,
    MAX_BLOCKS,
    MAX_ROWS,
    RUN_PICTURE_BYTES,
    TEXT_CHARS,
)
from tests.support.markup import Page, read

HOSTILE = "</pre></details><script>alert('x')</script><img src=//evil/?q onerror=1>\x1b[2J\ud800 ```\n# [l](//evil)"
SHOWN_HOSTILE = HOSTILE.replace("\x1b", "\\x1b").replace("\ud800", "\\ud800")
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def bundle(shown: Any) -> dict[str, str]:
    forms: dict[str, str] = shown._repr_mimebundle_(include=None, exclude=None)
    assert forms.keys() == {"text/html", "text/markdown", "text/plain"}
    assert forms["text/plain"] == repr(shown)
    for form in forms.values():
        form.encode()
    return forms


def page(shown: Any) -> Page:
    return read(bundle(shown)["text/html"])


def run(**fields: Any) -> Completion:
    usage = UsageSummary({"m": Usage(2, 3000, 4, 0.25)})
    named = {"response": "yes", "root_model": "m", "depth": 0, "execution_time": 1.5, "usage_summary": usage, **fields}
    return Completion(iterations=len(named.get("trajectory", ())), **named)


def turns(count: int, blocks: int, text: str) -> tuple[Iteration, ...]:
    block = Block(text, "error", text, text, text, final_answer=text, displays=(Display({"text/plain": text + "d"}),))
    return tuple(Iteration(number + 1, text, (block,) * blocks) for number in range(count))


def test_a_run_shows_its_answer_turns_children_and_usage() -> None:
    code = "Look.\n```repl\nprint(len(context), '<b>')\nFINAL(rlm_query('child <i>'))\n1 / 0\n```"
    replies = [code, "FINAL(of the child)"]
    done = RLM(ScriptedClient(replies), limits=Limits(max_depth=2)).completion("text", "What <u>is</u> there?")
    assert done.isolation is not None
    shown = page(done)
    assert shown.boxes[0] == "of the child"
    assert code in shown.boxes
    assert "4 <b>\n" in shown.boxes
    assert "ZeroDivisionError: division by zero" in shown.boxes
    assert "What <u>is</u> there?scripted" not in shown.text
    for text in ("What <u>is</u> there?", "1 turn", f", {done.isolation.level}", "turn 1: block 1 error", "child <i>"):
        assert text in shown.text
    assert shown.text.rindex("1 turn") < shown.text.index("turn 1: block 1 error") < shown.text.index("1 child run")
    assert "of the child" in shown.text.partition("1 child run")[2]
    assert "1 modelmodelcallstokens intokens outcostscripted2" in shown.text


def test_hostile_text_is_shown_and_does_nothing() -> None:
    trajectory = turns(2, 1, HOSTILE)
    named: Any = dict.fromkeys(["response", "root_model", "root_prompt"], HOSTILE)
    child = ChildTrace(1, 0.1, HOSTILE, HOSTILE, None)
    usage = UsageSummary({HOSTILE: Usage(1, 1, 1)})
    whole = run(**named, usage_summary=usage, trajectory=trajectory, child_traces=(child,))
    for value, boxes, displays in ((whole, 13, 2), (trajectory[0].blocks[0], 5, 1)):
        shown = page(value)  # it fails at an element that is not ours
        assert (shown.boxes.count(SHOWN_HOSTILE), shown.boxes.count(f"{SHOWN_HOSTILE}d")) == (boxes, displays)
        assert shown.pictures == []


def test_page_of_a_run_is_bounded() -> None:
    sizes = [(21, 1), (3, 40), (500, 3), (1, 1)]
    for text, (count, blocks) in product(["x" * 65_536, "&" * 65_536, "\x00" * 65_536, "short"], sizes):
        named: Any = dict.fromkeys(["response", "root_model", "root_prompt"], text)
        children = (ChildTrace(1, 0.1, text[:80], text[:80]),) * 1000
        models = UsageSummary({f"{number}{text}": Usage(1, 1, 1) for number in range(100)})
        trajectory = turns(count, blocks, text)
        forms = bundle(run(**named, trajectory=trajectory, child_traces=children, usage_summary=models))
        assert len(forms["text/html"]) < 4 * TEXT_CHARS
        assert len(forms["text/plain"]) < 1000 + 10 * 200
        shown = read(forms["text/html"]).text
        assert f"1,000 child runs, the first {MAX_ROWS} of them" in shown
        if count > FIRST_TURNS + LAST_TURNS:
            assert f"{count - FIRST_TURNS - LAST_TURNS:,} turns are not shown" in shown
            assert f"turn {count}: " in shown
        if blocks == 40:
            assert f"{2 * 40 - MAX_BLOCKS} more blocks are not shown" in shown
            assert "40 more blocks are not shown" in shown


def test_run_without_an_answer_says_so() -> None:
    shown = page(run(response=None, limit="max_blocks"))
    assert shown.boxes == ["no answer"]
    assert "ended at the limit max_blocks" in shown.text
    assert "stopped" in page(run(is_stopped=True)).text


def test_pictures_of_a_block_are_shown_within_a_bound() -> None:
    large = Display({"image/png": PNG + bytes(BLOCK_PICTURE_BYTES - len(PNG))})
    small = Display({"image/jpeg": b"jpeg", "text/plain": "no"})
    shown = page(Block("code", "ok", displays=(large, small), displays_omitted=3))
    assert len(shown.pictures) == 1
    assert shown.pictures[0].startswith("data:image/png;base64,iVBOR")
    assert "no" in shown.boxes
    assert "3 more pictures or tables were left out" in shown.text
    both = page(Block("code", "ok", displays=(small, Display({"image/png": PNG}))))
    assert [picture.partition(";")[0] for picture in both.pictures] == ["data:image/jpeg", "data:image/png"]


def test_pictures_of_a_run_have_a_smaller_bound() -> None:
    displays = (Display({"image/png": PNG + bytes(RUN_PICTURE_BYTES // 3)}),) * 4
    html = bundle(run(trajectory=(Iteration(1, "reply", (Block("code", "ok", displays=displays),)),)))["text/html"]
    assert len(read(html).pictures) == 2
    assert read(html).text.count("Display(image/png") == 2
    assert len(html) < 2 * RUN_PICTURE_BYTES


def test_table_is_shown_as_text_unless_it_was_printed() -> None:
    table = Display({"text/html": "<table onclick=1>", "text/plain": "a table\n"})
    assert "a table\n" in page(Block("code", "ok", displays=(table,))).boxes
    assert page(Block("code", "ok", "a table\n", displays=(table,))).boxes.count("a table\n") == 1
    assert "Display(text/html, 17 characters" in page(Block("code", "ok", "a table\n", displays=(table,))).text


def test_block_that_ran_shows_what_it_printed_and_drew() -> None:
    code = "from PIL import Image\nImage.new('RGB', (3, 2)).show()\nprint('<b>')\nFINAL(7)"
    with Sandbox() as sandbox, sandbox.repl() as repl:
        block = repl.execute(code)
    shown = page(block)
    assert shown.boxes == ["<b>\n", "7", code]
    assert len(shown.pictures) == 1
    assert shown.text.startswith("ok after 0.")


def test_repr_of_a_block_and_a_turn_is_one_short_line() -> None:
    assert repr(Block("1 + 1", "ok", "2\n")) == r"Block(code='1 + 1', status='ok', stdout='2\n')"
    (turn,) = turns(1, 2, "x\n" * 50_000)
    for shown in (repr(turn.blocks[0]), repr(turn)):
        assert "[100,000 characters]" in shown
        assert "\n" not in shown
        assert len(shown) < 3000
    assert repr(dataclasses.replace(turn, reply="y")) == "Iteration(number=1, reply='y', blocks=['error', 'error'])"
