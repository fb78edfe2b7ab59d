"""Facts hidden in much text: one fact, several, and one that is not there."""

from rlm_broker.evaluation.scoring import Key
from rlm_broker.evaluation.tasks.draw import Draw
from rlm_broker.evaluation.tasks.problem import Problem, filling, mixed
from rlm_broker.evaluation.tasks.words import TOWNS, sentence

OTHERS = 4
"""Facts about other towns, which a search for the kind of the fact alone finds as well."""
SEVERAL = 6
"""Facts that a question for several wants."""
CODE = r"\b[A-Z]-\d{7}\b"
"""Codes in an answer."""


def needle(draw: Draw, chars: int) -> Problem:
    """Return a question for one fact, among facts of the same kind about other towns."""
    towns, codes = draw.several(TOWNS, OTHERS + 1), draw.codes("K", OTHERS + 1)
    facts = [*map(_access_code, towns, codes), _painted(draw, towns[0])]
    key = Key("choice", codes[0], choices=tuple(codes))
    return Problem(_context(draw, facts, chars), _access_question(towns[0]), key)


def absent(draw: Draw, chars: int) -> Problem:
    """Return the question of `needle` without its fact: the text has another fact about the same town."""
    towns, codes = draw.several(TOWNS, OTHERS + 1), draw.codes("K", OTHERS)
    facts = [*map(_access_code, towns[1:], codes), _painted(draw, towns[0])]
    return Problem(_context(draw, facts, chars), _access_question(towns[0]), Key("absent", None, CODE))


def needles(draw: Draw, chars: int) -> Problem:
    """Return a question for several facts about one town, among as many about others."""
    towns, codes = draw.several(TOWNS, OTHERS + 1), draw.codes("P", 2 * SEVERAL)
    wanted = codes[:SEVERAL]
    facts = [f"Parcel {code} is kept at the depot of {towns[0]}." for code in wanted]
    facts += [f"Parcel {code} is kept at the depot of {draw.pick(towns[1:])}." for code in codes[SEVERAL:]]
    question = f"Which parcels are kept at the depot of {towns[0]}? Give the codes of all of them, separated by commas."
    return Problem(_context(draw, facts, chars), question, Key("set", tuple(wanted), CODE))


def _access_code(town: str, code: str) -> str:
    return f"The access code of the weather station at {town} is {code}."


def _painted(draw: Draw, town: str) -> str:
    return f"The weather station at {town} was painted {draw.pick(('green', 'white', 'grey'))}."


def _access_question(town: str) -> str:
    return (
        f"What is the access code of the weather station at {town}? "
        "Give the code alone. If the text does not say it, say that it is not there."
    )


def _context(draw: Draw, facts: list[str], chars: int) -> str:
    filler = filling(lambda: sentence(draw), str, chars - sum(len(fact) + 1 for fact in facts))
    return mixed(draw, filler, draw.several(facts, len(facts)))
