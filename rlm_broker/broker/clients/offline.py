"""The model `offline`: a stand-in that needs no key and no network. It searches and counts, and does not reason.

It plays a small run of three turns: it looks at the shape of the context, filters it by code, then puts one mistake
right, asks about excerpts, and answers with a place. Its questions are English; it learns no further forms of them.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import NamedTuple

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.errors import ModelFailed
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage
from sandbox_worker.wire.names import CONTEXT

CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Character ranges of scripts without spaces between words. Each character counts as a word."""
WORD = re.compile(rf"\d+(?:[.,]\d+)+|[{CJK}]|[^\W_{CJK}]+")
QUOTED = re.compile(r"\"([^\"]+)\"|\u201c([^\u201d]+)\u201d|`+([^`]+)`+|(?<!\w)'([^']+(?:'\w[^']*)*)'(?!\w)")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[\u3002\uff01\uff1f])")
SMALL = frozenset(
    WORD.findall(
        "a about all am an and any are as at be because been by can could did do does done for from get give go had "
        "has have he her him his how i if in into is it its many me much my near of often on our out over please s say "
        "says she should so some such t tell that the their them then there these they this those to up us was we were "
        "what when where which while who whom whose why will with would you your"
    )
)
"""Words of a question that its answer need not have."""
COUNTING = re.compile(r"(?is)(?:please |tell me |what is |the )*(?:how many|how often|number of|count)\b")
UNIT = re.compile(
    r"(?i)\b(?:both|(?:context|document|entry|file|item|line|log|message|occurrence|phrase|record|row|string|text|time|"
    r"total|word|appear|contain|include|mention|occur)(?:s|ed|ing)?|entries)\b"
)
"""Words that do not tell what is counted."""
LINES = re.compile(r"(?i)\b(?:lines|rows|items|files|entries|records|messages)\b")
LEVELS = ("TRACE", "DEBUG", "INFO", "NOTICE", "WARN", "ERROR", "SEVERE", "CRITICAL", "FATAL")
MAX_WORDS, LONG_LINE = 12, 300
"""Maximum words of a question that are looked for; characters beside a word that are read in a long line."""
EXCERPT = "Answer from this excerpt alone, or write NOT FOUND:"
NOT_FOUND = "NOT FOUND"
GOES_ON = "This question goes on from these:"
"""Line of a question in a conversation. Below it stand earlier questions and answers."""
NOTHING = ("no match", "0 matches")
_CONTEXT = re.compile(rf"^`({CONTEXT}(?:_\d+)?)` is a (\S+)", re.MULTILINE)
"""Line of a run's first message that names the variable of its context, and its type."""


# -- code of the turns; names in capitals are filled in ----------------------------------------------------------------

LOOK_AT_TEXT = r"""
texts = CONTEXT
print(f"{len(texts):,} characters; it begins:")
print(texts[:300])
"""
LOOK_AT_DATA = r"""
rows = CONTEXT
for method, *how in ("to_dicts",), ("to_pylist",), ("to_dict", "records"):  # polars, pyarrow, pandas
    rows = getattr(rows, method)(*how) if hasattr(rows, method) else rows
if isinstance(rows, (list, tuple)):
    rows = {f"context[{number}]": row for number, row in enumerate(rows)}
texts = {str(key): str(row) for key, row in rows.items()} if isinstance(rows, dict) else str(rows)
print(type(CONTEXT).__name__, "of", len(texts))
print(str(list(texts.items())[:2])[:300] if isinstance(texts, dict) else texts[:300])
"""
COUNT_WORDS = r"""
words = WORDS
form = dict(zip(words, FORMS))
hits = {word: search("(?i)" + form[word], texts, around=300, limit=1_000) for word in words}
counts = {word: hits[word].total for word in words}
print(counts)
rarest = min(words, key=counts.get, default=None)
print([hit.around for hit in hits.get(rarest, [])[:2]] or "no match")
"""
PLACE = r"""
def place(hit):
    return f"Found at {'' if hit.part is None else hit.part + ', '}line {hit.line}, character {hit.start}"
"""
ASK_ABOUT_LINES = (
    r"""
import re
found = {}  # excerpt -> where it stands
for word in sorted(filter(counts.get, words), key=counts.get):
    for hit in hits[word]:
        begin = hit.around.rfind("\n", 0, min(hit.start, 300)) + 1
        line = hit.around[begin:].partition("\n")[0].strip()
        found.setdefault(line if hit.part is None else f"{hit.part}\n{line}", hit)
has = {text: [word for word in words if re.search("(?i)(?<![a-z0-9])" + form[word], text)] for text in found}
worth = {text: (len(has[text]), sum(1 / counts[word] for word in has[text] if counts[word])) for text in found}
best = sorted(found, key=worth.get, reverse=True)[:3]
ask = ASK
replies = llm_query_batched([f"{ask}\n{text}" for text in best])
"""
    + PLACE
    + r"""
report = []
for text, reply in zip(best, replies):
    if not reply.startswith("NOT FOUND") and len(has[text]) == len(has[best[0]]):
        report.append("Also: " * bool(report) + (text if reply.startswith("Error") else reply))
        lacks = [word for word in words if word not in has[text]]
        by = ", ".join(has[text]) + "; without: " * bool(lacks) + ", ".join(lacks)
        report.append(f"{place(found[text])}, by: {by}.")
FINAL("\n".join(report) or f"NOT FOUND\nNo line says enough of: {', '.join(words) or 'no word'}.")
"""
)
COUNT_MATCHES = r"""
print(search(FIRST, texts, limit=3))
"""
COUNT_LINES_WITH = (
    r"""
forms = FORMS
for word in [each for each in forms if each.isalpha()]:  # a level, as logs write it
    if search(word, texts, limit=1):
        forms[word] = rf"(?<!\w){word}(?:ING)?(?!\w)"
    else:
        forms[word.lower() + "(s)"] = forms.pop(word)
hits = search("(?m)^" + "".join(f"(?=.*{form})" for form in forms.values()) + ".*", texts, limit=1)
report = f"{hits.total:,} {'line has' if hits.total == 1 else 'lines have'} {' and '.join(forms)}."
"""
    + PLACE
    + r"""
if hits:
    report += f"\nFirst: {hits[0].text.strip()[:300]}\n{place(hits[0])}."
FINAL(report)
"""
)
COUNT_BREAKS = r"""
parts = list(texts.values()) if isinstance(texts, dict) else [texts]
print(sum(part.count("\n") + 1 for part in parts))
"""
COUNT_LINES = r"""
number = sum(part.count("\n") + (part[-1:] not in ("", "\n")) for part in parts)
in_parts = f" in {len(parts):,} parts" if len(parts) > 1 else ""
FINAL(f"{number:,} {'line' if number == 1 else 'lines'}{in_parts}")
"""


class Term(NamedTuple):
    """A word, name, number or quotation of a question.

    Attributes:
        text: Text as the question writes it.
        pattern: Regular expression of its forms, regardless of case, behind a character that is no letter.
        weight: 1; 2 for a name, number or quotation, which an answer must have.
    """

    text: str
    pattern: str
    weight: int


class OfflineClient(BaseClient):
    """A stand-in for a language model: code for a run's loop, and quotations for what code asks.

    It takes the question from the request (`LMRequest.question`), never from a prompt: the author of a document could
    write a question into it. It has no state, so one client serves any number of concurrent runs.
    """

    model_name = "offline"
    answers_types = False

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request: a turn of a loop with code, any other from the text of its last user message.

        The usage has no tokens and the cost 0.

        Raises:
            ModelFailed: The code of the last turn did not answer.
        """
        question = (request.question or "").strip()
        if request.is_loop:
            text = next_turn(question, request.messages)
        else:  # in a thread: the prompt may be a whole context, and would block the event loop of all runs
            text = await asyncio.to_thread(quote, _prompt(request.messages), question)
        return LMReply(text, Usage(total_calls=1, total_cost=0.0))


# -- turns of a run ----------------------------------------------------------------------------------------------------


def next_turn(question: str, messages: Sequence[ChatMessage]) -> str:
    """Return the reply that follows the last one in the conversation.

    Raises:
        ModelFailed: That was the last turn. Its code ends the run, so it failed: the answer is unknown, not NOT FOUND.
    """
    named = (_CONTEXT.search(str(message.content)) for message in messages if message.role == "user")
    found = next(filter(None, named), None)
    name, kind = (found[1], found[2]) if found else (CONTEXT, "str")
    asked = task(question)
    look, narrow, last = _look(name, kind), *(_counted(asked) or _looked_up(asked, question))
    said = next((message.content for message in reversed(messages) if message.role == "assistant"), "")
    seen = str(messages[-1].content)
    if said == look:
        return narrow
    if said == narrow:
        return last[not any(each in seen for each in NOTHING)]
    if said not in last:
        return look
    rows = [line.strip() for line in seen.splitlines() if line.strip()]
    reason = next((row for row in reversed(rows) if "Error" in row or "killed" in row), (rows or [""])[-1])
    raise ModelFailed(f"offline: its search did not come to an end: {reason[:300]}")


def _look(name: str, kind: str) -> str:
    """Return the first turn: the shape of the context, as `texts`, which `search` takes."""
    if kind == "str":
        return _turn("I look at the shape of the text before I read any of it.", LOOK_AT_TEXT, CONTEXT=name)
    return _turn("I look at the shape of the data, and make texts of its parts.", LOOK_AT_DATA, CONTEXT=name)


def _looked_up(asked: str, question: str) -> tuple[str, tuple[str, str]]:
    """Return the second turn of a look-up, and the last one: with the mistake put right, and without one."""
    terms = terms_of(asked)
    words, forms = [term.text for term in terms], [term.pattern for term in terms]
    count = "I count the words of the question, and look for the rarest one."
    wrong = "That one is nowhere: my mistake. I take the words that occur, and ask about the best lines."
    right = "I take the lines with most of the words, and ask about each of them."
    ask = repr(f"{question}\n{EXCERPT}")
    last = (_turn(wrong, ASK_ABOUT_LINES, ASK=ask), _turn(right, ASK_ABOUT_LINES, ASK=ask))
    return _turn(count, COUNT_WORDS, WORDS=repr(words), FORMS=repr(forms)), last


def _counted(asked: str) -> tuple[str, tuple[str, str]] | None:
    """Return the same turns for a question of a number; None for any other question."""
    if not (match := COUNTING.match(asked)):
        return None
    what = asked[match.end() :]
    texts, rest = quotations(what), QUOTED.sub(" ", what)
    words = [word for word in WORD.findall(UNIT.sub(" ", rest)) if word.lower() not in SMALL]
    if not texts and not words and LINES.search(rest):
        again = _turn("A line break at the end begins no line: my mistake. I count again.", COUNT_LINES)
        return _turn("I count the line breaks.", COUNT_BREAKS), (again, again)
    forms = {repr(text): f"(?i:{re.escape(text)})" for text in texts}
    for word in words:
        one = word.lower().removesuffix("s")
        level = one.upper().removesuffix("ING")
        forms[level if level in LEVELS else f"{one}(s)"] = rf"(?i:(?<!\w){re.escape(one)}s?(?!\w))"
    has_level = len(forms) == 2 and [*forms][-1] in LEVELS
    if not forms or (words and len(forms) > 1 and not has_level):
        return None  # it has a condition
    first = "(?i)" + re.escape((texts or [words[0].removesuffix("s")])[0])
    none = "None of them. I count the lines with the whole word, to be sure."
    wrong = "A line may match twice, or by a part of a word: my mistake. I count lines with the word."
    last = (_turn(none, COUNT_LINES_WITH, FORMS=repr(forms)), _turn(wrong, COUNT_LINES_WITH, FORMS=repr(forms)))
    return _turn("I count what looks like it.", COUNT_MATCHES, FIRST=repr(first)), last


def _turn(prose: str, code: str, **filled: str) -> str:
    """Return a reply: prose, and code whose names in capitals are filled in. No backtick closes its fence."""
    names = re.compile(rf"\b(?:{'|'.join(filled) or '(?!)'})\b")
    block = names.sub(lambda match: filled[match[0]], code.strip("\n")).replace("`", "\\x60")
    return f"{prose}\n\n```repl\n{block}\n```"


# -- words of a question -----------------------------------------------------------------------------------------------


def task(question: str) -> str:
    """Return the sentences of a question that end with a question mark; if there are none, its beginning."""
    question = question.partition(GOES_ON)[0].strip()
    ends = question if len(question) <= 4_000 else f"{question[:2_000]}\n{question[-2_000:]}"
    asking = [each for each in re.split(r"(?<=[.!?\uff1f])\s+|\n+", ends) if each.endswith(("?", "\uff1f"))]
    return " ".join(asking) or question[:600]


def terms_of(question: str) -> list[Term]:
    """Return the quotations, names, numbers and other words of a question, without small words."""
    found = {text.lower(): Term(text, re.escape(text), 2) for text in quotations(question)}
    rest = QUOTED.sub(lambda match: " " * len(match[0]), question)
    for match in WORD.finditer(rest):
        word, before = match[0], rest[: match.start()].rstrip(" \"'(")
        if word.lower() in SMALL or (len(word) == 1 and word.isascii() and not word.isdigit()):
            continue
        is_name = word[0].isupper() and before[-1:] not in ("", *".!?:\n") and not question.isupper()
        is_exact = is_name or any(char.isdigit() for char in word)
        begin = word if is_exact else re.sub(r"(?<=[^\W\d_]{3})(?:(?<=[sxzh])es|(?<![su])s|ed|ing)$", "", word.lower())
        form = re.escape(begin) + r"\b" * (is_exact and not re.match(f"[{CJK}]", word))
        found.setdefault(word.lower(), Term(word, form, 1 + is_exact))
    return list(found.values())[:MAX_WORDS]


def quotations(question: str) -> list[str]:
    """Return the texts in quotation marks, in order, without the marks."""
    return list(dict.fromkeys(next(filter(None, match.groups())) for match in QUOTED.finditer(question)))


# -- excerpts ----------------------------------------------------------------------------------------------------------


def quote(prompt: str, question: str) -> str:
    """Return the line of a prompt, or the sentence of a long line, that says most of a question; or NOT FOUND.

    It has half of the question's words, where names, numbers and quotations count twice; the prompt has all of these.
    """
    terms = terms_of(task(question))
    text = prompt.partition(EXCERPT)[2] or (prompt if prompt.strip() == question else prompt.replace(question, "\n"))
    lines = text.splitlines()[-1:] if EXCERPT in prompt else text.splitlines()  # above it stands the name of its part
    asked = WORD.findall(question.lower())
    best, most = "", 0
    for line in lines if all(_has(term, text) for term in terms if term.weight > 1) else ():
        for each in SENTENCE_END.split(line) if len(line) > LONG_LINE else (line,):
            if each.rstrip().endswith("?") or WORD.findall(each.lower())[-len(asked) :] == asked:
                continue  # it asks, and answers nothing
            held = sum(term.weight for term in terms if _has(term, each))
            if held > most:
                best, most = each.strip(), held
    held = sum(term.weight for term in terms if _has(term, text)) if EXCERPT in prompt else most
    if best and 2 * held >= sum(term.weight for term in terms):
        return best
    return f"{NOT_FOUND}\nNo line says enough of: {', '.join(term.text for term in terms) or 'no word'}."


def _has(term: Term, text: str) -> bool:
    return re.search(f"(?i)(?<![a-z0-9]){term.pattern}", text) is not None


def _prompt(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last message of the user."""
    content = next((message for message in reversed(messages) if message.role == "user"), messages[-1]).content
    if isinstance(content, str):
        return content
    parts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "\n".join(part for part in parts if isinstance(part, str))
