"""Frames: every cut of the stream, the exact limit, and garbage."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_broker.broker.transport.session import Session
from rlm_broker.errors import ProtocolViolation
from sandbox_worker.wire.errors import FrameTooLarge, FrameTruncated, MessageInvalid
from sandbox_worker.wire.frames import PREFIX, Beginning, FrameDecoder, Payload, encode_frame
from sandbox_worker.wire.messages import decode_from_worker
from tests.support.tables import table


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 30), min_size=1))
def test_payloads_survive_any_cuts(payloads: list[bytes], steps: list[int]) -> None:
    stream = b"".join(encode_frame(payload, 50) for payload in payloads)
    decoder, got, at = FrameDecoder(50), list[Payload](), 0
    for step in itertools.cycle(steps):
        got += decoder.feed(stream[at : at + step])
        at += step
        if at >= len(stream):
            break
    assert got == payloads
    decoder.finish()


def test_frame_limit_is_inclusive() -> None:
    """A frame of the limit's size is accepted, and one more byte is refused at its prefix, and not kept."""
    frame = encode_frame(b"x" * 1001, 1001)
    assert FrameDecoder(1001).feed(frame) == [b"x" * 1001]
    decoder = FrameDecoder(1000)
    for call in (
        lambda: encode_frame(b"x" * 1001, 1000),
        lambda: FrameDecoder(1000).feed(frame),
        lambda: decoder.feed(frame[:500]),
    ):
        with pytest.raises(FrameTooLarge, match="frame of 1,001 bytes, the limit is 1,000"):
            call()
    assert decoder.buffered_bytes == 0


def test_stream_ending_inside_a_frame_is_named() -> None:
    decoder = FrameDecoder(1000)
    decoder.feed(encode_frame(b"xyz", 1000)[:-1])
    with pytest.raises(FrameTruncated):
        decoder.finish()


BAD = {
    "invalid utf-8": b'{"type":"output","block":1,"stream":"stdout","text":"\xff"}',
    "invalid json": b'{"type":',
    "nested": b"[" * 100_000,
    "nested in a message": b'{"type":"query","prompts":' + b"[" * 100_000,
    "nan": b'{"type":"output","block":NaN,"stream":"stdout","text":""}',
    "lone surrogate": b'{"type":"output","block":1,"stream":"stdout","text":"\\ud800"}',
    "wrong type": b'{"type":"output","block":"1","stream":"stdout","text":""}',
    "unknown type": b'{"type":"exec"}',
    "unknown field": b'{"type":"ready","depth":0}',
    "the other direction": b'{"type":"execute","block":1,"code":""}',
}


@table("payload", BAD.values())
def test_invalid_message_is_one_named_error(payload: bytes) -> None:
    with pytest.raises(MessageInvalid):
        decode_from_worker(payload)


def test_garbage_raises_only_protocol_violations() -> None:
    rng = random.Random(20261120)
    for _ in range(3000):
        session = Session(max_frame_bytes=1 << 22)
        session.feed(encode_frame(rng.randbytes(rng.randrange(40)), 1000))
        with pytest.raises(ProtocolViolation):
            session.next_message()


@table("step_bytes", [1000, 1 << 16, (1 << 16) + 5, 1 << 20])
def test_large_payloads_between_small_ones_come_out_whole(step_bytes: int) -> None:
    payloads = [b"a", b"x" * 300_000, b"", b"yz" * 100_000, b"b" * (1 << 16), b"c"]
    stream = b"".join(encode_frame(payload, 1 << 20) for payload in payloads)
    decoder = FrameDecoder(1 << 20)
    cuts = [stream[i : i + step_bytes] for i in range(0, len(stream), step_bytes)]
    assert [payload for cut in cuts for payload in decoder.feed(cut)] == payloads
    assert decoder.pending == b""


def test_frames_before_an_oversized_prefix_come_out_first() -> None:
    decoder = FrameDecoder(1000)
    assert decoder.feed(encode_frame(b"a", 1000) + b"\xff\xff\xff\xff") == [b"a"]
    for more in (b"more", encode_frame(b"whole", 1000)):
        with pytest.raises(FrameTooLarge):
            decoder.feed(more)


def test_incomplete_frame_tells_its_sizes() -> None:
    decoder = FrameDecoder(max_frame_bytes=1000)
    assert (decoder.buffered_bytes, decoder.pending) == (0, b"")
    assert decoder.feed(b"\0\0") == []
    assert decoder.buffered_bytes == 2
    assert decoder.feed(b"\0\x64" + b"x" * 10) == FrameDecoder(1000).feed(PREFIX.pack(104) + b"x" * 96) == []
    assert (decoder.buffered_bytes, decoder.pending) == (14, b"\0\0\0\x64" + b"x" * 10)
    assert decoder.feed(b"x" * 90) == [b"x" * 100]
    assert (decoder.buffered_bytes, decoder.pending) == (0, b"")


@table("payload_bytes, kind", [((1 << 16) - 4, bytes), ((1 << 16) - 3, bytearray)])
def test_large_payload_is_not_copied(payload_bytes: int, kind: type) -> None:
    """A large payload is handed over in the buffer that collected it."""
    decoder = FrameDecoder(1 << 20)
    framed = encode_frame(b"x" * payload_bytes, 1 << 20)
    assert decoder.feed(framed[:100]) == []
    (payload,) = decoder.feed(framed[100:])
    assert (type(payload), len(payload)) == (kind, payload_bytes)


@table("step_bytes", [1000, 1 << 16, (1 << 16) + 5])
def test_payload_that_is_too_long_is_dropped_as_it_comes(step_bytes: int) -> None:
    """The beginning and the length of a payload that is too long come out; its neighbours are whole."""
    payloads = [b"a", b"long" * 200_000, b"b" * 300_000, b"long" + b"x" * 99_996, b"c"]
    stream = b"".join(encode_frame(payload, 1 << 20) for payload in payloads)
    decoder = FrameDecoder(1 << 20, lambda beginning: 100_000 if beginning.startswith(b"long") else 1 << 20)
    got, most_buffered = list[Payload](), 0
    for at in range(0, len(stream), step_bytes):
        got += decoder.feed(stream[at : at + step_bytes])
        if len(got) == 1:
            most_buffered = max(most_buffered, decoder.buffered_bytes)
    beginning = got.pop(1)
    assert isinstance(beginning, Beginning)
    assert (beginning, beginning.payload_bytes) == (b"long" * 32, 800_000)
    assert got == [payloads[0], *payloads[2:]]
    assert most_buffered <= step_bytes + (1 << 16)
    assert decoder.pending == b""
