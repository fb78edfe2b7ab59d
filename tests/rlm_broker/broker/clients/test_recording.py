"""Recordings: a recorded call is found again, and another call is told apart."""

from pathlib import Path

import pytest

from rlm_broker.broker.clients.base import CallId, LMRequest
from rlm_broker.broker.clients.recording import (
    Counted,
    Failure,
    Recorded,
    RecordedClient,
    RecordedModels,
    Recorder,
    Recording,
    Request,
    recorded_request,
)
from rlm_broker.errors import ConfigurationError, ModelFailed, ReplayDiverged
from rlm_broker.events.redaction import LONGEST_CHARS
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage

MODELS = RecordedModels(1, "root", "sub", ["other"])


def asked(text: str, depth: int = 0) -> Request:
    return Request([{"role": "user", "content": text}], depth=depth)


def written(tmp_path: Path, *calls: Recorded) -> Recording:
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, MODELS)
    for call in calls:
        recorder.add(call)
    recorder.close()
    return Recording(path)


def test_recorded_call_is_replayed_unchanged(tmp_path: Path) -> None:
    calls = [
        Recorded(CallId("1", 0, 1), asked("a"), "root", "reply \u2028", used=Counted(3, 2, 0.5)),
        Recorded(CallId("1", 1, 1), asked("b", depth=1), "sub", failure=Failure("no", "request")),
        Recorded(CallId("1.1", 0, 1), asked("c"), "root", problem="no text"),
    ]
    recording = written(tmp_path, *calls)
    assert recording.models == MODELS
    assert [recording.find(call.request) for call in calls] == calls
    assert recording.find(asked("a", depth=1)) is None
    assert recording.path.stat().st_mode & 0o77 == 0


def test_half_a_character_is_recorded_and_found_again(tmp_path: Path) -> None:
    recording = written(tmp_path, Recorded(CallId("1", 0, 1), asked("a\ud800"), "root", "b\udfff"))
    found = recording.find(asked("a\ud800"))
    assert found is not None
    assert (found.text, found.request) == ("b\udfff", asked("a\ud800"))


def test_equal_requests_get_replies_in_order(tmp_path: Path) -> None:
    calls = [Recorded(CallId("1", n, 1), asked("same"), "root", f"reply {n}") for n in range(3)]
    recording = written(tmp_path, *calls)
    texts = [call.text for _ in range(4) if (call := recording.find(asked("same")))]
    assert texts == ["reply 0", "reply 1", "reply 2", "reply 2"]


async def test_diverged_run_says_how_in_each_call(tmp_path: Path) -> None:
    lines = "\n".join(f"line {number}" for number in range(50))
    recording = written(
        tmp_path,
        Recorded(CallId("1", 0, 1), asked("something else"), "root", "x"),
        Recorded(CallId("1", 2, 1), asked(f"{lines}\nthe end"), "root", "y"),
    )
    root, sub = RecordedClient(recording, "root"), RecordedClient(recording, "sub")
    request = LMRequest((ChatMessage("user", f"{lines}\nanother end"),), id=CallId("1", 2, 2))
    with pytest.raises(ReplayDiverged) as first:
        await root.complete(request)
    said = str(first.value)
    assert said.startswith(f"{recording.path} has no reply to this call of the run (run 1, block 2, call 2)")
    assert "the nearest recorded is run 1, block 2, call 1" in said
    assert "-the end" in said
    assert "+another end" in said
    assert len(said.splitlines()) < 12
    known = LMRequest((ChatMessage("user", "something else"),))
    with pytest.raises(ReplayDiverged) as later:
        await sub.complete(known)
    assert str(later.value) == said


async def test_replayed_call_is_free_and_names_its_model(tmp_path: Path) -> None:
    call = Recorded(CallId("1", 0, 1), asked("a"), "a fallback", "text", used=Counted(100, 10, 3.0))
    failed = Recorded(CallId("1", 0, 2), asked("b"), "root", failure=Failure("down", "transient"))
    client = RecordedClient(written(tmp_path, call, failed), "root")
    texts: list[str] = []
    reply = await client.complete(LMRequest((ChatMessage("user", "a"),), on_text=texts.append))
    assert (reply.text, reply.model, texts) == ("text", "a fallback", ["text"])
    assert reply.usage == Usage(1, 0, 0, 0.0, stored_calls=1)
    with pytest.raises(ModelFailed, match=r"^down$") as down:
        await client.complete(LMRequest((ChatMessage("user", "b"),)))
    assert down.value.cause == "provider", "a recorded failure is not tried again"


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="exists: remove it, or record to another file"):
        Recorder(path, MODELS)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigurationError, match="cannot record to"):
        Recorder(tmp_path / "missing" / "run.jsonl", MODELS)


def test_invalid_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the recording"):
        Recording(tmp_path / "file")
    head = b'{"rlm_broker_recording": 1, "root": "x"}\n'
    others = [b"", b"{}", b'{"event": "run_started"}', head + b'{"id": 1}\n', head + b"\xff\n", b"[" * 100_000]
    for content, why in (
        *((each, "is not a recording") for each in others),
        (b'{"rlm_broker_recording": 99, "root": "x"}', "another version"),
    ):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ConfigurationError, match=why):
            Recording(tmp_path / "file")


def test_a_recording_of_nothing_has_no_nearest(tmp_path: Path) -> None:
    assert "holds no calls" in written(tmp_path).difference(asked("x"), CallId("1", 0, 1))


def test_half_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    recording = written(tmp_path, Recorded(CallId("1", 0, 1), asked("a"), "root", "x"))
    with recording.path.open("a") as file:
        file.write('{"id": {"run": "1", "bl')
    found = Recording(recording.path).find(asked("a"))
    assert found is not None
    assert found.text == "x"


def test_late_addition_reaches_no_other_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl", MODELS)
    recorder.close()
    with (tmp_path / "other").open("w") as other:  # it gets the number of the one that was closed
        recorder.add(Recorded(CallId("1", 0, 1), asked("a"), "root", "x"))
        assert other.tell() == 0
    assert (tmp_path / "other").read_text() == ""


async def test_requests_of_different_temperature_are_told_apart(tmp_path: Path) -> None:
    messages = (ChatMessage("user", "a"),)
    requests = [LMRequest(messages, temperature=temperature) for temperature in (None, 0, 0.5)]
    calls = [
        Recorded(CallId("1", n, 1), recorded_request(request), "root", f"reply {n}")
        for n, request in enumerate(requests)
    ]
    recording = written(tmp_path, *calls)
    client = RecordedClient(recording, "root")
    assert [(await client.complete(request)).text for request in requests] == ["reply 0", "reply 1", "reply 2"]
    assert [b"temperature" in line for line in recording.path.read_bytes().splitlines()[1:]] == [False, True, True]
    with pytest.raises(ReplayDiverged, match=r"temperature: 1\.0"):
        await client.complete(LMRequest(messages, temperature=1))


SECRET = "AKIAIOSFODNN7EXAMPLE"


def test_long_reply_is_recorded_without_its_middle(tmp_path: Path) -> None:
    long = "a" * LONGEST_CHARS + "b"
    recording = written(tmp_path, Recorded(CallId("1", 0, 1), asked(long), "root", long))
    found = recording.find(asked(long))
    assert found is not None
    assert found.text.endswith("ab")
    assert "... [1 characters cut] ..." in found.text


def test_secret_is_not_recorded_and_its_call_found(tmp_path: Path) -> None:
    with_it = Request(
        [
            {"role": "system", "content": f"the key is {SECRET}"},
            {"role": "user", "content": [{"type": "text", "text": f"use {SECRET}"}]},
        ]
    )
    recording = written(
        tmp_path,
        Recorded(CallId("1", 0, 1), with_it, "root", f"with {SECRET}", problem=f"p {SECRET}"),
        Recorded(CallId("1", 0, 2), asked("b"), "root", failure=Failure(f"f {SECRET}", "request")),
    )
    assert SECRET not in recording.path.read_text()
    found = recording.find(with_it)
    assert found is not None
    assert (found.text, found.problem) == ("with [redacted]", "p [redacted]")
    assert recording.find(found.request) == found
    failed = recording.find(asked("b"))
    assert failed is not None
    assert failed.failure == Failure("f [redacted]", "request")
    assert SECRET not in recording.difference(asked(f"another with {SECRET}"), CallId("1", 0, 1))
