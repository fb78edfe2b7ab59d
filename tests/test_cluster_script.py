"""`scripts.cluster` as it is called: one fault in its short form, with a real Ray in namespaces."""

import subprocess
import sys

import pytest

from rlm_broker.nodes.link import BEAT_S, SILENCE_S
from scripts.cluster import stage
from scripts.cluster.__main__ import NOTICED_WITHIN_S
from tests.support.places import PROJECT


def test_silence_that_is_a_loss_ends_within_the_bound_of_the_faults() -> None:
    """Seconds are measured by the whole script alone. What they consist of, beside the machine's own work, is here."""
    assert SILENCE_S + BEAT_S < NOTICED_WITHIN_S


@pytest.mark.ray
def test_items_of_a_cut_node_are_answered_elsewhere() -> None:
    """A link that is cut loses no item and pays no call twice, and no process is left."""
    pytest.importorskip("ray.cluster_utils", reason="needs the extra ray")
    if missing := stage.what_is_missing():
        pytest.skip(f"no network namespaces: {missing}")
    command = [sys.executable, "-m", "scripts.cluster", "--quick", "link cut"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 not as they must be" in done.stdout
