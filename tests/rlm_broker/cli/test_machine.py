from pathlib import Path

import psutil
import pytest

from rlm_broker.cli import machine


def test_machine_has_facts_that_fit_each_other() -> None:
    facts = machine.offered()
    assert 1 <= facts["cpus"] <= (psutil.cpu_count() or 1)
    assert 0 < facts["memory_available_bytes"] <= psutil.virtual_memory().total
    assert facts["memory_bytes"] <= psutil.virtual_memory().total
    assert Path(facts["temporary_folder"]).is_dir()
    assert facts["temporary_free_bytes"] > 0
    assert 0 < machine.repls_that_fit(facts) <= facts["max_open_files"]


@pytest.mark.parametrize(
    ("files", "versions"),
    [
        ([], None),
        (["cgroup.controllers"], "2"),
        (["memory/cgroup.procs"], "1"),
        (["memory/cgroup.procs", "unified/cgroup.procs"], "1 and 2"),
    ],
)
def test_mounted_control_groups_are_named_by_version(files: list[str], versions: str | None, tmp_path: Path) -> None:
    for name in files:
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert machine.offered(tmp_path)["control_groups"] == versions


def test_unknown_facts_are_said_to_be_unknown() -> None:
    facts = machine.offered() | {
        "memory_available_bytes": None,
        "temporary_folder": None,
        "control_groups": None,
        "memory_bytes": 512 << 20,
    }
    text = machine.described(facts)
    assert "memory: 512 MiB\n" in text
    assert "temporary folder: none that can be written to" in text
    assert "control groups: none" in text
