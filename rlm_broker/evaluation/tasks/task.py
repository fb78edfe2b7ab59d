"""All tasks by their names."""

from dataclasses import dataclass
from typing import Final

from rlm_broker.evaluation.tasks import joins, messages, needles
from rlm_broker.evaluation.tasks.draw import Draw
from rlm_broker.evaluation.tasks.problem import Make, Problem


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of generated questions.

    Attributes:
        name: Name on the command line.
        about: Ability that it measures, in a few words.
        make: Makes one problem.
        chars_per_token: Characters of its contexts for each token, rounded down, as cl100k_base counts tokens.
    """

    name: str
    about: str
    make: Make
    chars_per_token: float

    def problem(self, seed: int, number: int, chars: int) -> Problem:
        """Return a problem. The same arguments give the same problem on all machines.

        Args:
            seed: Seed of the whole evaluation.
            number: Number of the problem among those of one length, from 1.
            chars: Maximum characters of the context.
        """
        return self.make(Draw(self.name, seed, number, chars), chars)


_ALL = (
    Task("needle", "one fact in much text", needles.needle, 4.8),
    Task("needles", "all of several facts in much text", needles.needles, 4.8),
    Task("absent", "a fact that is not there", needles.absent, 4.8),
    Task("count", "counts and sums over lines that name their labels", messages.count, 3.0),
    Task("classify", "counts over lines whose labels are inferred", messages.classify, 3.0),
    Task("pairs", "pairs that two lists have in common", joins.pairs, 3.1),
)
TASKS: Final = {task.name: task for task in _ALL}
"""Maps each name to its task."""
