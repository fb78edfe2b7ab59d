import sys
from pathlib import Path

import pytest

from rlm_broker.cli.spans import is_wanted, sent_spans
from rlm_broker.events.event import EventsMissed
from tests.support.command import ENVIRONMENT, run
from tests.support.otlp_receiver import OtlpReceiver

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text("18:00 db-2: no space left on device\n")
    return path


def test_ask_sends_spans_to_the_named_collector(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as collector:
        monkeypatch.setitem(ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setitem(ENVIRONMENT, "TRACEPARENT", f"00-{'ab' * 16}-{'cd' * 8}-01")
        done = run("ask", "-q", "Which line says space?", log)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert {"invoke_agent rlm_broker", "chat offline"} <= {span.name for span in collector.spans}
    assert b"space" not in collector.bodies
    (root,) = (span for span in collector.spans if span.name.startswith("invoke_agent"))
    assert (root.trace, root.parent) == ("ab" * 16, "cd" * 8)


WANTED: list[tuple[dict[str, str], bool]] = [
    ({}, False),
    (ENDPOINT, True),
    ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}, True),
    ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
    ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
    ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "console, otlp"}, True),
]


def test_opentelemetrys_variables_decide() -> None:
    assert [(variables, is_wanted(variables)) for variables, _ in WANTED] == WANTED


def test_what_prevents_spans_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables hold for all programs of a machine, so it is no error."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT["OTEL_EXPORTER_OTLP_ENDPOINT"])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.warns(match=r"^no spans are sent: the protocol 'grpc' is not supported"), sent_spans() as receiver:
        assert receiver is not None
    receiver(EventsMissed("1", 0, 1))  # a receiver like others, for example for `all_of`
    monkeypatch.setitem(sys.modules, "rlm_broker.watch.collector", None)
    with pytest.warns(match=r"not installed: pip install 'rlm-broker\[otel\]'$"), sent_spans() as receiver:
        assert receiver is None
