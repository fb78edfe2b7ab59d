import warnings

import pytest

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.rlm import RLM
from rlm_broker.watch.collector import exported_spans
from tests.support.otlp_receiver import OtlpReceiver


def _sent(endpoint: str, end_s: float = 60) -> list[str]:
    """Lines that a user reads while the spans of a run go to a collector."""
    with pytest.MonkeyPatch.context() as environment, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with exported_spans(end_s) as receiver:
            RLM(ScriptedClient(["FINAL(a)"]), on_event=receiver).completion("c", "q")
    return [str(each.message) for each in told if "spans" in str(each.message)]


def test_spans_are_sent_before_the_end_and_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as collector:
        assert _sent(collector.endpoint) == []
        assert {span.name for span in collector.spans} == {"invoke_agent rlm_broker", "chat scripted"}
        assert set(collector.services) == {"rlm-broker"}
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        _sent(collector.endpoint)
        assert set(collector.services) == {"rlm-broker", "mine"}


def test_silent_collector_holds_the_end_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that takes the request and never answers is left behind, before its own time limit of 600 s."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with OtlpReceiver(answers=False) as collector:
        told = _sent(collector.endpoint, 0.2)
        assert collector.arrived.wait(60)
    assert told == ["spans were not sent: no answer of the OpenTelemetry collector within 0.2 s"]


def test_missing_collector_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with OtlpReceiver() as collector:
        endpoint = collector.endpoint
    assert _sent(endpoint) == ["2 spans were not sent: the OpenTelemetry collector did not take them"]
    assert capfd.readouterr().err == ""
