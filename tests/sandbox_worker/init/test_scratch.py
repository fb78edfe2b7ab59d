import os
from pathlib import Path

from sandbox_worker.init.files import Contents, contents
from tests.support.exchanges import exchanged

KIB = 1 << 10


def test_scratch_tree_is_counted_whole(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(bytes(256 * KIB))
    (tmp_path / "a" / "b" / "y").write_bytes(bytes(256 * KIB))
    found = contents(str(tmp_path), 100)
    assert found.files == 4
    assert 512 * KIB <= found.size_bytes <= 600 * KIB


def test_scratch_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/usr")
    assert contents(str(tmp_path), 100).files == 1


def test_scratch_count_stops_past_the_limit(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / str(number)).touch()
    assert contents(str(tmp_path), 10).files == 11
    assert contents(str(tmp_path), 50).files == 50


def test_unreadable_scratch_folder_is_counted(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "x").touch()
    (tmp_path / "closed").chmod(0o300)
    assert contents(str(tmp_path), 100).files == 2


def test_scratch_folder_swapped_for_link_stays_inside(tmp_path: Path) -> None:
    """At another time it is looked at than it is entered: in between it may be exchanged."""
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    (scratch / "folder").mkdir(parents=True)
    outside.mkdir()
    (scratch / "folder" / "x").touch()
    (scratch / "folder").chmod(0)
    for number in range(50):
        (outside / str(number)).touch()
    outside.chmod(0o555)
    (scratch / "link").symlink_to(outside)
    with exchanged((scratch / "folder", scratch / "link")):
        counts = {contents(str(scratch), 1000).files for _ in range(3000)}
    assert counts <= {1, 2, 3}
    assert outside.stat().st_mode & 0o777 == 0o555


def test_scratch_tree_too_deep_is_too_many(tmp_path: Path) -> None:
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path)
        for _ in range(30):
            os.mkdir("d" * 200)  # noqa: PTH102 - no path could say it
            os.chdir("d" * 200)
    finally:
        os.fchdir(before)
        os.close(before)
    assert contents(str(tmp_path), 100) == Contents(contents(str(tmp_path), 100).size_bytes, 101)


def test_missing_scratch_folder_counts_zero(tmp_path: Path) -> None:
    assert contents(str(tmp_path / "gone"), 10) == Contents(0, 0)
