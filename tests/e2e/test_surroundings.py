"""The command line in surroundings that hosts give: `scripts.hosts.surroundings` makes each around a real process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlm_broker import Sandbox, SandboxFailed
from rlm_broker.cli.commands import DOCTOR
from rlm_broker.sandbox.workers.fork_server import ForkServer
from scripts.hosts.surroundings import CANNOT_BE_MADE, SURROUNDINGS
from tests.support.forked_python import python
from tests.support.launcher import needs_strict
from tests.support.places import PROJECT
from tests.support.tables import table

WAIT_S = 100
BROKER = [sys.executable, "-m", "rlm_broker"]
IN_PLACE = """
import os, runpy, sys, tempfile
from scripts.hosts import surroundings

def goes_on(_file, command):
    sys.argv = command[2:]
    tempfile.tempdir = None  # the folder that the process has found before
    runpy.run_module("rlm_broker", run_name="__main__", alter_sys=True)

os.execvp = goes_on
surroundings.main()
"""
"""Program that makes the surroundings and goes on as `BROKER`: imports in a new process would take most of the time."""


def run(names: str, *command: str, code: str = "") -> "subprocess.CompletedProcess[str]":
    """One command, with `code` as its input, within the surroundings `names`; skips the test where they cannot be made."""
    if os.getuid() != 0 and any(SURROUNDINGS[name].needs_root for name in names.split(",")):
        pytest.skip("only root can make this surrounding")
    program = ["-c", IN_PLACE] if command[: len(BROKER)] == (*BROKER,) else ["-m", "scripts.hosts.surroundings"]
    done = python(*program, names, *command, cwd=PROJECT, stdin=code, timeout=WAIT_S)
    if done.returncode == CANNOT_BE_MADE:
        pytest.skip(done.stderr.strip())
    assert "Traceback" not in done.stderr
    return done


def doctor(names: str) -> dict[str, Any]:
    """The report of `doctor`, whose exit code says the same as its `auto`."""
    done = run(names, *BROKER, "doctor", "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["auto"] else 4)
    for level in report["levels"].values():
        assert level["problem"] or all(level["refused"].values())
    return report


@needs_strict
@table(
    "names",
    [
        "no-sigchld,no-dev-zero,nohup,long-tmp",
        "odd-tmp,our-profile",
        "public-python,cap-five",
        "public-python,no-sys-admin",
        "public-python,ordinary-user",
    ],
)
def test_strict_works_within(names: str) -> None:
    report = doctor(names)
    assert report["auto"] == "strict", report["levels"]["strict"]["problem"]


@needs_strict
def test_strict_works_without_host_name_layer() -> None:
    strict = doctor("no-sethostname")["levels"]["strict"]
    assert strict["problem"] is None
    assert "host name" not in strict["layers"]
    assert "namespaces" in strict["layers"]


@needs_strict
@table("names", ["cap-drop-all", "cap-no-kill"])
def test_root_without_capabilities_gets_standard(names: str) -> None:
    """Its workers stay uid 0: one that became another user could be neither made nor killed."""
    report = doctor(f"public-python,{names}")
    assert report["auto"] == "standard", report["levels"]["standard"]["problem"]
    assert "own uid" not in report["levels"]["standard"]["layers"]
    strict = report["levels"]["strict"]
    assert strict["failed_layer"] == "other uid"
    assert "root lacks CAP_KILL" in strict["reason"]
    assert "`docker run --user 1000`" in strict["remedy"]


@table("names", ["cap-four", "cap-five"])
def test_standard_scratch_folder_is_always_removed(names: str) -> None:
    code = "import os\nos.mkdir('a', 0o700)\nos.mkdir('a/b', 0)\nopen('a/c', 'w').close()\nprint(os.getuid() > 0)"
    done = run(f"public-python,{names}", *BROKER, "exec", "--isolation", "standard", "-", code=code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{names == 'cap-five'}\n"


@needs_strict
@table(
    "names, layer, remedy",
    [
        ("docker-default", "namespaces", "docker run --security-opt seccomp=seccomp.json"),
        ("chroot", "private root", "in a chroot"),
        ("no-userns", "namespaces", "sysctl user.max_user_namespaces"),
    ],
)
def test_standard_works_where_strict_does_not(names: str, layer: str, remedy: str) -> None:
    """`standard` works in the surrounding, and `strict` names what would give it."""
    report = doctor(names)
    assert report["auto"] == "standard", report["levels"]["standard"]["problem"]
    strict = report["levels"]["strict"]
    if names == "docker-default" and os.getuid() == 0 and strict["failed_layer"] == "private root":
        layer = "private root"  # root goes on without a root of its own, as another user, who may not read this Python
    assert strict["failed_layer"] == layer
    assert remedy in strict["remedy"]


@table(
    "names, kind, sentence",
    [
        ("system-service", "isolation", "killed by SIGSYS"),
        ("system-service-eperm", "isolation", "landlock_create_ruleset: Operation not permitted"),
        ("no-landlock", "isolation", "landlock_create_ruleset: Function not implemented"),
        ("no-proc", "isolation", "`mount -t proc proc /proc`"),
        ("no-tmp", "sandbox", "no temporary folder can be written to"),
        ("latin-tmp", "configuration", r"/caf\xe9/"),
        ("af-unix", "sandbox", "no port can be opened on 127.0.0.1"),
        ("one-process", "sandbox", "raise the limit of processes"),
        ("two-processes", "sandbox", "raise the limit of processes"),
    ],
)
def test_auto_without_any_level_says_why(names: str, kind: str, sentence: str) -> None:
    report = doctor(names)
    assert report["auto"] is None
    assert report["levels"]["standard"]["kind"] == kind
    assert sentence in report["levels"]["standard"]["problem"]


def test_exec_without_level_exits_with_4() -> None:
    done = run("no-tmp", *BROKER, "exec", "-", code="print(1)")
    assert (done.returncode, done.stdout) == (4, "")
    assert len(done.stderr.splitlines()) == 1
    assert "--tmpfs /tmp" in done.stderr


@needs_strict
def test_auto_without_descriptors_finds_no_level() -> None:
    report = doctor("few-files")
    assert "Too many open files" in report["levels"]["strict"]["problem"]
    assert report["auto"] is None


@needs_strict
def test_doctor_and_auto_agree_on_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` goes on to a weaker level where a layer is missing, and not where the machine is short of something."""
    really_start = ForkServer.start

    async def start(self: ForkServer) -> None:
        if self.level.name == "strict":
            raise SandboxFailed("its fork server cannot start: Too many open files")
        await really_start(self)

    monkeypatch.setattr(ForkServer, "start", start)
    done = CliRunner().invoke(DOCTOR, ["--json"])
    report = json.loads(done.stdout)
    assert "Too many open files" in report["levels"]["strict"]["problem"]
    assert report["levels"]["standard"]["problem"] is None
    assert (report["auto"], done.exit_code) == (None, 4)
    with pytest.raises(SandboxFailed, match="Too many open files"), Sandbox():
        pass


@table("names, why", [("closed-home", "Permission denied"), ("no-home", "this user has no home")])
def test_unreadable_home_has_no_settings(names: str, why: str) -> None:
    """A home that cannot be read has no settings, and a line says so."""
    done = run(names, *BROKER, "exec", "-", code="print(6 * 7)")
    assert (done.returncode, done.stdout) == (0, "42\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: no settings are read from ")
    assert line.endswith(why)


def test_trust_without_home_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rlm-broker.toml").write_text("base_url = 'http://127.0.0.1:9'\n")
    tmp_path.chmod(0o755)
    program = f"import os, sys; os.chdir({str(tmp_path)!r}); os.execv({sys.executable!r}, {BROKER!r} + sys.argv[1:])"
    trusted = run("no-home", sys.executable, "-c", program, "config", "trust")
    assert trusted.returncode == 2
    assert "this user has no home: set HOME or XDG_STATE_HOME" in trusted.stderr
    shown = run("no-home", sys.executable, "-c", program, "config", "show")
    assert shown.returncode == 0
    assert "(not trusted, not used)" in shown.stdout
    assert "`rlm-broker config trust`" in shown.stderr
