"""Pages of a run and of a block for a notebook, as HTML and as Markdown.

A run and a block are known by their fields alone, because `results` needs this room.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from rlm_broker.values.display import RENDERED, Display, picture_in
from rlm_broker.values.markup import Markup, TextBudget, box, escaped, folded, joined, line, paragraph, picture, table
from rlm_broker.values.text import printable, shorten
from rlm_broker.values.words import counted, dollars, facts_of_run, how_block_ended

FENCED_CHARS = 10_000
"""Characters of a text in a fence. The middle of a longer one is cut."""
_MARKS = re.compile(r"[^\w\s.,:]|_")
TEXT_CHARS = 60_000
"""Characters of all replies, code and output in one page. The middle of what takes more than its share is cut."""
ANSWER_CHARS = 20_000
"""Characters of an answer in a page. The middle of a longer one is cut."""
FIRST_TURNS, LAST_TURNS = 5, 25
"""Turns in the page of a run. Those between them are counted."""
MAX_BLOCKS = 60
"""Blocks in the page of a run. Later ones are counted."""
MAX_ROWS = 50
"""Children, or models, in the page of a run. Further ones are counted."""
BLOCK_PICTURE_BYTES = 4 << 20
"""Bytes of all pictures in the page of a block. A picture past them is described in a line."""
SEARCHED_CHARS, PRINTED_CHARS = 10_000, 100_000
"""Characters of a display's text up to which it is searched in the output, and of the output's end that is searched."""
RUN_PICTURE_BYTES = 128 << 10
"""The same in the page of a run: 128 KiB, since a notebook keeps the pages of all runs in its file."""


def of(shown: Any) -> dict[str, str]:
    """Return a `Completion` or a `Block` by MIME type, as IPython expects it of `_repr_mimebundle_`."""
    return of_completion(shown) if hasattr(shown, "trajectory") else of_block(shown)


def of_completion(run: Any) -> dict[str, str]:
    """Return the page of a run, its answer as Markdown, and its `repr`."""
    return {"text/html": _run_page(run), "text/markdown": _completion_markdown(run), "text/plain": repr(run)}


def of_block(block: Any) -> dict[str, str]:
    """Return the page of a block, the same as Markdown, and its `repr`."""
    page = _Page(len(_texts(block)), BLOCK_PICTURE_BYTES, 1)
    code = folded(escaped("code"), box(page.texts.fitted(block.code)))
    shown = joined([paragraph(line(how_block_ended(block))), *page.outcome(block), code])
    return {"text/html": shown, "text/markdown": _block_markdown(block), "text/plain": repr(block)}


class _Page:
    """A page being made: what its texts, pictures and blocks may still take."""

    def __init__(self, texts: int, picture_bytes: int, blocks: int) -> None:
        self.texts = TextBudget(TEXT_CHARS, texts)
        self.blocks = blocks
        self._picture_bytes = picture_bytes

    def turn(self, turn: Any, *, is_open: bool) -> Markup:
        """Return a turn: the reply, and each block with its code and what came of it."""
        shown, self.blocks = turn.blocks[: self.blocks], max(self.blocks - len(turn.blocks), 0)
        parts = [box(self.texts.fitted(turn.reply))]
        for number, block in enumerate(shown, 1):
            parts.append(paragraph(joined([escaped(f"block {number}: "), line(how_block_ended(block))])))
            parts += [box(self.texts.fitted(block.code)), *self.outcome(block)]
        if left_out := len(turn.blocks) - len(shown):
            parts.append(paragraph(escaped(f"{left_out:,} more blocks are not shown")))
        ended = ", ".join(f"block {number} {block.status}" for number, block in enumerate(turn.blocks[:5], 1))
        return folded(line(f"turn {turn.number}: {ended or 'no code'}"), joined(parts), is_open=is_open)

    def outcome(self, block: Any) -> list[Markup]:
        """Return what a block printed and showed, its error and what it submitted."""
        kinds = (("", block.stdout), ("error", block.stderr), ("error", block.error), ("answer", block.final_answer))
        parts = [box(self.texts.fitted(text), kind) for kind, text in kinds if text]
        parts += [self._shown(display, block.stdout) for display in block.displays]
        if block.displays_omitted:
            parts.append(paragraph(escaped(f"{block.displays_omitted:,} more pictures or tables were left out")))
        return parts

    def _shown(self, display: Display, printed: str) -> Markup:
        """Return a display: its picture, or its text if that was not printed. HTML and SVG are described alone."""
        for mime in RENDERED:
            data = display.data.get(mime)
            if isinstance(data, bytes) and len(data) <= self._picture_bytes:
                self._picture_bytes -= len(data)
                return picture(mime, data, picture_in(display) or mime)
            # A search for a long text could take minutes: a long text is shown without one.
            if (
                isinstance(data, str)
                and data.strip()
                and (len(data) > SEARCHED_CHARS or data.strip() not in printed[-PRINTED_CHARS:])
            ):
                return box(self.texts.fitted(data))
        return paragraph(line(repr(display)))


def _run_page(run: Any) -> Markup:
    turns = [*run.trajectory[:FIRST_TURNS], *run.trajectory[FIRST_TURNS:][-LAST_TURNS:]]
    shown = list(islice(chain.from_iterable(turn.blocks for turn in turns), MAX_BLOCKS))
    page = _Page(len(turns) + sum(len(_texts(block)) for block in shown), RUN_PICTURE_BYTES, MAX_BLOCKS)
    parts = [page.turn(turn, is_open=False) for turn in turns]
    if left_out := len(run.trajectory) - len(turns):
        parts.insert(FIRST_TURNS, paragraph(escaped(f"{left_out:,} turns are not shown; see Completion.trajectory")))
    answer = TextBudget(ANSWER_CHARS, 1).fitted("no answer" if run.response is None else run.response)
    question = [paragraph(line(run.root_prompt))] if run.root_prompt else []
    whole = [*question, box(answer, "answer"), paragraph(line(facts_of_run(run)))]
    remarks = () if run.context is None else run.context.remarks(with_names=True)
    whole += [paragraph(line(f"context: {remark}")) for remark in remarks]
    whole += [folded(escaped(counted(len(run.trajectory), "turn")), joined(parts))] if parts else []
    return joined([*whole, *_children(run.child_traces), *_usage(run.usage_summary.model_usage_summaries)])


def _children(traces: Sequence[Any]) -> list[Markup]:
    if not traces:
        return []
    rows = [
        (
            escaped(f"{child.depth}"),
            escaped(f"{child.duration_s:.2f}"),
            line(child.prompt_preview),
            line(child.error or child.result_preview or ""),
        )
        for child in traces[:MAX_ROWS]
    ]
    title = escaped(f"{counted(len(traces), 'child run')}{_beyond(len(traces))}")
    return [folded(title, table(("depth", "seconds", "task", "result"), rows))]


def _usage(models: Mapping[str, Any]) -> list[Markup]:
    rows = [
        (
            line(name),
            escaped(f"{used.total_calls:,}"),
            escaped(f"{used.total_input_tokens:,}"),
            escaped(f"{used.total_output_tokens:,}"),
            escaped(dollars(used.total_cost)),
        )
        for name, used in islice(models.items(), MAX_ROWS)
    ]
    title = escaped(f"{counted(len(models), 'model')}{_beyond(len(models))}")
    return [folded(title, table(("model", "calls", "tokens in", "tokens out", "cost"), rows))] if rows else []


def _texts(block: Any) -> list[str]:
    """Return the texts of a block that its page shows."""
    plain = [display.data.get("text/plain") for display in block.displays]
    every = [block.code, block.stdout, block.stderr, block.error, block.final_answer, *plain]
    return [text for text in every if text]


def _beyond(number: int) -> str:
    return f", the first {MAX_ROWS} of them" if number > MAX_ROWS else ""


# -- Markdown, where every text from outside stands in a fence, and no link, picture or tag takes effect --------------


def _completion_markdown(run: Any) -> str:
    """Return the answer of a `Completion` and the facts of its run."""
    return f"{fenced('no answer' if run.response is None else run.response)}\n\n{plain(facts_of_run(run))}"


def _block_markdown(block: Any) -> str:
    """Return the code of a `Block` and what came of it."""
    texts = (("code", block.code), ("output", block.stdout), ("stderr", block.stderr), ("error", block.error))
    parts = [f"{name}:\n\n{fenced(text)}" for name, text in texts if text]
    return "\n\n".join([plain(how_block_ended(block)), *parts])


def fenced(text: str) -> str:
    """Return the text in a fence longer than each row of backticks in the text, so that none ends it."""
    shown = printable(shorten(text, FENCED_CHARS), keep="\n\t")
    fence = "`" * (1 + max([2, *map(len, re.findall("`+", shown))]))
    return f"{fence}text\n{shown}\n{fence}"


def plain(text: str) -> str:
    """Return the text with a backslash before each mark that Markdown or HTML may read."""
    return _MARKS.sub(lambda found: f"\\{found[0]}", printable(" ".join(text.split())))
