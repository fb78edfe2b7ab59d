import json

from rlm_broker.sandbox.workers.canary import ATTEMPTS
from tests.support.command import run


def test_it_reports_every_layer_and_every_attempt_of_both_levels() -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    keys = {"auto", "levels", "exact_memory", "control_groups", "repls_that_fit", "maps_texts", "machine"}
    assert report.keys() == keys
    assert report["maps_texts"] is True
    works = [level for level, found in report["levels"].items() if found["problem"] is None]
    assert report["auto"] == (works[0] if works else None)
    assert done.returncode == (0 if works else 4)
    for level in works:
        assert report["levels"][level]["refused"] == dict.fromkeys(ATTEMPTS, True)
        assert "seccomp" in report["levels"][level]["layers"]


def test_the_table_says_what_auto_means_here() -> None:
    done = run("doctor")
    assert "isolation 'auto' " in done.stdout.splitlines()[-1]
    assert done.stdout.count("a worker cannot become root") == done.stdout.count("ok    seccomp") > 0
