import time

from hypothesis import given
from hypothesis import strategies as st

from sandbox_worker.wire.headtail import PIECE, HeadTail, OutputBounds

PIECES = st.lists(st.text("ab\N{GREEK SMALL LETTER ALPHA}\n", max_size=30), max_size=30)
LIMITS = st.integers(0, 40)


def bytes_at_most(limit: int) -> OutputBounds:
    return OutputBounds(max_output_bytes=limit)


def through(pieces: list[str], limit: int) -> str:
    kept = HeadTail[str](bytes_at_most(limit), "")
    head = "".join(kept.add(piece) for piece in pieces)
    return head + kept.finish()


def cut(text: str, limit: int) -> str:
    """The same at once, for a text that is there as a whole."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    return f"{text[: limit - tail]}\n... [{len(text) - limit:,} more cut] ...\n{text[len(text) - tail :]}"


@given(PIECES, LIMITS)
def test_however_it_comes_the_same_is_kept(pieces: list[str], limit: int) -> None:
    assert through(pieces, limit) == cut("".join(pieces), limit)


@given(PIECES, LIMITS)
def test_bytes_are_kept_like_text(pieces: list[str], limit: int) -> None:
    whole = "".join(pieces).encode()
    kept = HeadTail[bytes](bytes_at_most(limit), b"")
    head = b"".join(kept.add(piece.encode()) for piece in pieces)
    assert head + kept.finish() == cut(whole.decode("latin-1"), limit).encode("latin-1")


@given(PIECES, LIMITS)
def test_the_head_is_passed_on_at_once_and_never_more_than_its_half(pieces: list[str], limit: int) -> None:
    kept = HeadTail[str](bytes_at_most(limit), "")
    seen = ""
    for number, piece in enumerate(pieces, 1):
        seen += kept.add(piece)
        assert seen == "".join(pieces[:number])[: limit - limit // 2]


def test_a_flood_is_not_collected() -> None:
    kept = HeadTail[str](bytes_at_most(1000), "")
    for _ in range(2000):
        kept.add("x" * 100)
        assert sum(map(len, kept._pieces)) + kept._small_length <= 1000 + 2 * PIECE
    assert "[199,000 more cut]" in kept.finish()


def test_adding_costs_the_same_however_much_is_kept() -> None:
    def add(limit: int) -> tuple[float, HeadTail[str]]:
        kept = HeadTail[str](bytes_at_most(limit), "")
        started = time.process_time()
        for _ in range(60_000):
            kept.add("a line of forty characters or so it is\n")
        return time.process_time() - started, kept

    (little_s, _), (much_s, kept) = add(2 << 10), add(2 << 20)
    assert much_s < 20 * little_s, "a copy of the tail for each would be hundreds of times as much"
    assert len(kept._pieces) + len(kept._small) < 1000
