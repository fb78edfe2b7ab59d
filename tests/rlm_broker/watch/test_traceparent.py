import pytest

from rlm_broker.watch.conventions import checked_traceparent, traceparent

GOOD = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_a_good_header_passes() -> None:
    assert checked_traceparent(GOOD) == GOOD
    assert checked_traceparent(f" {GOOD} ") == GOOD


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00",
        GOOD.upper(),
        GOOD.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-{'cd' * 8}-01",
        f"00-{'ab' * 16}-{'0' * 16}-01",
        f"{GOOD}\r\nx: y",
        f"{GOOD}-more",
    ],
)
def test_any_other_header_is_none(header: str | None) -> None:
    assert checked_traceparent(header) is None


def test_there_is_none_by_default() -> None:
    assert traceparent.get() is None
