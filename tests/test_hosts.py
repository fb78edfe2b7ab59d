"""`scripts.hosts` as it is called; `tests/e2e/test_surroundings.py` judges the surroundings themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.hosts.__main__ import KINDS, every_host, shown, tried
from scripts.hosts.hosts import Host
from scripts.hosts.surroundings import CANNOT_BE_MADE, PROJECT
from tests.support.tables import table


def test_command_writes_rows_for_each_host(tmp_path: Path) -> None:
    """The command names the hosts that it cannot try, and writes rows of the others."""
    command = [sys.executable, "-m", "scripts.hosts", "root", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert "not tried: no --root DIR: `debootstrap" in done.stdout
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["kind"] == "root"
    assert row["defects"] == []


def test_command_refuses_an_unknown_kind() -> None:
    command = [sys.executable, "-m", "scripts.hosts", "planet"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no kind planet; choose from surrounding, container" in done.stderr


def test_doctor_and_exec_agree_here() -> None:
    host = next(each for each in every_host(["surrounding"], []) if each.name.startswith("plain"))
    row = tried(host, with_tests=False)
    assert row.defects == []
    assert (row.auto in ("strict", "standard")) == row.exec_ran


SAYS_STRICT = """
import json, sys
levels = {level: {"problem": None, "refused": {}} for level in ("strict", "standard")}
print(json.dumps({"auto": "strict", "levels": levels}) if "doctor" in sys.argv else "a Traceback")
sys.exit("Traceback" if "exec" in sys.argv else 0)
"""


@table(
    "program, defect",
    [
        (SAYS_STRICT, "doctor says strict, and exec ends with 1"),
        ("raise OSError('no legs')", "doctor: OSError: no legs"),
        ("import time; time.sleep(600)", "no end within"),
    ],
)
def test_host_where_the_broker_misbehaves_is_a_defect(
    program: str, defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{program}")
    (tmp_path / "python").chmod(0o755)
    if "sleep" in program:
        monkeypatch.setattr("scripts.hosts.__main__.WAIT_S", 1)
    row = tried(Host("surrounding", "broken", python=str(tmp_path / "python")), with_tests=False)
    assert any(found.startswith(defect) for found in row.defects)
    assert f"DEFECT: {defect}" in shown(row)


def test_unavailable_surrounding_names_its_reason() -> None:
    program = f"import sys; print('no such right', file=sys.stderr); sys.exit({CANNOT_BE_MADE})"
    row = tried(Host("surrounding", "refused", (sys.executable, "-c", program)), with_tests=False)
    assert (row.notes, row.defects) == ("not tried: no such right", [])


def test_every_kind_has_hosts_or_a_reason() -> None:
    kinds = [kind for kind in KINDS if kind not in ("container", "python")]  # these ask daemons, or install
    found = list(every_host(kinds, []))
    assert {host.kind for host in found} == set(kinds)
    assert all(host.prefix or host.why_not for host in found)
