import pytest

from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.rlm import RLM
from rlm_broker.watch.collector import exporting
from tests.support.otlp_receiver import OtlpReceiver


def test_spans_are_sent_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with OtlpReceiver() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        with exporting(told.append, end_s=60) as receiver:
            RLM(ScriptedClient(["FINAL(a)"]), on_event=receiver).completion("c", "q")
    assert {span.name for span in collector.spans} == {"invoke_agent rlm_broker", "chat scripted"}
    assert set(collector.services) == {"rlm-broker"}
    assert told == []


def test_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        with exporting(print, end_s=60) as receiver:
            RLM(ScriptedClient(["FINAL(a)"]), on_event=receiver).completion("c", "q")
    assert set(collector.services) == {"mine"}


def test_silent_collector_holds_the_end_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that takes the request and never answers is left behind, before its own time limit of 600 s."""
    told: list[str] = []
    with OtlpReceiver(answers=False) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
        with exporting(told.append, end_s=0.2) as receiver:
            RLM(ScriptedClient(["FINAL(a)"]), on_event=receiver).completion("c", "q")
        assert collector.arrived.wait(60)
    assert told == ["spans were not sent: no answer of the OpenTelemetry collector within 0.2 s"]


def test_missing_collector_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    with OtlpReceiver() as collector:
        endpoint = collector.endpoint
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with exporting(told.append, end_s=60) as receiver:
        RLM(ScriptedClient(["FINAL(a)"]), on_event=receiver).completion("c", "q")
    assert told == ["2 spans were not sent: the OpenTelemetry collector did not take them"]
    assert capfd.readouterr().err == ""
