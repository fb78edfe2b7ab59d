"""Outcomes of runs, from a node to the orchestrator."""

import msgspec
import pytest

from rlm_broker.cluster import outcomes as module
from rlm_broker.cluster.messages import Ended
from rlm_broker.cluster.outcomes import encoded_completion, facts_of, read_completion, read_error
from rlm_broker.errors import (
    ConfigurationError,
    IsolationUnavailable,
    LimitReached,
    ModelFailed,
    OutputInvalid,
    ProtocolViolation,
    ReplClosed,
    RlmBrokerError,
    SandboxFailed,
    UnknownModel,
    WorkerDied,
)
from rlm_broker.results import (
    Block,
    ChatMessage,
    ChildTrace,
    Completion,
    Isolation,
    Iteration,
    PostMortem,
    Variable,
)
from rlm_broker.usage import Usage, UsageSummary
from rlm_broker.values.display import Display

BLOCK = Block(
    "plot()",
    "killed",
    "out",
    "err",
    post_mortem=PostMortem("line 1", "stack", 5, 0.5, 2, 3),
    displays=(Display({"image/png": b"\x89PNG", "text/plain": "a plot"}),),
    variables=(Variable("x", "ndarray", (2, 3)),),
)
COMPLETION = Completion(
    "yes",
    "model",
    0,
    1,
    2.5,
    UsageSummary({"model": Usage(2, 10, 5, 0.5)}),
    {0: Usage(1, 5, 2, 0.25), 1: Usage(1, 5, 3, 0.25)},
    limit="max_iterations",
    isolation=Isolation("strict", ("landlock",)),
    messages=(ChatMessage("user", "What?"), ChatMessage("user", [{"type": "text", "text": "part"}])),
    trajectory=(Iteration(1, "```repl\nplot()\n```", (BLOCK,)),),
    child_traces=(ChildTrace(1, 0.5, "task", "result"),),
)


def test_a_completion_arrives_whole() -> None:
    """All fields come back equal, with the pictures as bytes."""
    assert read_completion(encoded_completion(COMPLETION)) == COMPLETION


def test_lone_surrogates_do_not_end_the_link() -> None:
    """Text that no UTF-8 can hold arrives written out."""
    sent = Completion("\ud800", "model", 0, 1, 1.0, UsageSummary())
    assert read_completion(encoded_completion(sent)).response == "\\ud800"


@pytest.mark.parametrize(
    "raw",
    [
        b"5",
        b'{"response": "yes"}',
        b'{"response": 1, "root_model": "m", "iterations": 1, "execution_time": 1}',
        b'{"response": null, "root_model": "m", "iterations": 1, "execution_time": 1, "trajectory": [{"number": 1, '
        b'"reply": "", "blocks": [{"code": "", "status": "ok", "displays": [{"image/png": "no base64"}]}]}]}',
        b'{"response": null, "root_model": "m", "iterations": 1, "execution_time": 1, "trajectory": [{"number": 1, '
        b'"reply": "", "blocks": [{"code": "", "status": "fine"}]}]}',
    ],
)
def test_another_form_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="a completion that cannot be read"):
        read_completion(msgspec.Raw(raw))


def test_a_completion_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent makes its outcome shorter. One that does not is no agent."""
    large = Completion("x" * 1_000, "model", 0, 1, 1.0, UsageSummary())
    many = msgspec.Raw(b"[" + b"0," * (1 << 18) + b"0]")
    monkeypatch.setattr(module, "OUTCOME_BYTES", 1 << 20)
    with pytest.raises(ProtocolViolation, match="more bytes or values"):
        read_completion(many)
    monkeypatch.setattr(module, "OUTCOME_BYTES", 1_000)
    with pytest.raises(ProtocolViolation, match="more bytes or values"):
        read_completion(encoded_completion(large))


@pytest.mark.parametrize(
    "error",
    [
        LimitReached("max_tokens", 7, 5),
        ModelFailed("no luck", "transient", 3.5),
        ModelFailed("no luck"),
        OutputInvalid("it is no number", "five"),
        IsolationUnavailable("no namespaces", "namespaces", "EPERM", "enable them"),
        SandboxFailed("broke"),
        WorkerDied("died"),
        ReplClosed("closed"),
        UnknownModel("no model"),
        ConfigurationError("cannot be used"),
    ],
)
def test_an_error_is_made_again(error: RlmBrokerError) -> None:
    """An error has its class, its text and its attributes."""
    ended = Ended(1, error=type(error).__name__, message=str(error), facts=facts_of(error))
    made = read_error(ended)
    assert type(made) is type(error)
    assert str(made) == str(error)
    assert facts_of(made) == facts_of(error)


@pytest.mark.parametrize("name", ["SystemExit", "RlmBrokerError", "Callable", "", "Any"])
def test_other_names_make_no_object(name: str) -> None:
    """A name that is no error of a run makes a plain failure of the sandbox, and calls no class."""
    assert type(read_error(Ended(1, error=name, message="text"))) is SandboxFailed


@pytest.mark.parametrize(
    "name", ["SandboxFailed", "ModelFailed", "OutputInvalid", "IsolationUnavailable", "LimitReached"]
)
def test_text_of_an_error_steers_no_terminal(name: str) -> None:
    """Control characters of a node become escapes, and it forges no line of a log."""
    hostile = "\x1b[2J\nWARNING all is well"
    facts = dict.fromkeys(("limit", "layer", "reason", "remedy"), hostile)
    made = read_error(Ended(1, error=name, message=hostile, facts=facts))
    shown = [str(made), *(str(getattr(made, each, "")) for each in facts)]
    assert r"\x1b[2J\n" in shown[0]
    assert all(text.isprintable() for text in shown)


def test_facts_are_bounded_and_typed() -> None:
    """A fact of another type or of any length does no harm."""
    facts = {"limit": ["x"], "spent": "much", "allowed": True}
    reached = read_error(Ended(1, error="LimitReached", facts=facts))
    assert isinstance(reached, LimitReached)
    assert (reached.limit, reached.spent, reached.allowed) == ("(unknown)", 0.0, 0.0)
    for number in (10**400, 1e300, float("nan"), float("inf"), -1):
        reached = read_error(Ended(1, error="LimitReached", facts={"limit": "max_tokens", "allowed": number}))
        assert isinstance(reached, LimitReached)
        assert reached.allowed == 0
    failed = read_error(Ended(1, error="ModelFailed", message="x" * 1_000_000, facts={"cause": "magic"}))
    assert isinstance(failed, ModelFailed)
    assert (len(str(failed)), failed.cause) == (20_000, "provider")
