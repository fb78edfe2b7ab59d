import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlm_broker.errors import SandboxFailed
from rlm_broker.sandbox.workers import private_folder
from rlm_broker.sandbox.workers.private_folder import LOCK, PREFIX, PrivateFolder, remove_tree

LEFT_BEHIND = "import os\nfrom rlm_broker.sandbox.workers.private_folder import PrivateFolder\nPrivateFolder()\nos.kill(os.getpid(), 9)"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_private_folder_is_created_and_removed(temporary: Path) -> None:
    folder = PrivateFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o711
    folder.remove()
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_stale_folder_is_swept_and_used_kept(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder of a killed owner is swept by the next, and a folder in use is not. The number is logged."""
    caplog.set_level("INFO", "rlm_broker")
    mine = PrivateFolder()
    environment = {"TMPDIR": str(temporary), "PYTHONPATH": str(Path.cwd())}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", LEFT_BEHIND], env=environment, check=False)
    assert len(list(temporary.iterdir())) == 2  # the second one has swept the first
    (temporary / f"{PREFIX}b").mkdir()
    (temporary / f"{PREFIX}b" / LOCK).touch()
    assert caplog.messages == []
    PrivateFolder().remove()
    assert list(temporary.iterdir()) == [mine.path]
    assert caplog.messages == [f"folders of processes that were killed were removed from {temporary}: 2"]
    mine.remove()


def test_folder_swept_before_its_lock_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = fcntl.flock, list[int]()

    def sweep_first(lock: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not swept:
            swept.append(lock)
            private_folder._sweep()
        real(lock, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    folder = PrivateFolder()
    assert swept
    assert os.fstat(folder._lock).st_nlink
    assert (folder.path / LOCK).exists()
    folder.remove()


def test_links_and_folders_of_others_are_not_swept(temporary: Path) -> None:
    """A folder without a lock is one of similar name."""
    target = temporary / "target"
    left = [target, temporary / f"{PREFIX}notes", temporary / f"{PREFIX}strange"]
    for folder in left:
        folder.mkdir()
        (folder / "precious").write_text("kept")
        if folder != left[1]:
            (folder / LOCK).touch()
    (temporary / f"{PREFIX}link").symlink_to(target)
    if os.geteuid() == 0:
        os.chown(left[2], 65534, 65534)
    else:
        left.pop()
    PrivateFolder().remove()
    assert [(folder / "precious").read_text() for folder in left] == ["kept"] * len(left)


def test_folder_is_removed_with_any_content(temporary: Path) -> None:
    """A folder is removed with anything that model code made in it."""
    outside = temporary / "outside"
    outside.mkdir(mode=0o500)
    made = temporary / "made"
    (made / "closed" / "inner").mkdir(parents=True)
    (made / "link").symlink_to(outside)
    (made / "closed").chmod(0)
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(made)
        for _ in range(1500):
            os.mkdir("deep")  # noqa: PTH102 - a path to it would be longer than the kernel accepts
            os.chdir("deep")
    finally:
        os.fchdir(before)
        os.close(before)
    assert remove_tree(made)
    assert remove_tree(made)
    assert outside.stat().st_mode & 0o777 == 0o500
    outside.chmod(0o700)


def test_missing_temporary_folder_tells_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(SandboxFailed, match=r"no temporary folder can be written to: .*set TMPDIR"):
        PrivateFolder()
