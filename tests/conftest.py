"""The tiers of `scripts/test`, and lines that a whole run prints beside pytest's own."""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

import rlm_broker
from tests.support.clock import Clock

# Without compiled modules each worker, and each process that a test starts, compiles hundreds of them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell that starts a run in the background leaves SIGINT ignored, for all processes below as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
FAST = (
    *(f"rlm_broker/batch/test_{name}.py" for name in ("item_calls", "settings", "parsing", "spending")),
    *(f"rlm_broker/broker/test_{name}.py" for name in ("cache", "client_queue", "routing")),
    "rlm_broker/broker/transport/test_session.py",
    *(f"rlm_broker/concurrency/test_{name}.py" for name in ("deadline", "resource", "turns")),
    *(f"rlm_broker/context/test_{name}.py" for name in ("globs", "stored_context", "text")),
    *(f"rlm_broker/evaluation/test_{name}.py" for name in ("questions", "scoring", "tasks")),
    "rlm_broker/events/test_redaction.py",
    *(f"rlm_broker/run/test_{name}.py" for name in ("calls", "ledger", "recursion", "tokens")),
    "rlm_broker/sandbox/blocks/test_block_clock.py",
    "rlm_broker/test_limits.py",
    "rlm_broker/cli/settings",
    "rlm_broker/run/prompts",
    "rlm_broker/values",
    "sandbox_worker/wire",
    "test_lint.py",
    "test_states.py",
)
"""Pure tests below this folder: they open no sandbox, and make up the tier `fast`."""
LEFT_OUT = "not browser and not notebook and not installer and not inspect and not ray"
"""Tests of the tiers `fast` and `default`."""
EXAMPLES = {"": 20, "fast": 20, "default": 20, "all": 100}
"""Tier: examples that hypothesis makes for each property. Without a tier pytest runs what it is given."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the tier; a call of pytest without `scripts/test` runs what it names."""
    parser.addoption("--tier", choices=EXAMPLES, default="", help="which tests are run: see `scripts/test --help`")


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what the tier leaves out, and choose its number of examples."""
    tier = config.getoption("tier")
    # A busy machine makes single examples slow, and that is no defect.
    slow = [HealthCheck.too_slow]
    settings.register_profile(tier, max_examples=EXAMPLES[tier], deadline=None, suppress_health_check=slow)
    settings.load_profile(tier)
    if tier in ("fast", "default") and not config.option.markexpr:
        config.option.markexpr = LEFT_OUT
    if tier == "fast" and (missing := [path for path in FAST if not (Path(__file__).parent / path).exists()]):
        raise pytest.UsageError(f"tests/conftest.py: FAST names what does not exist: {', '.join(missing)}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore what is not in the tier `fast`."""
    if config.getoption("tier") != "fast":
        return None
    path = str(collection_path.relative_to(Path(__file__).parent))
    return not any(f"{path}/".startswith(f"{each}/") or f"{each}/".startswith(f"{path}/") for each in FAST) or None


def pytest_collection_finish() -> None:
    """Exempt what lives as long as the run from garbage collection: tests that collect take a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _exempt_what_was_imported() -> None:
    """Do the same with what earlier modules have imported: litellm alone is some hundred thousand objects."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were skipped: one line for each reason, with the number of tests."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    if terminalreporter.config.option.markexpr == LEFT_OUT:
        terminalreporter.write_line(
            "left out: tests that need a browser, a notebook, an installer, inspect_ai or Ray (scripts/test all)"
        )


@pytest.fixture(scope="module")
def open_sandbox() -> Iterator[rlm_broker.Sandbox]:
    """One open sandbox for the tests of a module that do not test its opening: this takes most of a short run's time.

    It keeps no workers ready, so that the processes below the tests are the same before and after each of them.
    """
    with rlm_broker.Sandbox(warm=0) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loop_sandbox() -> AsyncIterator[rlm_broker.Sandbox]:
    """The same on the loop of tests that all run on one, as `pytest.mark.asyncio(loop_scope="module")` says."""
    async with rlm_broker.Sandbox(warm=0) as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that stands still until the test moves it."""
    return Clock(monkeypatch)


@pytest.fixture
async def leaping_clock(clock: Clock) -> Clock:
    """Time that moves to the next timer whenever the loop has nothing else to do."""
    clock.leaps()
    return clock
