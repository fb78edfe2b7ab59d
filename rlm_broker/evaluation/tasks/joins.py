"""Pairs that two lists have in common, in the manner of OOLONG-Pairs: no list alone tells which they are."""

from typing import Final, NamedTuple

from rlm_broker.evaluation.scoring import Key
from rlm_broker.evaluation.tasks.draw import Draw
from rlm_broker.evaluation.tasks.problem import Problem, filling
from rlm_broker.evaluation.tasks.words import TOWNS

PAIRS: Final = 6
"""Pairs that a question wants."""
PAIR: Final = r"\b(R-\d{7})\b(?:(?!\b[RB]-\d)[^\0]){0,40}?\b(B-\d{7})\b"
"""A reader and a book in an answer, with few characters between both."""

LENT: Final = "Loans:"
RETURNED: Final = "Returns:"
FEWEST_CHARS: Final = 100
"""Least characters of both lines of a loan."""


class _Loan(NamedTuple):
    reader: str
    book: str
    home: str
    place: str

    def __str__(self) -> str:
        return f"{self.lent}\n{self.returned}"

    @property
    def lent(self) -> str:
        """Line of the first list."""
        return f"Reader {self.reader} from {self.home} borrowed the book {self.book}."

    @property
    def returned(self) -> str:
        """Line of the second list."""
        return f"The book {self.book} came back to the branch in {self.place}."


def pairs(draw: Draw, chars: int) -> Problem:
    """Return a question for the pairs of a reader from one town and a book that came back in another town.

    Each condition alone holds for about a thirtieth of its list. Each book is in each list once.
    """
    home, place = draw.several(TOWNS, 2)
    most = chars // FEWEST_CHARS + PAIRS
    readers, books = iter(draw.codes("R", most)), iter(draw.codes("B", most))
    wanted = [_Loan(next(readers), next(books), home, place) for _ in range(PAIRS)]

    def other() -> _Loan:
        lives, returns = draw.pick(TOWNS), draw.pick(TOWNS)
        while (lives, returns) == (home, place):
            lives, returns = draw.pick(TOWNS), draw.pick(TOWNS)
        return _Loan(next(readers), next(books), lives, returns)

    room = chars - len(LENT) - len(RETURNED) - 2 - sum(len(str(loan)) + 1 for loan in wanted)
    loans = [*wanted, *filling(other, str, room)]
    lent = [loan.lent for loan in draw.several(loans, len(loans))]
    returned = [loan.returned for loan in draw.several(loans, len(loans))]
    question = (
        f"Which readers from {home} borrowed a book that came back to the branch in {place}? "
        "Answer with all pairs of the reader and the book, one pair in each line, such as R-1234567, B-1234567."
    )
    key = Key("set", tuple(f"{loan.reader} {loan.book}" for loan in wanted), PAIR)
    return Problem("\n".join([LENT, *lent, RETURNED, *returned]), question, key)
