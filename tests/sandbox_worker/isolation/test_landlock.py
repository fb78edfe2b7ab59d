"""Landlock domains: what they grant, and that they nest."""

import errno
import os
import signal
import struct
from pathlib import Path

import pytest

from sandbox_worker.isolation import landlock, syscalls
from sandbox_worker.isolation.landlock import CHANGE, EXECUTE, READ, READ_FILE, TRUNCATE, WRITE_FILE, Grant
from tests.support.forked_child import in_child


def _abi() -> int:
    try:
        return landlock.abi()
    except OSError:
        return 0


ABI = _abi()
needs_landlock = pytest.mark.skipif(ABI < 1, reason="this kernel has no Landlock")


def restrict(*grants: Grant) -> None:
    """Enter a domain as an ordinary process."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    landlock.restrict(landlock.make_ruleset(grants, ABI), ABI)


def refused(path: Path, flags: int) -> str:
    """Name of the error number of opening `path`, or ""."""
    try:
        os.close(os.open(path, flags, 0o600))
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def test_ruleset_governs_all_of_its_abi() -> None:
    """A ruleset governs exactly the rights that the ABI knows."""
    of_abi = [[0x1FFF], [0x3FFF], [0x7FFF], [0x7FFF, 3], [0xFFFF, 3], [0xFFFF, 3, 3], [0xFFFF, 3, 3]]
    expected = [struct.pack(f"={len(attributes)}Q", *attributes) for attributes in of_abi]
    assert list(map(landlock.ruleset_attributes, range(1, 8))) == expected


@needs_landlock
def test_ungranted_paths_cannot_be_opened(tmp_path: Path) -> None:
    for name in ("readable", "writable", "secret"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)

    def attempts() -> list[str]:
        restrict(Grant(str(tmp_path / "readable"), READ), Grant(str(tmp_path / "writable"), READ | CHANGE))
        return [
            refused(tmp_path / "readable" / "file", os.O_RDONLY),
            refused(tmp_path / "readable" / "file", os.O_WRONLY),
            refused(tmp_path / "readable" / "new", os.O_CREAT | os.O_WRONLY),
            refused(tmp_path / "writable" / "file", os.O_RDWR | os.O_TRUNC),
            refused(tmp_path / "writable" / "new", os.O_CREAT | os.O_WRONLY),
            refused(tmp_path / "secret" / "file", os.O_RDONLY),
            refused(tmp_path / "secret", os.O_RDONLY),
        ]

    assert in_child(attempts) == ["", "EACCES", "EACCES", "", "", "EACCES", "EACCES"]


@needs_landlock
def test_file_rule_omits_folder_rights() -> None:
    def attempts() -> list[str]:
        restrict(Grant("/dev/null", READ_FILE | WRITE_FILE | TRUNCATE | READ | CHANGE))
        return [refused(Path("/dev/null"), os.O_RDWR), refused(Path("/dev/zero"), os.O_RDONLY)]

    assert in_child(attempts) == ["", "EACCES"]


@needs_landlock
def test_domain_within_a_domain_only_narrows(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    def attempts() -> list[str]:
        restrict(Grant(str(tmp_path), READ))
        restrict(Grant("/", READ | CHANGE | EXECUTE))
        return [
            refused(tmp_path / "file", os.O_RDONLY),
            refused(tmp_path / "file", os.O_WRONLY),
            refused(Path("/"), os.O_RDONLY),
        ]

    assert in_child(attempts) == ["", "EACCES", "EACCES"]


@needs_landlock
def test_execution_is_granted_by_itself() -> None:
    def start(rights: int) -> str:
        restrict(Grant("/", rights))
        try:
            os.execv("/bin/true", ["true"])
        except OSError as error:
            return errno.errorcode[error.errno or 0]

    assert in_child(lambda: start(READ)) == "EACCES"


@needs_landlock
def test_granted_path_must_exist(tmp_path: Path) -> None:
    def attempt() -> str:
        with pytest.raises(FileNotFoundError) as caught:
            restrict(Grant(str(tmp_path / "missing"), READ))
        return str(caught.value.filename)

    assert in_child(attempt) == str(tmp_path / "missing")


@pytest.mark.skipif(ABI < 6, reason="signals are governed from Landlock ABI 6 on")
def test_signals_stay_within_the_domain() -> None:
    outside = os.getpid()

    def attempt() -> str:
        restrict(Grant("/", READ))
        with pytest.raises(PermissionError):
            os.kill(outside, signal.SIGCONT)
        return "refused"

    assert in_child(attempt) == "refused"
