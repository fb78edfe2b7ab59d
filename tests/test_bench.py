"""The bench as it is called, with rows that need no peer, and peers that cannot be had."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.bench import baseline, peer
from scripts.bench.__main__ import MEASUREMENTS, main
from scripts.bench.picture import svg
from scripts.bench.row import Curve, Row, Side, side
from tests.support.places import PROJECT


def test_command_prints_table_and_writes_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench", "--quick", "queries", "context_curve", "--json"]
    done = subprocess.run(
        [*command, str(tmp_path / "bench.json")], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert "llm_query" in done.stdout
    assert "context load" in done.stdout
    document = json.loads((tmp_path / "bench.json").read_text())
    assert {"machine", "kernel", "python", "versions", "rows", "curves"} <= document.keys()
    row = document["rows"][0]
    assert row["value"] > 0
    assert row["met"] in (True, False)
    assert row["peers"][0]["ratio"] > 0
    assert row["samples"] >= 200
    assert [x for x, _ in document["curves"][0]["lines"]["rlm-broker"]] == [1, 10]
    picture = ElementTree.parse(tmp_path / "bench.svg").getroot()
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3


def test_help_names_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "[NAME ...]" in shown
    assert "by default all: sessions, one_shot" in shown
    assert "{" not in shown


def test_failed_row_and_slower_rows_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed row makes it exit with 1. A row is slower by its ratio to the floor, and by more than it spreads."""
    monkeypatch.setattr(baseline, "FILE", tmp_path / "baseline.json")

    def one(unit: str, ours: list[float], floor: list[float]) -> Row:
        return Row(f"a row in {unit}", Side("ours", unit, ours), [Side("gone", unit, []), Side("floor", unit, floor)])

    def run(*rows: Row, options: tuple[str, ...] = ()) -> str:
        monkeypatch.setitem(MEASUREMENTS, "made", lambda _effort: rows)
        main(["made", *options])
        return capsys.readouterr().out.partition("rows in it:")[2]

    run(one("ms", [2.0] * 5, [4.0] * 5), one("/s", [9.0] * 5, [9.0] * 5), options=("--write-baseline",))
    assert json.loads(baseline.FILE.read_text())["made"]["costs"]["a row in ms"]["floor"]["cost"] == 0.5
    assert run(one("ms", [4.0] * 5, [8.0] * 5), one("/s", [18.0] * 5, [9.0] * 5)).split() == ["none"]
    assert run(one("ms", [2.0, 2.6, 2.6, 2.6, 4.0], [4.0] * 5)).split() == ["none"]
    said = run(one("ms", [2.6] * 5, [4.0] * 5), one("/s", [9.0] * 5, [18.0] * 5))
    assert "made: a row in ms: 0.65 x floor, was 0.5 x" in said
    assert "made: a row in /s: 2 x floor, was 1 x" in said
    monkeypatch.setitem(MEASUREMENTS, "broken", lambda _effort: [][1])
    with pytest.raises(SystemExit, match="failed: broken"):
        main(["broken", "made", "--quick"])
    assert "a row in ms" in capsys.readouterr().out


def test_peer_not_installable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that cannot be installed says so and gives no figures."""

    def refused(_environment: str) -> Path:
        raise peer.NotInstallable("not installable here: no matching distribution")

    monkeypatch.setattr(peer, "python_of", refused)
    with peer.Peer("somebody", "jupyter_repl.py", "jupyter") as somebody:
        samples = somebody.samples("spawn")
    row = Row("a row", Side("ours", "ms", [1.0]), [somebody.side("ms", samples)])
    assert row.as_json()["peers"][0]["problem"] == "not installable here: no matching distribution"
    assert row.ours.at_most_times(1, row.others[0]).met is None


def test_peer_that_dies_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('chatter', flush=True)\nraise SystemExit('some Error: it has no legs')")
    monkeypatch.setattr(peer, "python_of", lambda _environment: Path(sys.executable))
    with peer.Peer("somebody", str(script), "jupyter") as somebody:
        assert somebody.samples("walk") == []
        assert somebody.samples("walk") == []
    assert somebody.problem == "does not run here: some Error: it has no legs"
    with (
        pytest.raises(RuntimeError, match="somebody does not run here: some Error"),
        peer.Peer("somebody", str(script)) as own,
    ):
        own.samples("walk")


def test_row_goals_are_judged_by_medians() -> None:
    ours, theirs = side("ours", "ms", [0.001, 0.002, 0.009]), side("theirs", "ms", [0.004])
    assert ours.median == 2
    assert ours.at_most(2).met
    assert not ours.p99_at_most(2).met
    assert ours.at_most_times(0.5, theirs).met
    assert not ours.at_least_times(0.6, theirs).met


def test_picture_with_awkward_names_is_xml() -> None:
    """A picture of one point and of names with markup in them is valid XML."""
    ElementTree.fromstring(svg([Curve("a < b & c", "x", "ms", {'"quoted" & <b>': [(1, 5)], "none": [(0, 0)]})]))
