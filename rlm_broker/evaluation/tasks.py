"""Generated tasks: facts in much text, and messages to be judged. They are the same for a seed on all machines.

`texts.toml` has the sentences for contexts.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.scoring import Key

T = TypeVar("T")
CHARS_PER_TOKEN: Final = 4
"""Characters of generated contexts for each token, as common tokenizers count them."""
TOKENS: Final = range(1_000, 25_000_001)
"""Lengths of contexts in tokens: all facts have room and most lines are others, and a context is made in memory."""
_FACTORS: Final = {"": 1, "k": 1_000, "m": 1_000_000}


@dataclass(frozen=True, slots=True)
class Problem:
    """A question about a context, and the key of its answer."""

    context: str
    question: str
    key: Key


@cache
def texts() -> dict[str, Any]:
    """Return the sentences for contexts."""
    return tomllib.loads(files("rlm_broker.evaluation").joinpath("texts.toml").read_text("utf-8"))


def filling(make: Callable[[], T], chars: int) -> list[T]:
    """Return made values whose texts have together, with a line break each, at most `chars` characters."""
    values: list[T] = []
    left = chars
    while left >= (needed := len(str(value := make())) + 1):
        values.append(value)
        left -= needed
    return values


def chars_of(length: str) -> int:
    """Return the characters of a context; its length in tokens is written as 8k, 1.5m or 64000.

    Raises:
        ConfigurationError: The length cannot be read, or is too short or too long.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([km]?)", length, re.IGNORECASE)
    tokens = 0 if match is None else round(float(match[1]) * _FACTORS[match[2].lower()])
    if tokens not in TOKENS:
        why = "cannot be read" if match is None else f"is not from {TOKENS[0]:,} to {TOKENS[-1]:,} tokens"
        raise ConfigurationError(f"length {length[:40]!r} {why}: write a number with k or m, such as 8k or 1m")
    return tokens * CHARS_PER_TOKEN


# -- facts in much text ------------------------------------------------------------------------------------------------

OTHERS: Final = 11
"""Facts of other questions in one context."""
NAME_ALONE: Final = "Answer with the name alone, or with NONE if the text does not tell."


def needles(draw: Random, chars: int, asked: str) -> Problem:
    """Return a question for one fact; the two share no word.

    Beside the fact are lines with the question's words and another meaning, and facts of other questions about
    other persons. So neither a search for words nor one for unusual lines finds it.
    """
    wanted, *others = draw.sample(texts()["facts"], 1 + OTHERS)
    persons = draw.sample(texts()["names"], 1 + len(wanted["lures"]) + OTHERS)
    sentences = [wanted["fact"], *wanted["lures"], *(other["fact"] for other in others)]
    facts = [sentence.format(person) for sentence, person in zip(sentences, persons, strict=True)]
    question, key, facts = _NEEDLES[asked](draw, wanted, persons, facts)
    lines = filling(lambda: _other(draw), chars - sum(len(fact) + 1 for fact in facts))
    for fact in facts:
        lines.insert(draw.randrange(len(lines) + 1), fact)
    return Problem("\n".join(lines), f"{question} {NAME_ALONE}", key)


def _other(draw: Random) -> str:
    """Return a line saying nothing of what any question asks for."""
    parts = [draw.choice(texts()[each]) for each in ("names", "did", "where", "when")]
    return f"{' '.join(parts)}."


_Found = tuple[str, Key, list[str]]


def _one(_: Random, wanted: dict[str, Any], persons: list[str], facts: list[str]) -> _Found:
    return f"Which person {wanted['asked']}?", Key("choice", persons[0], choices=tuple(texts()["names"])), facts


def _missing(_: Random, wanted: dict[str, Any], __: list[str], facts: list[str]) -> _Found:
    return f"Which person {wanted['asked']}?", Key("absent", None, choices=tuple(texts()["names"])), facts[1:]


def _two(draw: Random, wanted: dict[str, Any], persons: list[str], facts: list[str]) -> _Found:
    """Ask for the home of the person. All persons with a fact have one."""
    towns = draw.sample(texts()["towns"], len(persons))
    homes = [draw.choice(texts()["homes"]).format(*each) for each in zip(persons, towns, strict=True)]
    question = f"In which town does the person live who {wanted['asked']}?"
    return question, Key("choice", towns[0], choices=tuple(texts()["towns"])), facts + homes


_NEEDLES: Final[dict[str, Callable[[Random, dict[str, Any], list[str], list[str]], _Found]]] = {
    "one": _one,
    "two": _two,
    "missing": _missing,
}


# -- messages to be judged ---------------------------------------------------------------------------------------------

KINDS: Final = ("complaint", "question", "order", "thanks")
"""Kinds of messages, in the order of `texts.toml`."""
EXPLAINED: Final = (
    "Each message to a shop is of one of four kinds: complaint (the customer is not satisfied), question (the customer "
    "wants to know something before buying), order (the customer buys), thanks (the customer praises). "
)
HEAD: Final = "date | user | message"
SHARES: Final = (2, 3, 4, 6)
"""Frequencies of the kinds in one context; which kind has which is drawn."""
CHARS_PER_USER: Final = 1_000
"""Characters of a context for each user: some ten messages."""
FEWEST_USERS: Final = 5
CODES: Final = range(1_000_000, 10_000_000)
ASKED_USERS: Final = 8
"""Most users named in a question for some of them."""
USER: Final = r"\bU-\d{7}\b"
NUMBER_ALONE: Final = "Answer with the number alone."


class _Message(NamedTuple):
    day: str
    user: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.day} | {self.user} | {self.text}"


def messages(draw: Random, chars: int, asked: str) -> Problem:
    """Return a question about messages to a shop, in the manner of OOLONG.

    A message is of one of four kinds, and no word gives its kind away: each has to be judged by what it means. Each
    answer depends on the kinds of many messages.
    """
    users = [f"U-{number}" for number in draw.sample(CODES, max(FEWEST_USERS, chars // CHARS_PER_USER))]
    often = len(users) // 5
    shares = dict(zip(KINDS, draw.sample(SHARES, len(KINDS)), strict=True))
    tickets = [kind for kind, share in shares.items() for _ in range(share)]

    def message() -> _Message:
        user = users[draw.randrange(often) if draw.random() < 0.8 else draw.randrange(often, len(users))]
        kind = draw.choice(tickets)
        return _Message(f"2024-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}", user, kind, said(draw, kind))

    written = filling(message, chars - len(HEAD))
    question, key = _MESSAGES[asked](draw, written)
    return Problem("\n".join([HEAD, *map(str, written)]), EXPLAINED + question, key)


def said(draw: Random, kind: str) -> str:
    """Return a message of a kind: its sentence, with other sentences before or behind it or both."""
    sentence = draw.choice(texts()["messages"])[KINDS.index(kind)].format(draw.choice(texts()["goods"]))
    before, behind = draw.sample(texts()["asides"], 2)
    place = draw.randrange(3)
    return " ".join([before] * (place != 1) + [sentence] + [behind] * (place != 0))


_Asked = tuple[str, Key]


def _count(draw: Random, written: list[_Message]) -> _Asked:
    kind = draw.choice(KINDS)
    found = sum(message.kind == kind for message in written)
    return f"How many of the messages are of the kind {kind}? {NUMBER_ALONE}", Key("near", found)


def _most(draw: Random, written: list[_Message]) -> _Asked:
    (top, most), (_, second), *_ = Counter(message.kind for message in written).most_common(4)
    if most == second:
        return _count(draw, written)
    question = "Of which kind are the most messages? Answer with the name of the kind alone."
    return question, Key("choice", top, choices=KINDS)


def _user(draw: Random, written: list[_Message]) -> _Asked:
    chosen = draw.choice(written)
    found = sum((message.user, message.kind) == (chosen.user, chosen.kind) for message in written)
    question = f"How many of the messages of user {chosen.user} are of the kind {chosen.kind}? {NUMBER_ALONE}"
    return question, Key("number", found)


def _month(draw: Random, written: list[_Message]) -> _Asked:
    """Ask for the month of a kind. If two months have equally many messages of each kind, ask for a count."""
    for kind in draw.sample(KINDS, len(KINDS)):
        by_month = Counter(message.day[:7] for message in written if message.kind == kind).most_common(2)
        if len(by_month) > 1 and by_month[0][1] > by_month[1][1]:
            question = f"In which month of 2024 are the most messages of the kind {kind}? Answer with the month alone."
            return question, Key("date", by_month[0][0])
    return _count(draw, written)


def _first(draw: Random, written: list[_Message]) -> _Asked:
    chosen = draw.choice(written)
    days = (message.day for message in written if (message.user, message.kind) == (chosen.user, chosen.kind))
    question = f"On which date is the first message of user {chosen.user} of the kind {chosen.kind}?"
    return f"{question} Answer with the date alone.", Key("date", min(days))


def _both(draw: Random, written: list[_Message]) -> _Asked:
    """Ask which of some users have written messages of two kinds on one day. If none has, ask for a count."""
    one, other = draw.sample(KINDS, 2)
    kinds: dict[tuple[str, str], set[str]] = {}
    for message in written:
        kinds.setdefault((message.user, message.day), set()).add(message.kind)
    several = sorted({user for (user, _), each in kinds.items() if len(each) > 1})
    users = draw.sample(several, min(ASKED_USERS, len(several)))
    found = {user for (user, _), each in kinds.items() if user in users and {one, other} <= each}
    if not found:
        return _count(draw, written)
    question = (
        f"Which of these users have, on the same day, written a message of the kind {one} and one of the kind {other}?"
    )
    return f"{question} {', '.join(users)}. Answer with their names alone.", Key("set", tuple(sorted(found)), USER)


_MESSAGES: Final[dict[str, Callable[[Random, list[_Message]], _Asked]]] = {
    "count": _count,
    "most": _most,
    "user": _user,
    "month": _month,
    "first": _first,
    "both": _both,
}

TASKS: Final[dict[str, tuple[Callable[[Random, int, str], Problem], tuple[str, ...]]]] = {
    "needles": (needles, tuple(_NEEDLES)),
    "messages": (messages, tuple(_MESSAGES)),
}
"""Name of a task → the function that makes a problem of about so many characters, and what it may ask for."""
