import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ModelFailed
from rlm_broker.events.event import BlockEnded, CallEnded, RunEnded, RunStarted
from rlm_broker.limits import Limits
from rlm_broker.results import Block
from rlm_broker.rlm import RLM
from rlm_broker.serve import metrics as module
from rlm_broker.serve.metrics import GAUGES, Metrics
from rlm_broker.usage import Usage, UsageSummary
from tests.support.tables import table

OPEN = "application/openmetrics-text; version=1.0.0"


def samples(metrics: Metrics, accept: str = "") -> dict[str, float]:
    """Return each sample by its name and labels, as Prometheus' own parsers read them."""
    body, content_type = metrics.exposition(accept)
    parse: Callable[[str], Any] = parse_open if "openmetrics" in content_type else parse_text
    found = {}
    for family in parse(body.decode()):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@table("accept", ["", OPEN])
def test_runs_are_counted(accept: str) -> None:
    metrics = Metrics(["scripted"])
    code = "```repl\nprint(llm_query_batched(['one', 'two']), rlm_query('the child'))\n1 / 0\n```"
    replies = [code, "of one", "of two", "FINAL(below)", "FINAL(found)"]
    with RLM(ScriptedClient(replies, cost_per_call=0.5), limits=Limits(max_depth=2), on_event=metrics) as rlm:
        rlm.completion("c", "q")
        with pytest.raises(ModelFailed):
            rlm.completion("c", "q")
    found = samples(metrics, accept)
    assert found["rlm_broker_runs_total{model=scripted,outcome=answered}"] == 1
    assert found["rlm_broker_runs_total{model=scripted,outcome=provider}"] == 1
    assert found["rlm_broker_run_duration_seconds_count{model=scripted}"] == 2
    assert found["rlm_broker_child_runs_total{outcome=answered}"] == 1
    assert found["rlm_broker_turns_total{}"] == 3
    assert found["rlm_broker_blocks_total{status=error}"] == 1
    assert found["rlm_broker_block_duration_seconds_count{}"] == 1
    assert found["rlm_broker_calls_total{model=scripted,outcome=answered}"] == 5
    assert found["rlm_broker_calls_total{model=scripted,outcome=failed}"] == 1
    assert found["rlm_broker_tokens_total{kind=input,model=scripted}"] > 0
    assert found["rlm_broker_tokens_total{kind=output,model=scripted}"] > 0
    assert found["rlm_broker_usd_total{model=scripted}"] == 2.5


def test_requests_are_counted_by_route() -> None:
    metrics = Metrics()
    metrics.request("/v1/files/{id}", 200, 0.02)
    metrics.request("/v1/files/{id}", 404, 0.01)
    metrics.request("/v1/files/{id}", 99_999, -1)
    found = samples(metrics)
    assert found["rlm_broker_http_requests_total{route=/v1/files/{id},status=200}"] == 1
    assert found["rlm_broker_http_requests_total{route=/v1/files/{id},status=404}"] == 1
    assert found["rlm_broker_http_requests_total{route=/v1/files/{id},status=other}"] == 1
    assert found["rlm_broker_http_request_duration_seconds_count{route=/v1/files/{id}}"] == 3


def test_gauges_are_read_at_each_scrape() -> None:
    waiting = [3.0, 5.0]
    metrics = Metrics(gauges={"queued_runs": lambda: waiting.pop(0), "live_repls": lambda: 1 / 0})
    assert samples(metrics)["rlm_broker_queued_runs{}"] == 3
    found = samples(metrics)
    assert found["rlm_broker_queued_runs{}"] == 5
    assert not any("live_repls" in name or "containers" in name for name in found)
    assert sum(value == 7 for value in samples(Metrics(gauges=dict.fromkeys(GAUGES, lambda: 7))).values()) == 6


def test_answer_from_memory_is_an_outcome_of_its_own() -> None:
    metrics = Metrics(["m"])
    metrics(CallEnded("1", 1, 1, "m", Usage(total_cost=0.0), 0.0, "a", is_remembered=True))
    found = samples(metrics)
    assert found["rlm_broker_calls_total{model=m,outcome=remembered}"] == 1
    assert found["rlm_broker_usd_total{model=m}"] == 0


def test_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of others become no labels: they would cost memory for ever."""
    monkeypatch.setattr(module, "MOST_ROUTES", 3)
    metrics = Metrics({"known"})
    before = len(samples(metrics))
    for number in range(50):
        name = f'made up {number}"\n'
        metrics(RunStarted("1", 0, "q", name, {}, tree=name))
        metrics(CallEnded("1", 0, number, name, Usage(1, 2, 3), 1.0, "a", tree=name))
        metrics(BlockEnded("1", 0, 1, Block("", name), tree=name))  # type: ignore[arg-type]
        metrics(RunEnded("1", 0, "a", None, 1, 1.0, UsageSummary(), kind=name, tree=name))
        metrics.request(name, 200, 1.0)
    found = samples(metrics)
    assert found["rlm_broker_runs_total{model=other,outcome=other}"] == 50
    assert found["rlm_broker_calls_total{model=other,outcome=answered}"] == 50
    assert found["rlm_broker_blocks_total{status=other}"] == 50
    assert found["rlm_broker_http_requests_total{route=other,status=200}"] == 47
    assert len(found) - before < 200


def test_models_of_runs_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TREES", 3)
    metrics = Metrics(["m"])
    for number in range(10):
        metrics(RunStarted("1", 0, "q", "m", {}, tree=str(number)))
    for number in range(10):
        metrics(RunEnded("1", 0, "a", None, 1, 1.0, UsageSummary(), tree=str(number)))
    found = samples(metrics)
    assert found["rlm_broker_runs_total{model=m,outcome=answered}"] == 3
    assert found["rlm_broker_runs_total{model=other,outcome=answered}"] == 7
    assert not metrics._trees


def test_scraper_chooses_the_format() -> None:
    text, open_metrics = "text/plain; version=0.0.4; charset=utf-8", f"{OPEN}; charset=utf-8"
    for accept, kind in (
        ("", text),
        ("*/*", text),
        ("text/plain; version=nonsense", text),
        (f"{OPEN},text/plain;q=0.5", open_metrics),
        ("application/openmetrics-text; version=9; x=<y>", open_metrics),
    ):
        body, content_type = Metrics().exposition(accept)
        assert content_type.startswith(kind)
        assert "x=" not in content_type
        assert body.endswith(b"# EOF\n") == (kind == open_metrics)
    assert not any(family.name.startswith("rlm_broker") for family in REGISTRY.collect())  # of the whole process


def test_threads_may_count_at_the_same_time() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(500):
            metrics.request("/", 200, 0.1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert samples(metrics)["rlm_broker_http_requests_total{route=/,status=200}"] == 2_000
