"""Outcomes of blocks and runs, as text for a model, as pictures, and as structured results."""

import base64
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import mcp_types as types
from pydantic import BaseModel

from rlm_broker import Block, Completion, Display, FileEntry, RunFailed
from rlm_broker.serve.hosting.runs import HostedRun
from rlm_broker.serve.mcp import forms
from rlm_broker.values.text import encodable, shorten

MOST_CHARS: Final = 20_000
"""Characters of the text beside a structured result, and of each text of a block in it."""
ROOM_CHARS: Final = 600
"""Characters among them for what is reported of the outcome, beside what the code has printed."""
MOST_ANSWER_CHARS: Final = 200_000
"""Characters of an answer in a structured result."""
PICTURES: Final = ("image/png", "image/jpeg")
"""Forms of displays sent as pictures."""
TEXTS: Final = ("text/markdown", "text/plain", "text/latex")
"""Forms of displays sent as text, the best one first."""


def tool_outcome(
    result: BaseModel, text: str, pictures: Iterable[types.ImageContent] = (), *, is_error: bool = False
) -> types.CallToolResult:
    """Return an outcome as a client gets it.

    Args:
        result: Structured result.
        text: Text for the model, at most `MOST_CHARS` characters.
        pictures: Pictures beside it.
        is_error: Whether the call has failed.
    """
    content: list[types.ContentBlock] = [types.TextContent(text=text), *pictures]
    structured = result.model_dump(mode="json")
    return types.CallToolResult(content=content, structured_content=structured, is_error=is_error)


# -- blocks ------------------------------------------------------------------------------------------------------------


def block_outcome(block: Block, repl: str | None) -> types.CallToolResult:
    """Return the outcome of a block.

    Args:
        block: The block.
        repl: Handle of its REPL; None if the REPL is gone.
    """
    pictures = tuple(_pictures(block.displays))
    variables = [
        forms.VariableMade(
            name=cut(each.name, 60),
            type=cut(each.type, 60),
            size=list(each.size) if isinstance(each.size, tuple) else each.size,
        )
        for each in block.variables
    ]
    result = forms.Ran(
        repl=repl,
        status=block.status,
        stdout=cut(block.stdout, MOST_CHARS),
        stderr=cut(block.stderr, MOST_CHARS),
        error=None if block.error is None else cut(block.error, ROOM_CHARS),
        limit=block.limit,
        blocks_undone=block.blocks_undone,
        seconds=round(block.execution_time, 3),
        variables=variables,
        pictures=len(pictures),
    )
    return tool_outcome(result, _block_text(block, repl), pictures)


def cut(text: str, limit: int) -> str:
    """Return a text of at most about `limit` characters. Lone surrogates, unknown to UTF-8, are escaped."""
    return encodable(shorten(text, limit))


def _block_text(block: Block, repl: str | None) -> str:
    printed = [block.stdout, *_display_texts(block.displays), block.stderr]
    parts = ["\n".join(text.rstrip("\n") for text in printed if text.strip("\n"))]
    if block.status != "ok" and not (block.status == "error" and block.stderr):
        parts.append(cut(f"{block.status}: {block.error}", ROOM_CHARS // 2))
    if block.status == "killed" and repl is not None:
        undone = block.blocks_undone
        lost = {None: "all", 1: "those of this block alone"}.get(undone, f"those of the last {undone} blocks run")
        parts.append(f"[variables are lost: {lost}]")
    if block.displays_omitted:
        parts.append(f"[{block.displays_omitted:,} further displays were not kept]")
    gone = "[the REPL is gone, with its variables: leave out repl to begin a new one]"
    parts.append(gone if repl is None else f"[repl: {repl}]")
    return "\n".join(filter(None, [cut(parts[0], MOST_CHARS - ROOM_CHARS), *parts[1:]]))


def _display_texts(displays: Sequence[Display]) -> Iterator[str]:
    """Yield the text of each display that is no picture."""
    for display in displays:
        if not any(mime in display.data for mime in PICTURES):
            text = next((display.data[mime] for mime in TEXTS if mime in display.data), None)
            yield text if isinstance(text, str) else f"[shown: {', '.join(display.data)}]"


def _pictures(displays: Iterable[Display]) -> Iterator[types.ImageContent]:
    for display in displays:
        for mime in PICTURES:
            data = display.data.get(mime)
            if isinstance(data, bytes):
                yield types.ImageContent(data=base64.b64encode(data).decode(), mime_type=mime)
                break


# -- runs --------------------------------------------------------------------------------------------------------------


def answer_outcome(run: str, completion: Completion) -> types.CallToolResult:
    """Return the outcome of an ended run, with or without an answer."""
    answer = completion.response if completion.parsed is None else json.dumps(completion.parsed, ensure_ascii=False)
    reached = f"{completion.limit} was reached before there was an answer"
    why = "the model gave no answer" if completion.limit is None else reached
    result = forms.Answer(
        run=run,
        state="ended",
        answer=None if answer is None else cut(answer, MOST_ANSWER_CHARS),
        error=why if answer is None else None,
        limit=completion.limit,
        is_stopped=completion.is_stopped,
        **_used(completion),
    )
    if answer is None:
        return tool_outcome(result, f"The run has ended: {why}.", is_error=True)
    parts = [cut(answer, MOST_CHARS - ROOM_CHARS)]
    if completion.limit is not None:
        parts.append(f"[{completion.limit} was reached: that is the best answer so far]")
    elif completion.is_stopped:
        parts.append("[the run was stopped: that is the best answer so far]")
    return tool_outcome(result, "\n".join(parts))


def failure_outcome(run: str, failed: RunFailed) -> types.CallToolResult:
    """Return the outcome of a failed run."""
    sentence = cut(str(failed), ROOM_CHARS)
    partial = failed.partial_answer
    result = forms.Answer(
        run=run,
        state="ended",
        error=sentence,
        partial_answer=None if partial is None else cut(partial, MOST_ANSWER_CHARS),
        **_used(failed),
    )
    parts = [f"The run has ended without an answer: {sentence}"]
    if partial:
        parts.append(f"Best answer so far:\n{cut(partial, MOST_CHARS - 2 * ROOM_CHARS)}")
    return tool_outcome(result, "\n".join(parts), is_error=True)


def waiting_outcome(hosted: HostedRun) -> types.CallToolResult:
    """Return the facts so far about a run."""
    run, doing, seconds = hosted.id, hosted.doing, round(time.time() - hosted.created_at, 3)
    result = forms.Answer(run=run, state=hosted.state, doing=doing, turns=hosted.progress.turn, seconds=seconds)
    text = f'The run goes on ({doing}, {seconds:.0f} s so far). Call get_run(run="{run}") for its answer.'
    return tool_outcome(result, text)


def _used(ended: Completion | RunFailed) -> dict[str, Any]:
    total = ended.usage_summary.total
    return {
        "turns": len(ended.trajectory),
        "seconds": round(ended.execution_time, 3),
        "tokens": total.total_input_tokens + total.total_output_tokens,
        "cost_usd": total.total_cost,
    }


# -- files -------------------------------------------------------------------------------------------------------------


def entries_outcome(path: str, entries: Sequence[FileEntry]) -> types.CallToolResult:
    """Return the entries of a folder."""
    listed = [forms.Entry(name=cut(each.name, 300), kind=each.kind, bytes=each.size_bytes) for each in entries]
    lines = [f"{each.size_bytes:>12,}  {json.dumps(each.name, ensure_ascii=False)}  {each.kind}" for each in entries]
    text = cut("\n".join(lines), MOST_CHARS - ROOM_CHARS) or "The folder is empty."
    return tool_outcome(forms.FilesDone(action="list", path=path, entries=listed), text)


def file_outcome(path: str, data: bytes) -> types.CallToolResult:
    """Return the content of a file."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        said = f"[{len(data):,} bytes, no UTF-8 text: see base64 of the structured result]"
        content: dict[str, Any] = {"base64": base64.b64encode(data).decode()}
    else:
        said, content = cut(text, MOST_CHARS - ROOM_CHARS), {"text": text}
    return tool_outcome(forms.FilesDone(action="read", path=path, bytes=len(data), **content), said)
