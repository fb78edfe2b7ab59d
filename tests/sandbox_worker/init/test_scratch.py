from pathlib import Path

from sandbox_worker.init.scratch import Contents, contents

KIB = 1 << 10


def test_bytes_and_files_of_the_whole_tree_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(bytes(256 * KIB))
    (tmp_path / "a" / "b" / "y").write_bytes(bytes(256 * KIB))
    found = contents(str(tmp_path), 100)
    assert found.files == 4
    assert 512 * KIB <= found.size_bytes <= 600 * KIB


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/usr")
    assert contents(str(tmp_path), 100).files == 1


def test_it_stops_just_beyond_the_number_that_is_allowed(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / str(number)).touch()
    assert contents(str(tmp_path), 10).files == 11
    assert contents(str(tmp_path), 50).files == 50


def test_a_folder_that_was_closed_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "x").touch()
    (tmp_path / "closed").chmod(0o300)
    assert contents(str(tmp_path), 100).files == 2


def test_a_tree_too_deep_to_look_at_is_too_many_files(tmp_path: Path) -> None:
    import os

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


def test_a_folder_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    assert contents(str(tmp_path / "gone"), 10) == Contents(0, 0)
