"""Lines that a whole run prints beside pytest's own."""

import gc
import os
import signal
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

from tests.support.clock import Clock

# Without compiled modules each worker, and each process that a test starts, compiles hundreds of them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell that starts a run in the background leaves SIGINT ignored, for all processes below as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine makes single examples slow, and that is no defect.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that stands still until the test moves it."""
    return Clock(monkeypatch)


@pytest.fixture
async def leaping_clock(clock: Clock) -> Clock:
    """Time that moves to the next timer whenever the loop has nothing else to do."""
    clock.leaps()
    return clock
