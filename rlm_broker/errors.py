"""Everything this package raises on purpose.

RlmBrokerError
├── ConfigurationError       what the caller gave cannot be used; nothing was started
│   ├── ReplBusy             a REPL runs a block already
│   ├── ContextRefused       a context cannot be read, or is not text, a dict or a list
│   ├── ValueTooLarge        a value is more than a message to a REPL may hold
│   └── UnknownModel         no client is registered under that name
├── FileRefused              a file of a REPL cannot be read, written or listed
├── ProgramNotStarted        a program cannot be started in a sandbox
├── IsolationUnavailable     this machine cannot give the isolation that was asked for
├── ValueUnavailable         a variable of a REPL is not there, or its value does not cross
├── ProtocolViolation        a peer said what it may not say now; its connection is closed
│   └── OneShotRefused       a request of the one-shot protocol cannot be served (in `transport.one_shot`)
└── RunFailed                a run may end by it; then it carries what the run had: messages, usage, partial answer
    ├── SandboxFailed        the sandbox itself broke; nothing is known of the code that ran in it
    │   ├── WorkerDied       a worker's processes ended before their block did
    │   └── ReplClosed       the REPL was closed, or may not be restarted any more
    ├── ModelFailed          a language model call failed
    │   └── ReplayDiverged   a replayed run asked something that was not recorded
    ├── OutputInvalid        the answer is not of the type that was asked for; carries the last one
    ├── LimitReached         a limit ended the run
    └── RunCancelled         the run was stopped, by Ctrl+C for example
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from rlm_broker.results import ChatMessage, ChildTrace, Completion, Isolation, Iteration, Usage, UsageSummary
from rlm_broker.shown import described, had

FailureCause = Literal["transient", "request", "provider"]
"""Why a call failed: `transient`, the same call may succeed later; `request`, no model would take it (too long, refused
content, malformed); `provider`, anything else, such as a wrong key, an unknown model, an answer of nonsense."""


class RlmBrokerError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        kind: The error's name in JSON output.
        exit_code: What the command line returns for it.
    """

    kind: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1

    def __reduce__(self) -> tuple[Callable[..., "RlmBrokerError"], tuple[Any, ...], dict[str, Any]]:
        """Pickle without `__init__`, which takes other arguments than the message: a process pool passes errors on."""
        return _unpickled, (type(self), *self.args), self.__dict__


class ConfigurationError(RlmBrokerError):
    """What the caller gave cannot be used."""

    kind = "configuration"
    exit_code = 2


class ReplBusy(ConfigurationError):
    """A REPL runs a block already. It runs one at a time."""

    kind = "busy"


class ContextRefused(ConfigurationError):
    """A context cannot be read, or is not text, a dict or a list."""

    kind = "context"


class ValueTooLarge(ConfigurationError):
    """A value is more than a message to a REPL may hold, see `Limits.max_frame_bytes`."""

    kind = "value"


class UnknownModel(ConfigurationError):
    """No client is registered under that name."""

    kind = "unknown_model"


class FileRefused(RlmBrokerError):
    """A file of a REPL's scratch folder cannot be read, written or listed, as it is there."""

    kind = "file"


class ProgramNotStarted(RlmBrokerError):
    """A program cannot be started in a sandbox: it is not there, cannot be executed, or is one process too many."""

    kind = "program"


class IsolationUnavailable(RlmBrokerError):
    """This machine cannot give the isolation that was asked for. Nothing ran with less.

    Attributes:
        layer, reason, remedy: Which layer failed, why, and what would give it, where it was one.
    """

    kind = "isolation"
    exit_code = 4

    def __init__(
        self, message: str, layer: str | None = None, reason: str | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.reason = reason
        self.remedy = remedy


class ValueUnavailable(RlmBrokerError):
    """A variable of a REPL is not there, or its value does not cross; the text says which and why."""

    kind = "value"


class ProtocolViolation(RlmBrokerError):
    """A peer said what it may not say now; its connection is closed."""

    kind = "protocol"
    exit_code = 4


class RunFailed(RlmBrokerError):
    """Base of the errors that can end a run. One that ended a run carries what the run had by then.

    The fields below are empty if no run had begun: a client's own `ModelFailed`, for example. `Completion` has fields
    of the same names.

    Attributes:
        partial_answer: The best answer so far: what code has put into `answer["content"]`, else the text of the model's
            last reply outside of its code; or None.
        root_model: The model of the run.
        isolation: What was enforced; None if it had no REPL.
        messages: The conversation with the root model.
        trajectory: The turns of the run. The last one may lack the block that was running.
        child_traces: Its child runs.
        usage_summary, usage_by_depth: What the run and all below it used; a call that was under way is not counted.
        execution_time: Seconds.
    """

    partial_answer: str | None = None
    root_model: str | None = None
    isolation: Isolation | None = None
    messages: tuple[ChatMessage, ...] = ()
    trajectory: tuple[Iteration, ...] = ()
    child_traces: tuple[ChildTrace, ...] = ()
    usage_summary: UsageSummary = UsageSummary()
    usage_by_depth: Mapping[int, Usage] = MappingProxyType({})
    execution_time: float = 0.0

    def take(self, run: Completion, partial_answer: str | None) -> None:
        """Carry what `run`, which has no response, came to."""
        self.partial_answer = self.partial_answer or partial_answer
        self.messages, self.trajectory, self.child_traces = run.messages, run.trajectory, run.child_traces
        self.usage_summary, self.usage_by_depth = run.usage_summary, run.usage_by_depth
        self.execution_time = run.execution_time
        self.root_model, self.isolation = run.root_model, run.isolation

    def __repr__(self) -> str:
        said = {"partial_answer": self.partial_answer, "root_model": self.root_model, **had(self)}
        return f"{type(self).__name__}({str(self)!r}{', ' + described(**said) if self.execution_time else ''})"


class SandboxFailed(RunFailed):
    """The sandbox itself broke; nothing is known of the code that ran in it."""

    kind = "sandbox"
    exit_code = 4


class WorkerDied(SandboxFailed):
    """A worker's processes ended before their block did."""


class ReplClosed(SandboxFailed):
    """The REPL was closed, or has been restarted as often as `Limits.max_repl_restarts` allows."""


class ModelFailed(RunFailed):
    """A language model call failed; the message is one sentence in the provider's own words.

    Attributes:
        cause: Whether trying again, or asking another model, may help.
        retry_after_s: How long the provider wants to be left alone, in seconds, if it said so.
    """

    kind = "provider"
    exit_code = 5

    def __init__(self, message: str, cause: FailureCause = "provider", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.cause: FailureCause = cause
        self.retry_after_s = retry_after_s


class ReplayDiverged(ModelFailed):
    """A replayed run asked something that was not recorded; the message shows the difference. Or it has come to the
    call in which the run was stopped."""

    kind = "replay"
    exit_code = 1


class OutputInvalid(RunFailed):
    """The answer is not of the type that was asked for, and the model was told so as often as it may be.

    Attributes:
        answer: The last one.
    """

    kind = "output"

    def __init__(self, problem: str, answer: str) -> None:
        super().__init__(f"the answer is not of the type that was asked for: {problem}")
        self.answer = self.partial_answer = answer


class LimitReached(RunFailed):
    """A run stopped at a limit.

    Attributes:
        limit: Name of the field of `Limits`.
        spent: How much was used, in the unit that the field's name gives.
        allowed: The field's value.
    """

    kind = "limit"
    exit_code = 3

    def __init__(self, limit: str, spent: float, allowed: float, partial_answer: str | None = None) -> None:
        super().__init__(f"the limit {limit} = {allowed:,.10g} was reached, {spent:,.10g} used")
        self.limit = limit
        self.spent = spent
        self.allowed = allowed
        self.partial_answer = partial_answer


class RunCancelled(RunFailed):
    """The run was cancelled before it had an answer, by Ctrl+C for example."""

    kind = "cancelled"
    exit_code = 130

    def __init__(self, partial_answer: str | None = None) -> None:
        super().__init__("the run was cancelled before it had an answer")
        self.partial_answer = partial_answer


def require_kind(what: str, value: object, *kinds: type) -> None:
    """Refuse a value of another kind. A bool is no number here.

    Raises:
        ConfigurationError: It is of none of `kinds`.
    """
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = [kind.__name__ for kind in kinds if kind is not type(None)]
        article = "an" if names[0][0] in "aeiou" else "a"
        raise ConfigurationError(f"{what} is {article} {' or '.join(names)}, and not {type(value).__name__}")


def _unpickled(kind: type[RlmBrokerError], *args: Any) -> RlmBrokerError:
    return kind.__new__(kind, *args)
