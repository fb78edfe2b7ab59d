"""The tables against the kernel's own headers, where they are installed."""

import re
from pathlib import Path

import pytest

from sandbox_worker.isolation.syscall_table import NUMBERS
from tests.support.tables import table

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
NO_CALLS = {"arch_specific_syscall", "syscalls", "sync_file_range2"}  # markers, and a variant that 64 bits do not use
ONLY_OF_32_BIT = range(403, 424)  # the calls with a 64-bit time, which have it everywhere else


def numbers_in(header: Path) -> dict[str, int]:
    """Names and numbers for a 64-bit machine. The generic header defines some by way of __NR3264_, and renames them."""
    text = header.read_text()
    numbers = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", text))
    by_width = dict(re.findall(r"#define __NR3264_(\w+)\s+(\d+)", text))
    of_64_bit = text.rpartition("#if __BITS_PER_LONG == 64")[2].partition("#else")[0]
    for name, target in re.findall(r"#define __NR_(\w+)\s+__NR3264_(\w+)", of_64_bit):
        if target in by_width:
            numbers[name] = by_width[target]
    return {
        name: int(number)
        for name, number in numbers.items()
        if name not in NO_CALLS and int(number) not in ONLY_OF_32_BIT
    }


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if not HEADERS[name].exists():
        pytest.skip(f"the kernel's headers for {name} are not installed ({HEADERS[name]})")
    return name


def test_header_names_have_their_numbers(machine: str) -> None:
    expected = numbers_in(HEADERS[machine])
    assert len(expected) > 250
    assert {name: NUMBERS[machine].get(name) for name in expected} == expected


def test_table_numbers_are_in_the_header(machine: str) -> None:
    expected = numbers_in(HEADERS[machine])
    ours = {name: number for name, number in NUMBERS[machine].items() if number <= max(expected.values())}
    newer_than_most_headers = {"uretprobe": 335, "uprobe": 336}
    assert ours.items() - newer_than_most_headers.items() <= expected.items()


@table("name", ["x86_64", "aarch64"])
def test_numbers_are_unique(name: str) -> None:
    assert len(set(NUMBERS[name].values())) == len(NUMBERS[name])


def test_architectures_agree_from_424_on() -> None:
    newer = [{name: number for name, number in table.items() if number >= 424} for table in NUMBERS.values()]
    assert newer[0] == newer[1]
    assert newer[0]["pidfd_send_signal"] == 424
    assert newer[0]["mseal"] == 462
    assert newer[0]["file_setattr"] == 469
    assert newer[0]["rseq_slice_yield"] == 471
