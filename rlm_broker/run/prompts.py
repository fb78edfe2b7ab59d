"""What a model is told. Every number in it comes from the limits that are enforced; no user text is a template."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlm_broker.context.store import ContextInfo
from rlm_broker.display import picture_in
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.limits import Limits
from rlm_broker.parsing import NotRun
from rlm_broker.results import Block, ChatMessage
from sandbox_worker.wire.names import CONTEXT, HISTORY, numbered

PARTS_SHOWN = 20
WRONG_ANSWER_CHARS = 2_000
EMPTY_REPLY = "(no reply)"
"""In place of an empty reply in the conversation: some providers refuse an empty message."""
Profile = Literal["both", "final", "answer"]
"""Which way to end a run the model is told: with `FINAL`, with the `answer` dict, or with either. All of them work."""
_ENDINGS: dict[Profile, str] = {
    "final": "When you know the answer, end with `FINAL(answer)` or `FINAL_VAR('name_of_a_variable')` in a repl block, "
    "or as a line of your reply.",
    "answer": "When you know the answer, put it into the dict `answer` in a repl block: `answer['content'] = ...`, and "
    "then `answer['ready'] = True`.",
}
_ENDINGS["both"] = f"{_ENDINGS['final']} Setting `answer['content']` and then `answer['ready'] = True` does the same."
NOT_LOOKED_AT = "You have not looked at the context yet: look before you answer."


@dataclass(frozen=True, slots=True)
class Instructions:
    """What the user wants models to be told.

    Attributes:
        system: In place of our own system prompt: for every run of a tree, or by depth.
        profile: Of our own system prompt, see `Profile`.
        prologue: Before the first user message of the root.
    """

    system: str | Callable[[int], str] | None = None
    profile: Profile = "both"
    prologue: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.system, str | None) and not callable(self.system):
            raise ConfigurationError(f"a system prompt is text or a function, not {type(self.system).__name__}")
        require_kind("the prologue", self.prologue, str, type(None))
        if self.profile not in tuple(_ENDINGS):
            raise ConfigurationError(f"the prompt profile must be one of {', '.join(_ENDINGS)}, not {self.profile!r}")
        if self.system is not None and self.profile != "both":
            raise ConfigurationError("give either a system prompt or a prompt profile, which is part of our own prompt")

    def system_prompt(self, limits: Limits, depth: int, tools: Sequence[str]) -> str:
        """For a run at `depth`."""
        if self.system is None:
            return system(limits, depth, tools, self.profile)
        return self.system if isinstance(self.system, str) else self.system(depth)


def system(limits: Limits, depth: int, tools: Sequence[str] = (), profile: Profile = "both") -> str:
    """The system prompt of a run at `depth`.

    Args:
        tools: A line for each function and value of the user's.
    """
    return "\n\n".join(
        [
            "You answer a question about a context that is too large to read at once. It is a variable of a Python "
            "REPL, and you look at it by writing code. Code that you put into a fence tagged `repl` is run, and you "
            "are shown what it prints; variables persist from one block to the next.",
            "```repl\nprint(type(context), len(context))\n```",
            "In the REPL there are:\n"
            "- `context`: the data. Search and slice it; print small parts of it.\n"
            "- `llm_query(prompt)`: asks a language model, which sees nothing but the prompt, and returns its text. "
            "Use it to read parts that code cannot judge.\n"
            f"- `llm_query_batched(prompts)`: the same for a list of up to {limits.max_batch_prompts:,} prompts, "
            f"{limits.max_concurrent_calls} at a time; the answers come in the same order. Prefer it to a loop.\n"
            f"- {_rlm_query(limits, depth)}\n"
            "- `SHOW_VARS()`: your variables and their types. `budget()`: what you may still use, by limit.\n"
            "A call that fails returns a text that starts with `Error:`." + "".join(f"\n{line}" for line in tools),
            f"What a block prints is cut to {limits.max_observation_chars:,} characters. A block may compute for "
            f"{limits.block_timeout_s:g} s, waiting for models not counted; then it is interrupted, and if it does not "
            "react it is killed and its variables are lost. There is no network and no access to other files.",
            f"{_ENDINGS[profile]} You have {limits.iterations(depth)} turns.",
        ]
    )


def opening(question: str | None, info: ContextInfo, name: str = CONTEXT) -> str:
    """The first user message: what is asked, and what is known of the context without looking.

    Args:
        name: Of the variable that holds it. `context_1` is the second of a REPL that lives on.
    """
    lines = [f"`{name}` is a {info.type_name} with {info.total_chars:,} characters in all."]
    if name != CONTEXT:
        number = int(name.rpartition("_")[2])
        lines.append(
            f"Contexts: {_numbered(CONTEXT, number + 1)}. Earlier conversations: {_numbered(HISTORY, number)}."
        )
    if info.parts_total:
        shown = [f"  {name}: {chars:,}" for name, chars in info.parts[:PARTS_SHOWN]]
        more = info.parts_total - len(shown)
        lines += [f"It has {info.parts_total:,} parts; characters of each:", *shown]
        lines += [f"  ... and {more:,} more"] if more else []
    lines += [f"Left out: {count:,} ({reason})" for reason, count in info.skipped.items()]
    return "\n".join([*lines, "", NOT_LOOKED_AT, "", reminder(question)])


def reminder(question: str | None, turns_left: int | None = None) -> str:
    """The task, repeated in every turn."""
    left = "" if turns_left is None else f" Turns left: {turns_left}."
    if question is None:
        return f"The task is in the context itself. Go on with a repl block, or submit with FINAL(...).{left}"
    go_on = "Go on with a repl block, or submit the answer with FINAL(...) or FINAL_VAR(...)."
    return f"Question: {question}\n\n{go_on}{left}"


def observation(blocks: Sequence[Block], not_run: Sequence[NotRun], limits: Limits, then: str) -> str:
    """What came of a turn, and what is asked now."""
    parts = [_outcome(number, block, limits) for number, block in enumerate(blocks, 1)]
    parts += [f"Not run: {item.what}. {item.reason}" for item in not_run]
    if not parts:
        parts = ["There was no code to run and no answer in your reply."]
    return "\n\n".join([*parts, then])


def last_request(question: str | None) -> str:
    """For a run that used up its turns."""
    asked = "" if question is None else f" The question was: {question}"
    return (
        "There are no turns left. Give the best answer that you can with what you know, as FINAL(answer) or "
        f"FINAL_VAR(name); no more code is run.{asked}"
    )


SUMMARISE = (
    "This conversation is getting too long for you. Write down for yourself, in at most 500 words, what you have "
    "looked at, what you found, which variables hold what, and what is still to be done. No code is run now."
)


def after_summary(opening: str, summary: str, name: str, then: str) -> str:
    """The first user message of a conversation that was cut short.

    Args:
        name: Of the variable that holds the whole of it.
    """
    return f"{opening}\n\nYour notes on the work so far (`{name}` has all its messages):\n{summary}\n\n{then}"


def wrong_type(answer: str, problem: str, schema: str) -> str:
    """For an answer that is not of the type that was asked for."""
    return (
        f"Your answer is not of the type that is wanted: {problem}\nIt was: {_cut(answer, WRONG_ANSWER_CHARS)}\n"
        f"Submit a JSON value of this schema, for example with FINAL(json.dumps(value)): {schema}"
    )


def typed_task(question: str | None, schema: str) -> str:
    """The question, with the type of its answer."""
    wanted = f"Answer with a JSON value of this schema, for example FINAL(json.dumps(value)): {schema}"
    return wanted if question is None else f"{question}\n{wanted}"


def without_repl(context: Any, question: str | None) -> list[ChatMessage]:
    """A plain completion. A context of chat messages keeps its roles; of anything else the text is the prompt."""
    asked = [] if question is None else [ChatMessage("user", question)]
    if isinstance(context, list) and context and all(map(_is_message, context)):
        return [*(ChatMessage(message["role"], message["content"]) for message in context), *asked]
    text = context if isinstance(context, str) else json.dumps(context, ensure_ascii=False)
    return [ChatMessage("user", "\n\n".join(part for part in (text, question) if part))]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in ("system", "user", "assistant") and "content" in value


def _numbered(name: str, count: int) -> str:
    return ", ".join(f"`{numbered(name, number)}`" for number in range(count))


def _rlm_query(limits: Limits, depth: int) -> str:
    if depth + 1 < limits.max_depth:
        return (
            "`rlm_query(prompt)` and `rlm_query_batched(prompts)`: a child that works like you, with a REPL of its own "
            f"in which `context` is the prompt; {limits.max_concurrent_children} at a time. For parts that need code."
        )
    return "`rlm_query(prompt)`: at this depth the same as `llm_query`."


def _outcome(number: int, block: Block, limits: Limits) -> str:
    lines = [f"Block {number}: {_STATUS[block.status]}"]
    if block.status != "ok" and block.error:
        lines[0] += f" ({block.error})"
    if block.status == "killed":
        lines.append("The REPL was killed and started afresh: `context` is in place, all your variables are lost.")
    if block.status == "interrupted":
        lines.append("Your variables are still there.")
    for name, text in (("stdout", block.stdout), ("stderr", block.stderr)):
        if text:
            lines.append(f"{name}:\n{_cut(text, limits.max_observation_chars)}")
    lines += [f"[picture: {each}]" for display in block.displays if (each := picture_in(display))]
    if block.displays_omitted:
        lines.append(f"[{block.displays_omitted:,} more shown than are kept, or larger]")
    if not block.stdout and not block.stderr and not block.displays:
        lines.append("(no output)")
    return "\n".join(lines)


_STATUS = {
    "ok": "ran",
    "error": "raised an exception",
    "exited": "called sys.exit",
    "interrupted": "was interrupted",
    "killed": "was killed",
}


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = limit * 3 // 4
    tail = limit - head
    return f"{text[:head]}\n... [{len(text) - limit:,} characters cut] ...\n{text[-tail:]}"
