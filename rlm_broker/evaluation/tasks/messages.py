"""Counts over thousands of messages of customers, in the manner of OOLONG.

Each line is easy to judge alone. The answer depends on all of them. With `count` each line names its label; with
`classify` the label has to be inferred from the message.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from rlm_broker.evaluation.scoring import Key
from rlm_broker.evaluation.tasks.draw import Draw
from rlm_broker.evaluation.tasks.problem import Problem, filling
from rlm_broker.evaluation.tasks.sayings import EXPLAINED, LABELS, saying

SHARES: Final = (2, 3, 4, 6)
"""Frequencies of the labels in one context; which label has which is drawn."""
CHARS_PER_USER: Final = 1_000
"""Characters of a context for each user: some 15 messages."""
FEWEST_USERS: Final = 5
NUMBER_ALONE: Final = "Answer with the number alone."


class _Message(NamedTuple):
    day: str
    user: str
    label: str
    amount: int
    text: str


def count(draw: Draw, chars: int) -> Problem:
    """Return a question about lines that name their labels: a count, the most frequent label, a sum for a user."""
    head = "date | user | kind | amount | message"
    messages = _messages(draw, chars - len(head), _labelled)
    return _asked(draw, messages, "\n".join([head, *map(_labelled, messages)]), "", ("count", "most", "sum"))


def classify(draw: Draw, chars: int) -> Problem:
    """Return a question about lines whose labels are inferred: a count, the most frequent label, a user's count."""
    head = "date | user | message"
    messages = _messages(draw, chars - len(head), _unlabelled)
    text = "\n".join([head, *map(_unlabelled, messages)])
    return _asked(draw, messages, text, f"{EXPLAINED} ", ("count", "most", "user"))


def _labelled(message: _Message) -> str:
    return f"{message.day} | {message.user} | {message.label} | {message.amount} | {message.text}"


def _unlabelled(message: _Message) -> str:
    return f"{message.day} | {message.user} | {message.text}"


def _messages(draw: Draw, chars: int, written: Callable[[_Message], str]) -> list[_Message]:
    """Return messages that fill `chars`. A fifth of the users writes four fifths of them."""
    users = draw.codes("U", max(FEWEST_USERS, chars // CHARS_PER_USER))
    often = len(users) // 5
    shares = dict(zip(LABELS, draw.several(SHARES, len(LABELS)), strict=True))
    tickets = [label for label, share in shares.items() for _ in range(share)]

    def message() -> _Message:
        user = users[draw.below(often)] if draw.below(5) else users[often + draw.below(len(users) - often)]
        label = draw.pick(tickets)
        day = f"2024-{1 + draw.below(12):02}-{1 + draw.below(28):02}"
        return _Message(day, user, label, 1 + draw.below(200), saying(draw, label))

    return filling(message, written, chars)


def _asked(draw: Draw, messages: list[_Message], text: str, before: str, kinds: tuple[str, ...]) -> Problem:
    """Return a drawn question about messages. With two most frequent labels it is not which one is."""
    kind, label = draw.pick(kinds), draw.pick(LABELS)
    counts = Counter(message.label for message in messages)
    (top, most), (_, second) = counts.most_common(2)
    if kind == "most" and most > second:
        question = f"{before}Which kind of message is the most frequent? Answer with the name of the kind alone."
        return Problem(text, question, Key("choice", top, choices=LABELS))
    if kind in ("user", "sum"):
        user, label = (chosen := draw.pick(messages)).user, chosen.label
        of_user = [message for message in messages if (message.user, message.label) == (user, label)]
        if kind == "sum":
            question = f"What is the sum of the amounts of the messages of kind {label} of user {user}?"
            total = sum(message.amount for message in of_user)
            return Problem(text, f"{question} {NUMBER_ALONE}", Key("number", total))
        question = f"{before}How many messages of user {user} are of the kind {label}? {NUMBER_ALONE}"
        return Problem(text, question, Key("near", len(of_user)))
    question = f"{before}How many messages are of the kind {label}? {NUMBER_ALONE}"
    return Problem(text, question, Key("near", counts[label]))
