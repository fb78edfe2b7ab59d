"""Amounts with units: sizes and times."""

from rlm_broker.values.units import amount, in_bytes, in_seconds

SIZES = {
    **{"64MB": 64 << 20, "64MiB": 64 << 20, "64m": 64 << 20, "1.5GB": 3 << 29, "2k": 2048, "1 TiB": 1 << 40},
    **{"512B": 512, "0.3k": 307, "1.1GB": 1_181_116_006},
    **dict.fromkeys(["", "64", "MB", "-1MB", "1e3MB", "64XB", "64MBB", "1,5GB", "1.GB", "64iB", "٣MB"]),
}
TIMES = {
    **{"10m": 600, "90s": 90, "1h30m": 5400, "250ms": 0.25, "1.5h": 5400, "1d": 86400, "1h 30m": 5400},
    **dict.fromkeys(["", " ", "10", "m", "-10m", "30m1h", "10m5m", "1h30", "10min", "1y"]),
}
AMOUNTS: dict[tuple[str, object], object] = {
    ("memory_bytes", " 1MB "): 1 << 20,
    ("memory_bytes", "10m"): 10 << 20,
    ("run_timeout_s", "10m"): 600,
    ("run_timeout_s", "64MB"): "64MB",
    ("max_tokens", "10k"): "10k",
    ("memory_bytes", 5): 5,
    ("memory_bytes", None): None,
    ("memory_bytes", "9" * 50 + "k"): "9" * 50 + "k",
}


def test_text_is_an_amount_or_none() -> None:
    assert {text: in_bytes(text) for text in SIZES} == SIZES
    assert {text: in_seconds(text) for text in TIMES} == TIMES


def test_name_of_an_amount_says_its_unit() -> None:
    assert {given: amount(*given) for given in AMOUNTS} == AMOUNTS
