"""What the root model says: one turn of code that looks at the context and answers, and an end if that code failed."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from rlm_broker.clients.offline import question as asked
from rlm_broker.clients.offline import repl_code
from rlm_broker.clients.offline.question import Count, Find, Ranking
from rlm_broker.errors import ModelFailed
from rlm_broker.results import ChatMessage
from sandbox_worker.wire.names import CONTEXT

_COMMON = (repl_code.pieces, repl_code.leaves, repl_code.join, repl_code.place)
_COUNT = (*_COMMON, repl_code.lines_with, repl_code.lowered, repl_code.hits, repl_code.term_counts, repl_code.count)
_FIND = (
    *_COMMON,
    repl_code.lowered,
    repl_code.hits,
    repl_code.holds,
    repl_code.chunk_at,
    repl_code.term_counts,
    repl_code.best_chunks,
    repl_code.merge,
    repl_code.find,
)
_TALLY = (repl_code.lines_with, repl_code.captured, repl_code.first_of, repl_code.named, repl_code.tally)
_CONSTANTS = (
    "CHUNK",
    "OVERLAP",
    "MAX_CHUNKS",
    "BLOCK",
    "MASKED",
    "MAX_HITS",
    "WORTH_READING",
    "LEAST_COVERED",
    "WELL_COVERED",
)

_TOLD_CONTEXT = re.compile(rf"^`({CONTEXT}(?:_\d+)?)` is a ", re.MULTILINE)
"""In the message that opens a run."""
_IMPORTS = """\
import bisect, collections, heapq, json, math, re
from collections.abc import Callable, Iterator
from typing import Any
"""


def without_question(is_loop: bool) -> str:
    """What is said where the request has no question: it is never looked for in a prompt."""
    reason = "The offline model needs a question next to the context, and was given none."
    text = f"NOT FOUND\n{reason}\n{asked.NOTE}"
    return _final(text) if is_loop else text


def turn(question: str, messages: Sequence[ChatMessage]) -> str:
    """The next turn of a run: the code.

    Raises:
        ModelFailed: It was sent already. It ends the run itself, so being asked again means that it could not, and
            that nothing is known: that is no NOT FOUND.
    """
    code = opening(question, _context_name(messages))
    sent = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if not sent or messages[sent[-1]].content != code:
        return code
    lines = [line.strip() for line in str(messages[-1].content).splitlines() if line.strip()]
    errors = [
        line for line in lines if "Error" in line or "killed" in line or "Exception" in line or "Interrupt" in line
    ]
    reason = (errors or lines or ["no observation"])[-1][:300]
    raise ModelFailed(f"offline: its search did not come to an end: {reason}")


def _context_name(messages: Sequence[ChatMessage]) -> str:
    """Return the name of the variable that the run is about: later runs in one REPL have one of their own."""
    for message in messages:
        if message.role == "user" and (told := _TOLD_CONTEXT.search(str(message.content))):
            return told[1]
    return CONTEXT


def opening(question: str, name: str = CONTEXT) -> str:
    """The reply to a run's first turn: two fenced blocks, to look at the context of that name and to answer."""
    told, functions, call = _plan(question)
    constants = "\n".join(f"{name} = {getattr(repl_code, name)!r}" for name in _CONSTANTS)
    source = "\n\n".join(inspect.getsource(function) for function in dict.fromkeys(functions))
    work = f'{_IMPORTS}\nNOTE = {asked.NOTE!r}\n{constants}\n\n{source}\n{call}FINAL_VAR("result")\n'
    see = "\n\n".join(inspect.getsource(function) for function in (repl_code.beginning, repl_code.look))
    of_this_run = "" if name == CONTEXT else f"{CONTEXT} = {name}\n"  # `context` itself is bound anew in each block
    work = of_this_run + work
    look = f"{of_this_run}question = {_literal(question)}\n\n{see}\nprint(look(context))\nprint({told!r})\n"
    return f"I look at the context first, then answer by words alone.\n\n```repl\n{look}```\n\n```repl\n{work}```\n"


def _plan(question: str) -> tuple[str, tuple[Callable[..., Any], ...], str]:
    terms = [
        {"text": term.text, "needle": term.needle, "required": term.is_required, "bound": term.bound}
        for term in asked.terms(question)
    ]
    find = f"find(context, {_literal(terms)}, llm_query_batched, NOTE)"
    match asked.shape(question):
        case Count(texts, unit):
            return "plan: count exactly", _COUNT, f"result = count(context, {_literal(list(texts))}, {unit!r}, NOTE)\n"
        case Ranking(top, attempts):
            patterns = [(list(attempt.needles), attempt.pattern) for attempt in attempts]
            call = (
                f"result = tally(context, {_literal(patterns)}, {top}, NOTE)\nif result is None:\n    result = {find}\n"
            )
            return "plan: rank by frequency", (*_FIND, *_TALLY), call
        case Find():
            return "plan: find the sentence that says it", _FIND, f"result = {find}\n"


def _literal(value: object) -> str:
    """A Python literal that cannot close a fence: `repr` doubles each backslash, so this escape is never escaped."""
    return repr(value).replace("`", "\\x60")


def _final(text: str) -> str:
    """The text as a final answer in code, where brackets of its own end nothing."""
    return f"```repl\nFINAL({_literal(text)})\n```"
