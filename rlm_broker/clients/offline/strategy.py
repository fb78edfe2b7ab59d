"""Replies of the offline root model: one turn of code that reads the context and answers, or an error if that failed.

The code is the source of the modules of `repl_code`, with the question as literals. One turn is enough, because the
code chooses between its rules itself and submits the answer.
"""

import ast
import functools
import inspect
import re
from collections.abc import Sequence
from types import ModuleType

from rlm_broker.clients.offline import question as asked
from rlm_broker.clients.offline import repl_code
from rlm_broker.clients.offline.shapes import Count, Find, Ranking, shape
from rlm_broker.clients.offline.sure import computing
from rlm_broker.errors import ModelFailed
from rlm_broker.results import ChatMessage
from sandbox_worker.wire.names import CONTEXT

MOST_ASKED = 600
"""Characters at a question's end that tell what is to be done; a child's question is its whole prompt."""
_COUNT = (repl_code.parts, repl_code.text_counts)
_ANSWER = (
    repl_code.logs,
    repl_code.tables,
    repl_code.binding,
    repl_code.conditions,
    repl_code.tasks,
    repl_code.computing,
    repl_code.parts,
    repl_code.search,
)

_TOLD_CONTEXT = re.compile(rf"^`({CONTEXT}(?:_\d+)?)` is a ", re.MULTILINE)
"""Line of a run's first message that names the variable of its context."""
_IMPORTS = """\
import bisect, collections, csv, heapq, json, math, re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple
"""


@functools.cache
def _source(module: ModuleType) -> str:
    """Return the source of a module without its docstring and imports: all modules share one namespace in the REPL."""
    source = inspect.getsource(module)
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body[::-1]:
        is_docstring = isinstance(node, ast.Expr) and node.lineno == 1
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_docstring:
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines).strip() + "\n"


def without_question(is_loop: bool) -> str:
    """Return the reply to a request without a question. A prompt is never searched for one."""
    reason = "The offline model needs a question next to the context, and was given none."
    text = f"NOT FOUND\n{reason}\n{asked.NOTE}"
    return _final(text) if is_loop else text


def turn(question: str, messages: Sequence[ChatMessage]) -> str:
    """Return the next turn of a run, which is the code.

    Raises:
        ModelFailed: The code was sent before. It ends the run itself, so a further turn means that it failed. The
            answer is then unknown, which differs from NOT FOUND.
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
    """Return the name of the variable with the run's context. In a persistent REPL, later runs have further names."""
    for message in messages:
        if message.role == "user" and (told := _TOLD_CONTEXT.search(str(message.content))):
            return told[1]
    return CONTEXT


def opening(question: str, name: str = CONTEXT) -> str:
    """Return the reply to a run's first turn: two code blocks, of which one shows the context and one answers.

    Args:
        question: Question of the run.
        name: Name of the variable with the run's context.
    """
    told, modules, call = _plan(question)
    source = "\n\n".join(map(_source, modules))
    work = f'{_IMPORTS}\nNOTE = {asked.NOTE!r}\n\n{source}\n{call}FINAL_VAR("result")\n'
    see = "\n\n".join(inspect.getsource(function) for function in (repl_code.parts.beginning, repl_code.parts.look))
    of_this_run = "" if name == CONTEXT else f"{CONTEXT} = {name}\n"  # the REPL rebinds `context` before each block
    work = of_this_run + work
    look = f"{of_this_run}question = {_literal(question)}\n\n{see}\nprint(look(context))\nprint({told!r})\n"
    return f"I look at the context first, then answer by rules and words.\n\n```repl\n{look}```\n\n```repl\n{work}```\n"


def _plan(question: str) -> tuple[str, tuple[ModuleType, ...], str]:
    terms = [
        {"text": term.text, "needles": term.needles, "required": term.is_required, "bound": term.bound}
        for term in asked.terms(question)
    ]
    wanted = computing(question[-MOST_ASKED:])
    compute = "result = compute(context, question, NOTE)\nif result is None:\n    "
    find = f"answer(context, question, {_literal(terms)}, {wanted!r}, llm_query_batched, NOTE)"
    match shape(question):
        case Count(texts, unit, joined):
            call = f"count(context, {_literal(list(texts))}, {unit!r}, {joined!r}, NOTE)"
            if texts or unit == "lines":
                return "plan: count exactly", _COUNT, f"result = {call}\n"
            # A table's header is a line and not a row, so lines are counted only if there is no table.
            return "plan: count rows or lines", (*_ANSWER, repl_code.text_counts), f"{compute}result = {call}\n"
        case Ranking(top, attempts):
            patterns = [(list(attempt.needles), attempt.pattern) for attempt in attempts]
            tally = (
                f"result = tally(context, {_literal(patterns)}, {top}, NOTE)\nif result is None:\n    result = {find}\n"
            )
            tally = tally.replace("\n", "\n    ").rstrip(" ")
            return "plan: rank by frequency", (*_ANSWER, repl_code.text_counts), compute + tally
        case Find():
            return (
                "plan: compute from a table, or find the sentence that says it",
                _ANSWER,
                f"{compute}result = {find}\n",
            )


def _literal(value: object) -> str:
    """Return a Python literal that cannot close a code fence.

    `repr` doubles each backslash, so the escape that replaces a backtick is never escaped itself.
    """
    return repr(value).replace("`", "\\x60")


def _final(text: str) -> str:
    """Return the text as a final answer in code, where brackets within the text do not end the call."""
    return f"```repl\nFINAL({_literal(text)})\n```"
