"""Declaration of a peer, by which its adapter is tried against it.

A peer has a module of its name in this folder, with one constant:

    PEER = Peer(
        name="dspy",
        packages=("dspy==3.4.1", "pytest", "pytest-asyncio"),
        suites=(Suite("LocalInterpreter", ("-m", "pytest", "-p", RECORDER, "tests/test_local.py")),),
        programs=("scripts.integrations.inside.dspy_programs:rlm",),
        opened="scripts.integrations.inside.dspy_programs:opened",
    )

What runs in the peer's environment is in `inside/`, and imports nothing of the project but `rlm_broker`, `scripts` and
the peer. It is found there as `scripts.integrations.inside.NAME`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RECORDER = "scripts.integrations.inside.recorder"
"""A plugin for pytest. It writes the outcome of each test where `Suite` says."""


@dataclass(frozen=True)
class Suite:
    """Tests of the peer's own, run unmodified with our adapter in place of theirs.

    Attributes:
        name: Its name in the table of results, and in the file of expected failures.
        command: Arguments for the Python of the environment. It runs in a copy of the suite's folder. For each test it
            appends a line to the file that RESULTS names in its environment: `{"test": id, "outcome": "passed", "why":
            ""}`, where an outcome is passed, failed or skipped. `RECORDER` does that for pytest.
        sources: Where the suite's folder comes from. "sdist rlms==0.1.3" is fetched by pip. "checkout URL" or "checkout
            URL TAG" is a repository that the user has cloned as NAME or NAME-TAG into the folder of `--checkouts`;
            without that the suite is left out. None is an empty folder, for a suite of the installed package.
        packages: What pip installs for this suite, in place of the peer's packages, if it is one of another version.
    """

    name: str
    command: tuple[str, ...]
    sources: str | None = None
    packages: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Peer:
    """A package with an adapter, and how that adapter is tried. `scripts/integrations/expected/NAME.toml` has the tests
    that fail, by suite and reason.

    Attributes:
        name: Name of the adapter's module and of the extra.
        packages: What pip installs beside the wheel of rlm-broker, with versions.
        python: Version of the interpreter, such as "3.12"; None takes the one that runs the script.
        suites: The peer's own tests.
        programs: Functions "module:name" without parameters. Each runs in a process of its own, is a whole program of
            the peer's on a scripted model, and raises if its result is wrong.
        example: A program in `examples`, and a regular expression that is found in what it prints.
        opened: A function "module:name" that returns a context manager, entered once an adapter of its own has had its
            first result. 200 of them are entered on 64 threads, and some in a process that is killed. None leaves that
            out.
        figures: Functions "module:name" without parameters that measure by turns with the peer, and print one line for
            each figure. They run with `--figures` alone.
    """

    name: str
    packages: tuple[str, ...]
    python: str | None = None
    suites: tuple[Suite, ...] = ()
    programs: tuple[str, ...] = ()
    example: tuple[str, str] | None = None
    opened: str | None = None
    figures: tuple[str, ...] = ()

    def expected(self, suite: Suite) -> dict[str, str]:
        """Return the tests of a suite that have to fail, with their reasons.

        The file has a table for each reason: `[[SUITE]]` with `reason = "..."` and `tests = ["..."]`.
        """
        path = HERE / "expected" / f"{self.name}.toml"
        groups = tomllib.loads(path.read_text()).get(suite.name, []) if path.exists() else []
        return {test: group["reason"] for group in groups for test in group["tests"]}
