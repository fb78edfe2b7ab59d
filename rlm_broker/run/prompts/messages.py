"""User messages of a run: the opening, the end of each turn's observation, and what is wrong with an answer."""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from rlm_broker.context.stored_context import ContextBeginning
from rlm_broker.errors import ContextRefused
from rlm_broker.results import ChatMessage, ContextInfo
from rlm_broker.run.prompts.instructions import Profile
from rlm_broker.values.text import shorten
from sandbox_worker.wire.names import CONTEXT, HISTORY, numbered

PARTS_SHOWN = 20
"""Parts of a context in the opening, with the length of each."""
SHOWN_WHOLE_CHARS = 2_000
"""Longest context, in characters, shown whole in the opening."""
BEGINNING_CHARS = 500
"""Characters of a longer context's beginning in the opening."""
REMINDER_CHARS = 300
"""Characters of the task in each turn. The opening has all of it."""
WRONG_ANSWER_CHARS = 2_000
"""Characters of an answer of the wrong type, shown to the model again."""
EMPTY_REPLY = "(no reply)"
"""Text in place of an empty reply in the conversation, since some providers refuse an empty message."""
ALL_FAILED = "Every one of the {:,} calls of a batch failed: read one of the errors before you go on or ask again."
CUT = "Your output was too long and was cut: print slices or counts, and let code or `llm_query` read the rest."
FIRST_OF_MANY = (
    "Your calls saw the first {:,} of the {:,} in `{}`: before you answer for all of them, rule the others out by "
    "code, or ask about them, too."
)
PICTURE = (
    "{} given as a `data:` address and not as text: let a model see it by `llm_query([{{'type': 'text', 'text': "
    "'What is on it?'}}, {{'type': 'image_url', 'image_url': {{'url': {}}}}}])`."
)
NOT_LOOKED_AT = "You have not looked at the context yet: look before you answer."
SUMMARISE = (
    "This conversation is getting too long for you. Write down for yourself, in at most 500 words, what you have "
    "looked at, what you found, which variables hold what, and what is still to be done. No code is run now."
)
_GO_ON: dict[Profile, str] = {
    "final": "submit the answer with FINAL(...) or FINAL_VAR('name')",
    "answer": "submit it with answer['content'] = ... and answer['ready'] = True",
    "compact": "submit the answer with FINAL(...)",
}
_GO_ON["both"] = _GO_ON["final"]


class Messages(Struct, frozen=True):
    """User messages of one run.

    Attributes:
        question: The question; None if the task is in the context.
        profile: Variant of the system prompt, with its way to end.
        is_context: Whether the context is the task. Of a long task, the question is then the beginning and the end.
        whole_in: Variable with the whole question, if `question` has only its beginning and its end.
        context: Variable with the context.
    """

    question: str | None
    profile: Profile = "both"
    is_context: bool = False
    whole_in: str = ""
    context: str = CONTEXT

    def opening(self, info: ContextInfo, beginning: ContextBeginning, name: str = CONTEXT) -> str:
        """Return the first user message: the question, and the facts of the context in the variable `name`."""
        lines = [f"`{name}` is {info.headline()}."]
        if name != CONTEXT:
            number = int(name.rpartition("_")[2])
            lines.append(
                f"Contexts: {_numbered(CONTEXT, number + 1)}. Earlier conversations: {_numbered(HISTORY, number)}."
            )
        if info.parts_total and info.type_name == "str":
            lines.append(f"It is the text of {info.parts[0][0]}.")
        elif info.parts_total:
            shown = [f"  {name}: {chars:,}" for name, chars in info.parts[:PARTS_SHOWN]]
            more = info.parts_total - len(shown)
            lines += [f"It has {info.parts_total:,} parts; characters of each:", *shown]
            lines += [f"  ... and {more:,} more"] if more else []
        lines += _kinds(info, name)
        lines += [f"{remark[0].upper()}{remark[1:]}" for remark in info.remarks(with_names=True)]
        if self.whole_in:
            lines.append(f"Your task is long: all of it stands in the variable `{self.whole_in}`.")
        if self.is_context:
            lines.append(f"Your task stands in `{name}`.")
        elif beginning.is_whole:
            lines += ["All of it:", beginning.text]
        else:
            lines += [f"It begins: {beginning.text[:BEGINNING_CHARS]!r}"] if beginning.text else []
            lines += ["", NOT_LOOKED_AT]
        return "\n".join([*lines, "", self._asked(None), "", self._go_on()])

    def reminder(self, turns_left: int | None = None, scarce: str = "") -> str:
        """Return the end of a turn's message: the task, and what to do next. `scarce` names means that become so."""
        left = "" if turns_left is None else f" Turns left: {turns_left}."
        left += f" Left: {scarce}." if scarce else ""
        return f"{self._asked(REMINDER_CHARS)}\n\n{self._go_on()}{left}"

    def last_request(self) -> str:
        """Return the request for an answer when the turns are used up."""
        how = "on its own" if self.profile == "answer" else "as FINAL(answer) or FINAL_VAR(name)"
        return (
            f"There are no turns left. Give the best answer that you can with what you know, {how}; no more code is "
            f"run. {self._asked(REMINDER_CHARS)}"
        )

    def unseen(self, answer: str) -> str:
        """Return the refusal of an answer beside code with an output."""
        return (
            f"Your answer, {_cut(answer, REMINDER_CHARS)!r}, was written before you saw this output, so it was not "
            "taken. If it is right, give it again, in a reply without code."
        )

    def failed(self, answer: str) -> str:
        """Return the refusal of an answer that is the failure of a call."""
        return (
            f"Your answer, {_cut(answer, REMINDER_CHARS)!r}, is the failure of a call that your code made, so it was "
            "not taken yet. Find the answer in another way, or ask again; to submit it as it is, give it again."
        )

    def not_looked(self) -> str:
        """Return the refusal of an answer before a look at the context."""
        return (
            "You have answered without having looked at the context, so the answer was not taken yet. Look at it by "
            "code; or, if no look is needed, give the answer again."
        )

    def _asked(self, most_chars: int | None) -> str:
        if self.question is None:
            return "The task is in the context itself."
        if most_chars is None or len(self.question) <= most_chars:
            return f"Question: {self.question}"
        where = (
            f"`{self.context}`" if self.is_context else f"`{self.whole_in}`" if self.whole_in else "the first message"
        )
        return f"Question: {self.question[:most_chars]}... (all of it is in {where})"

    def _go_on(self) -> str:
        return f"Go on with a repl block, or {_GO_ON[self.profile]}."


def after_summary(opening: str, name: str) -> str:
    """Return the first user message of a summarised conversation. The reply to it is the summary, and the variable
    `name` has the whole conversation."""
    return (
        f"{opening}\n\nThis conversation became too long and was cut: `{name}` has all its messages. Write down what "
        "you have looked at, what you found, which variables hold what, and what is still to be done."
    )


def not_replayed(done: int, blocks: int, problem: str) -> str:
    """Return what a run is told that goes on in a fresh REPL, if only its first blocks could be run again.

    Args:
        done: Number of these blocks.
        blocks: Number of all its blocks.
    """
    kept = f"Its first {done:,} of {blocks:,} blocks were run again" if done else "None of its blocks was run again"
    return (
        f"This run goes on in a fresh REPL. {kept}: {problem}. Variables, functions and imports of the later blocks "
        "are gone."
    )


def wrong_type(answer: str, problem: str, schema: str) -> str:
    """Return the refusal of an answer of another type."""
    return (
        f"Your answer is not of the type that is wanted: {problem}\nIt was: {_cut(answer, WRONG_ANSWER_CHARS)}\n"
        f"Submit a JSON value of this schema, for example by `import json; FINAL(json.dumps(value))`: {schema}"
    )


def typed_task(question: str | None, schema: str) -> str:
    """Return the question, with the type of its answer."""
    wanted = (
        f"Answer with a JSON value of this schema, for example by `import json; FINAL(json.dumps(value))`: {schema}"
    )
    return wanted if question is None else f"{question}\n{wanted}"


def without_repl(context: Any, question: str | None) -> list[ChatMessage]:
    """Return the messages of a run without a REPL: a plain completion. Chat messages as a context keep their roles.

    Raises:
        ContextRefused: The context has values without a JSON form.
    """
    asked = [] if question is None else [ChatMessage("user", question)]
    if isinstance(context, list) and context and all(map(_is_message, context)):
        return [*(ChatMessage(message["role"], message["content"]) for message in context), *asked]
    try:
        text = context if isinstance(context, str) else json.dumps(context, ensure_ascii=False)
    except TypeError as error:
        raise ContextRefused(
            f"without a REPL (max_depth = 0) a context must be text or plain values: {error}"
        ) from None
    return [ChatMessage("user", "\n\n".join(part for part in (text, question) if part))]


def _kinds(info: ContextInfo, name: str) -> list[str]:
    """Return lines on parts that are not the bytes of their files."""
    lines = []
    if told := ", ".join(f"{count:,} {kind}" for kind, count in info.kinds.items() if kind != "picture"):
        lines.append(f"Read from files of other kinds, as the text in them: {told}.")
    if pictures := info.kinds.get("picture"):
        where = "It is a picture" if info.type_name == "str" else f"Pictures: {pictures:,}, each"
        lines.append(PICTURE.format(where, name if info.type_name == "str" else f"{name}['...']"))
    return lines


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("role") in ("system", "user", "assistant") and "content" in value


def _numbered(name: str, count: int) -> str:
    return ", ".join(f"`{numbered(name, number)}`" for number in range(count))


def _cut(text: str, limit: int) -> str:
    return shorten(text, limit, end=0, gap="")
