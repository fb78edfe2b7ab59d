"""Tries the faults of modules in copies of the tree, several at once; the checkout stays as it is."""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from scripts.mutation.mutants import Mutant, mutants_of, sampled
from scripts.mutation.server import Trial, Verdict

PROJECT = Path(__file__).resolve().parent.parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache", "dist")
FIRST_TIMEOUT_S = 600.0
MORE_TIME, LEAST_TIME_S, LEAST_CPU_S = 5, 10.0, 1.0
"""A fault is too slow when its tests take so many times as long as without it and these seconds, or CPU time."""


class FailsAnyway(Exception):
    """Tests of a module fail without any fault."""


@dataclass(frozen=True)
class Tried:
    """One fault, and whether a test noticed."""

    module: str
    mutant: Mutant
    verdict: Verdict

    @property
    def survived(self) -> bool:
        """Whether no test noticed."""
        return self.verdict.outcome == "passed"


class Server:
    """A process that runs tests in a tree of its own."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.mutation.server", str(tree)],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, trial: Trial) -> Verdict:
        """Run these tests."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(trial)) + "\n")
        self._process.stdin.flush()
        return Verdict(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def try_all(
    root: Path,
    modules: Mapping[str, Sequence[str]],
    *,
    jobs: int = 1,
    sample: int | None = None,
    seed: int = 0,
    on_tried: Callable[[Tried], object] = lambda _: None,
) -> list[Tried]:
    """Try the faults of modules.

    Args:
        root: Of the tree.
        modules: Path of each module below `root` -> its test modules.
        jobs: How many tests run at once.
        sample: At most so many faults of each module, drawn with `seed`.
        on_tried: Called with each fault when its tests have ended.

    Raises:
        FailsAnyway: Tests fail without a fault.
    """
    tried: list[Tried] = []
    for module, tests in modules.items():
        mutants = sampled(mutants_of((root / module).read_text()), sample, seed)
        tried += _of_module(root, module, list(tests), mutants, jobs, on_tried)
    return tried


def _of_module(
    root: Path, module: str, tests: list[str], mutants: Sequence[Mutant], jobs: int, on_tried: Callable[[Tried], object]
) -> list[Tried]:
    waiting: SimpleQueue[tuple[int, Mutant]] = SimpleQueue()
    for numbered in enumerate(mutants):
        waiting.put(numbered)
    tried: dict[int, Tried] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(_server(root)) for _ in range(jobs)]
        without = servers[0].run(Trial(module, None, tests, FIRST_TIMEOUT_S, round(FIRST_TIMEOUT_S)))
        if without.outcome != "passed":
            raise FailsAnyway(f"{' '.join(tests)}: {without.outcome} without any fault in {module}")
        timeout_s = LEAST_TIME_S + MORE_TIME * without.took_s
        cpu_s = round(LEAST_CPU_S + MORE_TIME * without.cpu_s)

        def work(server: Server) -> None:
            while True:
                try:
                    number, mutant = waiting.get_nowait()
                except Empty:
                    return
                verdict = server.run(Trial(module, mutant.source, tests, timeout_s, cpu_s))
                tried[number] = Tried(module, mutant, verdict)
                on_tried(tried[number])

        threads = [threading.Thread(target=work, args=(server,)) for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [tried[number] for number in sorted(tried)]


@contextmanager
def _server(root: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(root, tree, ignore=LEFT_OUT)
        server = Server(tree)
        try:
            yield server
        finally:
            server.close()
