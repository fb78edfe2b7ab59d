"""Notes for the model about unused code and answers. Without them it would wait for an output that never comes."""

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from rlm_broker.values.parsing.fences import Fence
from rlm_broker.values.parsing.source import Inspector

MAX_NOTES = 8
"""Most notes about one reply; further ones are left out."""


class NotRun(Struct, frozen=True):
    """Something in a reply that looks like code or an answer, and was not used.

    Attributes:
        what: Its short name: "a ```json fence", "<tool_call> markup".
        reason: One sentence for the model: why, and what to write instead.
    """

    what: str
    reason: str


class Note(Struct, frozen=True):
    """A `NotRun` and its place in the reply.

    Attributes:
        start: Offset in the reply; -1 sorts it first.
        is_quiet: Whether the model is informed only if the reply has neither code nor an answer. Most data in fences is
            meant as data.
    """

    start: int
    not_run: NotRun
    is_quiet: bool = False


EMPTY_FINAL = NotRun(
    "an empty final answer",
    "Nothing stands between its parentheses, so the run goes on; write FINAL(your answer) on a line of its own.",
)
FINAL_IN_A_SENTENCE = NotRun(
    "a final answer inside a sentence",
    "Words follow it on its line, so it was taken for a mention; write it on a line of its own.",
)
FINAL_VAR_WITHOUT_NAME = NotRun(
    "a FINAL_VAR without a variable's name",
    "FINAL_VAR takes the name of one variable; assign the value in a ```repl fence and write FINAL_VAR(that_name).",
)
FINAL_WITHIN_A_LINE = NotRun(
    "a final answer that begins no line, or does not end",
    "FINAL(your answer) stands on a line of its own and is closed; write it so.",
)
CODE_IN_THOUGHTS = NotRun(
    "code inside your reasoning",
    "What stands in the reasoning is never run; write the code in a ```repl fence after it.",
)

_UNTAGGED = NotRun("an untagged fence", "Only fences tagged `repl` are run; write ```repl instead of ``` before code.")
_MISPLACED = NotRun(
    "a ```repl fence that is not on lines of its own",
    "Its code was not on the lines after it, or it was quoted or not closed; write ```repl, the code, and ``` on "
    "separate lines.",
)
_TOOL_CALL_REASON = "There are no tools to call in this way; write Python in a ```repl fence instead."
_TOOL_CALL_IN_JSON = NotRun("a tool call in JSON", _TOOL_CALL_REASON)

_LANGUAGE_TAGS = frozenset(
    {"bash", "sh", "shell", "zsh", "powershell", "javascript", "js", "node", "typescript", "ts", "sql", "ruby", "perl"}
    | {"php", "r", "julia", "lua", "java", "kotlin", "scala", "swift", "c", "cpp", "c++", "csharp", "c#", "go", "rust"}
    | {"python2", "py2", "ipython", "jupyter", "pycon", "code", "tool_code", "tool_call", "execute"}
)
"""Tags of fences whose content is meant to be run: the model is always informed."""

_MARKUP_FENCE_TAGS = frozenset({"", "json", "xml", "tool_code", "tool_call"})
"""Tags of fences that may hold a tool call."""

_MARKUP = re.compile(
    r"""
    (?<!`)(?:
        <(?P<element>(?:tool|function)_(?:calls?|use|code)|ipython|python|repl|execute\w{0,16})(?=[\s>])
      | (?P<function><function=)
      | (?P<invoke><(?:\w{1,16}:)?invoke\s)
      | <\|(?P<token>python_tag|tool_call\w{0,24})\|>
      | (?P<json>\{\s*+"(?:name|tool|tool_name|function|action)"\s*+:\s*+"[\w.-]{1,64}"\s*+,
            \s*+"(?:arguments|parameters|args|input|action_input|tool_input)"\s*+:
          | \{\s*+"type"\s*+:\s*+"function")
    )
    | ^[ \t]*+(?:<(?P<line_element>code)>|\[(?P<bracket>TOOL_CALLS)\])
    """,
    re.MULTILINE | re.VERBOSE | re.IGNORECASE,
)
"""Tool calls in the markup of several model families: XML elements, special tokens, JSON."""
_MISPLACED_FENCE = re.compile(
    r"(?P<start>^[ \t>]*+)?(?<!`)`{3,}+[ \t]*+(?:repl|python3?|py)\b", re.MULTILINE | re.IGNORECASE
)
"""Opening of a code fence that is no fence: it is in a quotation, or its code stands on the same line. Behind other
words it may be only mentioned."""


def fence_notes(fences: Iterable[Fence], inspector: Inspector) -> list[Note]:
    """Return why fences are not run, one note for each that is not."""
    notes = (_fence_note(fence, inspector) for fence in fences)
    return [note for note in notes if note is not None]


def _fence_note(fence: Fence, inspector: Inspector) -> Note | None:
    if fence.is_runnable:
        return None if fence.text.strip() else Note(fence.start, _empty(fence.tag))
    if fence.tag in _MARKUP_FENCE_TAGS and (match := _MARKUP.search(fence.text)):
        return Note(fence.start, _tool_call(match))
    if not fence.tag:
        return Note(fence.start, _UNTAGGED) if inspector.looks_like_python(fence.text) else None
    if fence.tag in _LANGUAGE_TAGS:
        reason = "The REPL runs only Python in ```repl fences; write what it does as Python in one."
        return Note(fence.start, NotRun(f"a ```{fence.tag} fence", reason))
    reason = "It was taken for data: code goes into a ```repl fence, and FINAL(your answer) outside of any fence."
    return Note(fence.start, NotRun(f"a ```{fence.tag} fence", reason), is_quiet=True)


def _empty(tag: str) -> NotRun:
    reason = f"There is no code on the lines after its first; write the code on lines of its own after ```{tag}."
    return NotRun(f"an empty ```{tag} fence", reason)


def markup_notes(prose: str) -> list[Note]:
    """Return notes about text outside of fences and final answers that is meant to be run: markup of tool calls."""
    kinds: dict[str, Note] = {}
    for match in _MARKUP.finditer(prose):
        not_run = _tool_call(match)
        kinds.setdefault(not_run.what, Note(match.start(), not_run))
    misplaced: dict[bool, Note] = {}
    for match in _MISPLACED_FENCE.finditer(prose):
        is_mention = match["start"] is None
        misplaced.setdefault(is_mention, Note(match.start(), _MISPLACED, is_quiet=is_mention))
    return [*kinds.values(), *misplaced.values()]


def _tool_call(match: re.Match[str]) -> NotRun:
    kind = match.lastgroup or ""  # each alternative has a name
    name = match[kind].lower()
    if kind == "json":
        return _TOOL_CALL_IN_JSON
    shown = {"function": "<function=…>", "invoke": "<invoke …>", "token": f"<|{name}|>", "bracket": "[TOOL_CALLS]"}
    return NotRun(f"{shown.get(kind, f'<{name}>')} markup", _TOOL_CALL_REASON)


def shown_to_model(notes: Sequence[Note], *, nothing_else: bool) -> tuple[NotRun, ...]:
    """Return the notes for the model, in the reply's order, each thing once. Quiet ones are left out unless the reply
    has `nothing_else`: neither code nor a final answer."""
    heard = (note for note in sorted(notes, key=lambda note: note.start) if nothing_else or not note.is_quiet)
    by_name: dict[str, NotRun] = {}
    for note in heard:
        by_name.setdefault(note.not_run.what, note.not_run)
    return tuple(by_name.values())[:MAX_NOTES]
