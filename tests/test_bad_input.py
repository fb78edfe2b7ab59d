"""Bad values of each argument of a public call: only errors of this package or documented ones of Python come out."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlm_broker import (
    RLM,
    Budget,
    Cache,
    ControlSocket,
    Encoded,
    FunctionClient,
    Instructions,
    ItemsFile,
    Limits,
    LiteLLMClient,
    LMHandler,
    Model,
    Models,
    OpenAICompatibleClient,
    Paths,
    RlmBrokerError,
    Route,
    Sandbox,
    SandboxedRepl,
    ScriptedClient,
    Serving,
    Shard,
    Tools,
    Trace,
    TraceWriter,
    ValueTooLarge,
    store,
)
from tests.support.tables import table

BAD: list[Any] = [
    *(object(), 5, -1, float("nan"), 10**30, True, "", "\ud800", "\0", "no/such", b"x"),
    *([], [object()], ["x"], (), {}, {5: object()}, {"a": object()}, lambda: None, type),
]
CONSTRUCTORS: list[tuple[Callable[..., Any], dict[str, Any], list[str]]] = [
    (RLM, {"model": ScriptedClient([])}, ["model", "sub_model", "models", "limits", "tools", "instructions"]),
    (RLM, {}, ["recursion", "on_event", "verbose", "persistent", "sandbox", "handler", "record", "seed"]),
    (Sandbox, {}, ["limits", "isolation", "allow_exec", "exact_memory", "warm", "seed"]),
    (Limits, {}, [*Limits.fields]),
    (Model, {"name": "m"}, [*Model.fields]),
    (Models, {}, ["named", "routes", "cache", "record", "replay"]),
    (Instructions, {}, ["system", "profile", "prologue"]),
    (Tools, {}, ["given", "for_children"]),
    (Route, {"to": "x"}, ["to", "match", "depths"]),
    (LMHandler, {"client": ScriptedClient([])}, ["client", "host", "port", "other_backend_client", "model_policy"]),
    (Cache, {}, ["path"]),
    (TraceWriter, {}, ["path"]),
    (Budget, {}, ["limits"]),
    (FunctionClient, {}, ["fn"]),
    (ScriptedClient, {}, ["replies"]),
    (OpenAICompatibleClient, {"base_url": "http://h/v1", "model": "m"}, ["base_url", "model", "headers", "options"]),
    (LiteLLMClient, {"model_name": "openai/m"}, ["model_name", "usd_per_million_tokens"]),
    (store, {}, ["value"]),
    (Paths, {}, ["paths"]),
    (Encoded, {"source": Paths([])}, ["source", "encoding", "errors"]),
    (ItemsFile, {"path": "-"}, ["path", "root", "encoding", "errors", "shard"]),
    (Shard, {"number": 1, "of": 1}, ["number", "of"]),
    (Trace, {}, ["path"]),
    (ControlSocket, {}, ["command", "on_stop"]),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def rlm() -> Iterator[RLM]:
    with RLM(ScriptedClient(lambda _: "FINAL(1)")) as opened:
        yield opened


@pytest.fixture(scope="module")
def repl(rlm: RLM) -> Iterator[SandboxedRepl]:
    with rlm.sandbox.repl() as opened:
        yield opened


def require_ours(call: Callable[..., Any], base: dict[str, Any], names: list[str], bad: list[Any] = BAD) -> None:
    for name in names:
        for value in bad:
            try:
                call(**{**base, name: value})
            except RlmBrokerError:
                pass
            except Exception as error:  # noqa: BLE001 - this is what is looked for
                pytest.fail(f"{call.__name__}({name}={value!r:.30}) raised {type(error).__name__}: {error}")


@pytest.mark.filterwarnings("ignore::UserWarning")
@table("constructor, base, names", CONSTRUCTORS)
def test_constructor_raises_only_documented_errors(
    constructor: Callable[..., Any], base: dict[str, Any], names: list[str]
) -> None:
    require_ours(constructor, base, names)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_runs_raise_only_documented_errors(rlm: RLM) -> None:
    require_ours(rlm.completion, {"context": "text"}, ["context", "question", "root_prompt", "output_type"])

    def started(**given: Any) -> None:
        rlm.start(**given).result()

    require_ours(started, {"context": "text"}, ["model", "sub_model", "limits", "tools", "on_event"])
    run = rlm.start("text")
    run.result()
    require_ours(run.result, {}, ["timeout_s"])
    require_ours(run.events, {}, ["after"])


def test_handler_raises_only_documented_errors(rlm: RLM) -> None:
    handler = rlm.handler
    require_ours(handler.answers, {}, ["limits", "depth", "tools", "on_event", "question", "sandbox", "budget"])
    require_ours(handler.get_client, {"depth": 1}, ["model"])
    require_ours(handler.register_client, {"model_name": "x", "client": ScriptedClient([])}, ["client"])
    require_ours(handler.serve, {"client": ScriptedClient([]), "serving": Serving()}, ["client"])


def test_sandbox_raises_only_documented_errors(rlm: RLM, repl: SandboxedRepl) -> None:
    require_ours(rlm.sandbox.repl, {}, ["context", "answer", "tools", "values"])
    require_ours(rlm.sandbox.template, {}, ["context", "imports", "setup", "timeout_s"])
    require_ours(repl.execute, {"code": "1"}, ["code", "timeout_s", "on_output", "value", "echo"])
    require_ours(repl.provide, {}, ["values"])
    require_ours(repl.fork, {}, ["answer", "detached"])
    require_ours(repl.run, {"argv": ["true"]}, ["argv", "input", "cwd", "env", "timeout_s", "max_output_bytes"])


def test_oversized_value_is_refused_by_name() -> None:
    with Sandbox(Limits(max_frame_bytes=1 << 16)) as sandbox, sandbox.repl() as repl:
        with pytest.raises(ValueTooLarge, match="the value big is too large for a message to a REPL: frame of"):
            repl.provide({"small": 1, "big": "x" * (1 << 17)})
        assert "NameError" in str(repl.execute("small").error)
        assert repl.execute("x = '" + "x" * (1 << 17) + "'").status == "error"
        with pytest.raises(ValueTooLarge, match="the value big"):
            sandbox.repl(values={"big": "x" * (1 << 17)})
