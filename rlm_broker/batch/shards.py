"""Shards of a batch: every hundredth item of the input, with results and a journal of its own, and all results in one.

Shards know nothing of each other. So any number of machines works on one input without a connection between them, as
Slurm arrays and Indexed Jobs of Kubernetes want it.
"""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.values.host_files import refusal_told

INDEX_VARIABLES = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")
"""Variables with the number of this task; the first one that is set counts."""
_GIVEN = re.compile(r"(auto|\d{1,7})/(\d{1,7})")
_NAME = re.compile(r"\.(\d+)-of-(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Shard:
    """The items whose number has a certain remainder, for example every hundredth one.

    Example:
        ```python
        third = Shard(1, 3)
        list(rlm.batch(ItemsFile("questions.jsonl", shard=third), out=third.file(Path("answers.jsonl"))))
        ```

    Attributes:
        number: Number of the shard, from 1, as in `--shard 1/3`.
        of: Number of shards.

    Raises:
        ConfigurationError: There is no such shard.
    """

    number: int
    of: int

    def __post_init__(self) -> None:
        require_kind("number", self.number, int)
        require_kind("of", self.of, int)
        if not 1 <= self.number <= self.of:
            raise ConfigurationError(f"there is no shard {self.number} of {self.of}")

    def has(self, number: int) -> bool:
        """Whether an item belongs to the shard, by its number from 1."""
        return number % self.of == self.number % self.of

    def file(self, out: Path) -> Path:
        """Return the file of results of the shard: `answers.3-of-100.jsonl` for `answers.jsonl`."""
        return out.with_name(f"{out.stem}.{self.number}-of-{self.of}{out.suffix}")


def shard_of(text: str, variables: Mapping[str, str] = os.environ) -> Shard:
    """Return the shard named as `3/100`, or as `auto/100` with the number of this task.

    The numbers of tasks may begin at 0 or at 1, and some of them may run again: only the remainder counts.

    Raises:
        ConfigurationError: It names none, or no variable has the number of a task.
    """
    given = _GIVEN.fullmatch(text)
    if given is None or not int(given[2]):
        raise ConfigurationError(
            f"--shard {text}: give a number and the number of all shards, such as 3/100 or auto/100"
        )
    number, of = given[1], int(given[2])
    if number == "auto":
        found = [variables[name] for name in INDEX_VARIABLES if variables.get(name)]
        if not found or not found[0].isdecimal():
            raise ConfigurationError(f"--shard {text}: none of {', '.join(INDEX_VARIABLES)} has a number: give 3/{of}")
        return Shard(int(found[0]) % of or of, of)
    if int(number) > of:
        raise ConfigurationError(f"--shard {text}: there is no shard {number} of {of}")
    return Shard(int(number) or of, of)


def shards_of(out: Path) -> dict[Shard, Path]:
    """Return the files of results of all shards beside a file of results.

    Raises:
        ConfigurationError: They are of batches with other numbers of shards.
    """
    found = {}
    for path in out.parent.glob(f"*{out.suffix}"):
        name = _NAME.search(path.stem)
        if name is not None and path.stem[: name.start()] == out.stem:
            with suppress(ConfigurationError):  # the file of another program, such as `answers.4-of-3.jsonl`
                found[Shard(int(name[1]), int(name[2]))] = path
    if len({shard.of for shard in found}) > 1:
        raise ConfigurationError(f"the shards beside {out} are of several batches: move those of one of them elsewhere")
    return dict(sorted(found.items(), key=lambda each: each[0].number))


def merge(out: Path) -> int:
    """Put the results of all shards into one file, and return their number. A kill leaves no half of it.

    Raises:
        ConfigurationError: There are no shards, the file exists, or one of them cannot be read or written.
    """
    shards = shards_of(out)
    if not shards:
        raise ConfigurationError(f"there is no shard of {out} beside it, such as {Shard(1, 100).file(out).name}")
    written, number = out.with_name(f"{out.name}.merged"), 0
    with refusal_told(f"cannot merge into {out}"):
        if out.exists():
            raise ConfigurationError(f"{out} exists: remove it, or name another file for all results")
        with ExitStack() as stack:
            into = stack.enter_context(open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"))
            for path in shards.values():
                with path.open("rb") as file:
                    for line in file:
                        if line.endswith(b"\n"):
                            into.write(line)
                            number += 1
        written.rename(out)
    return number
