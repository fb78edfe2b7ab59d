"""Memory that a node has left: of the machine, and of each group around it."""

from pathlib import Path

import psutil
import pytest

from rlm_broker.cluster.agent.load import LEAST_RESERVE_BYTES, free_bytes, own_groups, reserve_bytes

MB = 1 << 20


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_the_tightest_group_decides(tmp_path: Path) -> None:
    """Files that the kernel can drop count as free; a group without a limit does not count."""
    outer = group(tmp_path, memory__max=f"{100 * MB}\n", memory__current=f"{90 * MB}\n")
    (outer / "memory.stat").write_text(f"anon 5\ninactive_file {30 * MB}\n")
    inner = group(tmp_path / "inner", memory__max="max\n", memory__current=f"{99 * MB}\n")
    assert free_bytes((inner, outer)) == 40 * MB
    old = group(tmp_path / "old", memory__limit_in_bytes=f"{50 * MB}", memory__usage_in_bytes=f"{60 * MB}")
    assert free_bytes((inner, outer, old)) == 0


def test_without_groups_the_machine_decides() -> None:
    assert 0 < free_bytes(()) <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0::/a/b\n", ["a/b", "a", ""]),
        ("0::/\n", [""]),
        ("5:cpu:/x\n7:memory:/m\n0::/\n", ["memory/m", "memory", ""]),
        ("", []),
    ],
)
def test_groups_around_a_process(tmp_path: Path, text: str, wanted: list[str]) -> None:
    """Each group on the way to the root may have a limit."""
    cgroup = tmp_path / "cgroup"
    cgroup.write_text(text)
    root = tmp_path / "fs"
    assert own_groups(cgroup, root) == tuple(root / path for path in wanted)


def test_own_groups_can_be_read() -> None:
    assert free_bytes(own_groups()) >= 0


def test_a_share_of_the_memory_stays_free() -> None:
    assert reserve_bytes(100 << 30) == 5 << 30
    assert reserve_bytes(1 << 30) == LEAST_RESERVE_BYTES
