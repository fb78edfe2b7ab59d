import json
from pathlib import Path

import psutil

from rlm_broker.cli import doctor
from rlm_broker.sandbox.workers.canary import ATTEMPTS
from tests.support.command import run


def test_it_reports_every_layer_and_every_attempt_of_both_levels() -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    keys = {
        "auto",
        "levels",
        "exact_memory",
        "control_groups",
        "repls_that_fit",
        "repl_bounds",
        "maps_texts",
        "machine",
    }
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


def test_machine_has_facts_that_fit_each_other() -> None:
    facts = doctor.machine_facts()
    assert 1 <= facts["cpus"] <= (psutil.cpu_count() or 1)
    assert 0 < facts["memory_available_bytes"] <= psutil.virtual_memory().total
    assert facts["memory_bytes"] <= psutil.virtual_memory().total
    assert Path(facts["temporary_folder"]).is_dir()
    assert facts["temporary_free_bytes"] > 0
    assert 0 < doctor.repls_that_fit(facts) <= facts["max_open_files"]


def test_lowest_bound_of_the_number_of_repls_comes_first_with_its_sysctl(tmp_path: Path) -> None:
    for name, text in {
        "kernel/pid_max": "32768\n",
        "net/ipv4/ip_local_port_range": "32768\t60999\n",
        "user/max_mnt_namespaces": "900\n",
    }.items():
        (file := tmp_path / "proc/sys" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/pids.max").write_text("max\n")
    facts = doctor.machine_facts(tmp_path) | {"max_open_files": 20_000, "memory_available_bytes": None}
    facts["kernel_limits"]["ulimit -u"] = None
    assert doctor.repl_bounds(facts) == {
        "user.max_mnt_namespaces": {"value": 900, "repls": 900},
        "ulimit -n": {"value": 20_000, "repls": 5_000},
        "kernel.pid_max": {"value": 32_768, "repls": 16_384},
        "net.ipv4.ip_local_port_range": {"value": 28_232, "repls": 28_232},
    }
    assert "900 by user.max_mnt_namespaces = 900\n" in doctor.described(facts)


MOUNTED = {
    "": None,
    "cgroup.controllers": "2",
    "memory/cgroup.procs": "1",
    "memory/cgroup.procs unified/cgroup.procs": "1 and 2",
}


def test_mounted_control_groups_are_named_by_version(tmp_path: Path) -> None:
    for number, (names, versions) in enumerate(MOUNTED.items()):
        for name in names.split():
            path = tmp_path / f"{number}/sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        assert doctor.machine_facts(tmp_path / f"{number}")["control_groups"] == versions


def test_unknown_facts_are_said_to_be_unknown() -> None:
    unknown = dict.fromkeys(["memory_available_bytes", "temporary_folder", "control_groups"])
    text = doctor.described(doctor.machine_facts() | unknown | {"memory_bytes": 512 << 20})
    assert "memory: 512 MiB\n" in text
    assert "temporary folder: none that can be written to" in text
    assert "control groups: none" in text
