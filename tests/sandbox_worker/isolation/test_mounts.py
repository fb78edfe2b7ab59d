"""The private root and the scratch folder, built for real in a mount namespace of the test's own."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sandbox_worker.isolation import mounts, namespaces, syscalls
from tests.support.forked_child import in_child
from tests.support.tables import table


@table(
    "paths, expected",
    [
        (["/a", "/a/b", "/ab"], ["/a", "/ab"]),
        (["/a/b/c", "/a/b"], ["/a/b"]),
        (["/a/", "/a"], ["/a"]),
        (["/b", "/a"], ["/b", "/a"]),
    ],
)
def test_only_outermost_paths_stay_in_order(paths: list[str], expected: list[str]) -> None:
    assert mounts.outermost(paths) == expected


def test_temporary_is_free_unless_needed(tmp_path: Path) -> None:
    """/tmp is free unless a needed path lies there, under any name."""
    assert mounts.temporary_is_free(["/usr/lib", "/tmpfoo"])
    assert not mounts.temporary_is_free(["/usr/lib", "/tmp/venv"])
    link = tmp_path / "link"
    link.symlink_to("/tmp/venv")
    assert not mounts.temporary_is_free([str(link)])


def in_private_root(
    new_root: Path,
    report: Callable[[], Any],
    readable: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    before: Callable[[], object] = lambda: None,
) -> Any:
    """Build a root in a child's namespaces, go there, and return what `report` returns."""
    new_root.mkdir(exist_ok=True)

    def build() -> Any:
        folder = namespaces.open_proc_self()
        namespaces.enter_user_namespace(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS, folder)
        os.close(folder)
        before()
        mounts.enter_private_root(
            str(new_root), [*map(str, readable)], [*map(str, hidden)], lambda target: syscalls.bind("/proc", target)
        )
        return report()

    return in_child(build)


def refusal(action: Callable[[], object]) -> str:
    """Name of the error number that `action` raises, or ""."""
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def made_in(folder: Path) -> str:
    """Refusal of a new file."""
    return refusal((folder / "new").touch)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like an installation below a private home: file, secret/file, and its neighbour."""
    home = tmp_path / "home"
    for path in (home / "python" / "secret", home / "python" / "sub", home / "private"):
        path.mkdir(parents=True)
        (path / "file").write_text("content")
    (home / "python" / "file").write_text("content")
    return home / "python"


def test_readable_path_is_mounted_without_neighbours(tmp_path: Path, folder: Path) -> None:
    """A readable path is there under its own name, and its neighbours are not."""

    found = in_private_root(tmp_path / "root", lambda: [(folder / "file").read_text(), names(folder.parent)], [folder])
    assert found == ["content", ["python"]]


def test_root_holds_only_the_system(tmp_path: Path) -> None:
    """The root holds the system and no other file of the host."""
    root, etc, dev = in_private_root(tmp_path / "root", lambda: [names(Path(name)) for name in ("/", "/etc", "/dev")])
    system = {"bin", "dev", "etc", "proc", "sbin", "tmp", "usr", "w"}
    assert {name for name in root if not name.startswith("lib")} <= system
    assert set(etc) <= {"ld.so.cache", "localtime", "mime.types", "fonts"}
    assert dev == ["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"]


def test_readable_mounts_cannot_be_written(tmp_path: Path, folder: Path) -> None:
    """All mounts are read-only, also those below a readable path."""
    places = [folder, folder / "sub", Path("/"), Path("/usr"), Path("/dev")]
    found = in_private_root(
        tmp_path / "root",
        lambda: [made_in(place) for place in places],
        [folder],
        before=lambda: syscalls.mount("tmpfs", str(folder / "sub"), "tmpfs"),
    )
    assert found == ["EROFS"] * 5


def test_devices_work_and_cannot_be_changed(tmp_path: Path) -> None:
    def report() -> list[object]:
        Path("/dev/null").write_text("x")
        with open("/dev/zero", "rb") as zero:
            zeros = len(zero.read(8))
        return [zeros, refusal(lambda: Path("/dev/null").chmod(0o600))]

    assert in_private_root(tmp_path / "root", report) == [8, "EROFS"]


def test_link_is_shown_with_its_target(tmp_path: Path, folder: Path) -> None:
    """A link is shown under its name and where it leads."""
    link = tmp_path / "link"
    link.symlink_to(folder)
    found = in_private_root(tmp_path / "root", lambda: [(at / "file").read_text() for at in (link, folder)], [link])
    assert found == ["content", "content"]


def test_hidden_folder_is_empty_by_every_name(tmp_path: Path, folder: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)

    def report() -> list[Any]:
        listed = [names(folder / "secret"), names(link / "secret")]
        return [*listed, made_in(folder / "secret"), (folder / "file").read_text()]

    hidden = [folder / "secret", folder.parent / "private", tmp_path / "missing"]
    assert in_private_root(tmp_path / "root", report, [link], hidden) == [[], [], "EROFS", "content"]


def test_hidden_parent_does_not_hide_readable_folder(tmp_path: Path, folder: Path) -> None:
    found = in_private_root(tmp_path / "root", (folder / "file").read_text, [folder], [folder.parent])
    assert found == "content"


def test_readable_path_covers_its_hidden_folder(tmp_path: Path, folder: Path) -> None:
    secret = folder / "secret"
    for name in ("deep/package/inner", "other"):
        (secret / name).mkdir(parents=True)
    for name in ("deep/package/module", "deep/beside", "other/module", "single"):
        (secret / name).write_text(name)

    def report() -> list[Any]:
        found = sorted(str(path.relative_to(secret)) for path in secret.rglob("*"))
        places = [secret, secret / "deep", secret / "deep" / "package", secret / "deep" / "package" / "inner"]
        return [found, [made_in(place) for place in places], (secret / "single").read_text()]

    readable = [folder, secret / "deep" / "package", secret / "single"]
    found = ["deep", "deep/package", "deep/package/inner", "deep/package/module", "single"]
    assert in_private_root(tmp_path / "root", report, readable, [secret]) == [found, ["EROFS"] * 4, "single"]


def test_link_to_a_file_stays_a_link(tmp_path: Path, folder: Path) -> None:
    link = tmp_path / "beside" / "python"
    link.parent.mkdir()
    link.symlink_to(folder / "file")

    def report() -> list[Any]:
        return [str(link.readlink()), link.read_text(), names(link.parent)]

    assert in_private_root(tmp_path / "root", report, [link]) == [str(folder / "file"), "content", ["python"]]


def test_file_cannot_be_hidden(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(AssertionError, match="is not a folder"):
        in_private_root(tmp_path / "root", list, [folder], [folder / "file"])


@table("path", ["/", "/proc/self", "/dev", "/sys", "relative", "/no/such/folder"])
def test_unusable_paths_are_refused_by_name(path: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"readable path '{path}'"):
        in_private_root(tmp_path / "root", list, [Path(path)])


def test_narrow_umask_admits_another_uid(tmp_path: Path, folder: Path) -> None:
    def report() -> list[int]:
        return [Path(name).stat().st_mode & 0o777 for name in ("/", "/etc", "/dev", str(folder.parent))]

    assert in_private_root(tmp_path / "root", report, [folder], before=lambda: os.umask(0o077)) == [0o755] * 4


def test_root_mounts_are_invisible_to_the_host(tmp_path: Path, folder: Path) -> None:
    before = Path("/proc/self/mounts").read_text()
    in_private_root(tmp_path / "root", list, [folder])
    assert Path("/proc/self/mounts").read_text() == before
    assert list((tmp_path / "root").iterdir()) == []


@table("also_temporary", [True, False])
def test_scratch_folder_is_bounded_with_shared_memory(tmp_path: Path, also_temporary: bool) -> None:
    mebibyte = bytes(1 << 20)

    def report() -> list[Any]:
        mounts.mount_scratch(4 << 20, 1000, also_temporary)
        results: list[Any] = [str(Path.cwd()), Path.cwd().stat().st_mode & 0o777]
        Path("a").write_bytes(2 * mebibyte)
        Path("/dev/shm/b").write_bytes(mebibyte)
        results.append(refusal(lambda: Path("c").write_bytes(2 * mebibyte)))
        Path("c").unlink()
        return [*results, *map(names, map(Path, ("/w", "/dev/shm", "/tmp"))), made_in(Path("/tmp"))]

    *results, shown, written = in_private_root(tmp_path / "root", report)
    assert results == ["/w", 0o700, "ENOSPC", ["a"], ["b"]]
    assert (shown, written) == ((["a"], "") if also_temporary else ([], "EROFS"))


def test_scratch_file_count_is_bounded(tmp_path: Path) -> None:
    def report() -> list[object]:
        mounts.mount_scratch(64 << 20, 100, also_temporary=False)
        for number in range(101):
            if reason := refusal(lambda number=number: Path(str(number)).touch()):  # type: ignore[misc]
                return [reason, number]
        return []

    assert in_private_root(tmp_path / "root", report) == ["ENOSPC", 100]
