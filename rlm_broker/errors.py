"""The errors of this package.

RlmBrokerError
├── ConfigurationError       an argument or a setting cannot be used; no process was started
│   ├── ReplBusy             a REPL already runs a block
│   ├── ContextRefused       a context cannot be read, or is not text, a dict or a list
│   ├── ValueTooLarge        a value is larger than one message to a REPL may be
│   └── UnknownModel         no client is registered under that name
├── ForkRefused              a REPL cannot be forked here, or now; it goes on
├── FileRefused              a file of a REPL cannot be read, written or listed
├── ProgramNotStarted        a program cannot be started in a sandbox
├── IsolationUnavailable     this machine cannot give the wanted isolation level
├── ValueUnavailable         a variable of a REPL cannot be read, or a run ended without an answer
├── ProtocolViolation        a peer sent a message that is not allowed now; its connection is closed
│   └── OneShotRefused       a request of the one-shot protocol cannot be served (in `transport.one_shot`)
└── RunFailed                can end a run; it then carries the run's messages, usage and partial answer
    ├── SandboxFailed        the sandbox itself broke; the state of the code in it is unknown
    │   ├── WorkerDied       a worker's processes ended before their block did
    │   └── ReplClosed       the REPL was closed, or may not be restarted again
    ├── ModelFailed          a language model call failed
    │   └── ReplayDiverged   a replayed run asked for an unrecorded reply
    ├── OutputInvalid        the answer is not of the wanted type; carries the last answer
    ├── LimitReached         a limit ended the run
    └── RunCancelled         the run was stopped, for example by Ctrl+C
"""

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlm_broker.usage import Usage, UsageSummary
from rlm_broker.values.text import described, summary_fields
from sandbox_worker.wire.errors import FileKind

if TYPE_CHECKING:
    from rlm_broker.results import ChatMessage, ChildTrace, Completion, Isolation, Iteration

FailureCause = Literal["transient", "request", "provider"]
"""Why a call failed.

- `transient`: the same call may succeed later, for example after status 429 or a broken connection.
- `request`: no model would accept the request, for example because it is too long, malformed or refused.
- `provider`: any other cause, for example a wrong key, an unknown model or a malformed reply.
"""


_TOO_LONG = (
    "context_length_exceeded",
    "contextwindowexceeded",
    "context length",
    "context window",
    "context size",
    "maximum number of tokens",
    "too many tokens",
    "too long",
    "input length",
    "input token",
    "prompt tokens",
)
"""Phrases with which providers refuse a request that is too long, in lower case."""


class RlmBrokerError(Exception):
    """Base of all errors that this package raises on purpose. They can be pickled, with all their attributes.

    Example:
        ```python
        try:
            rlm.completion(Path("missing.txt"), "What is in it?")
        except RlmBrokerError as error:
            print(error.kind, error)
        ```

    Attributes:
        kind: Name of the error in JSON output.
        exit_code: Exit status of the command line for this error.
    """

    kind: str = "failed"
    exit_code: ClassVar[int] = 1

    def __reduce__(self) -> tuple[Callable[..., "RlmBrokerError"], tuple[Any, ...], dict[str, Any]]:
        """Pickle without `__init__`: its parameters differ from `args`, and process pools pickle errors."""
        return _unpickled, (type(self), *self.args), self.__dict__


class ConfigurationError(RlmBrokerError):
    """An argument, a setting or a file of the caller cannot be used.

    Example:
        ```python
        try:
            RLM("offline", limits=Limits(max_depth=-1))
        except ConfigurationError as error:
            print(error)
        ```
    """

    kind = "configuration"
    exit_code = 2


class ReplBusy(ConfigurationError):
    """A REPL already runs a block. It runs one block at a time."""

    kind = "busy"


class ContextRefused(ConfigurationError):
    """A context cannot be read, or is not text, a dict or a list."""

    kind = "context"


class ValueTooLarge(ConfigurationError):
    """A value is larger than one message to a REPL may be; see `Limits.max_frame_bytes`."""

    kind = "value"


class UnknownModel(ConfigurationError):
    """No client is registered under that name."""

    kind = "unknown_model"


class ForkRefused(RlmBrokerError):
    """A REPL cannot be forked in this sandbox, or not now. The REPL goes on.

    Example:
        ```python
        repl.execute("import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()")
        try:
            repl.fork()
        except ForkRefused as error:
            print(error)  # this REPL cannot be forked: threads that an earlier block has left were running
        ```
    """

    kind = "fork"


class FileRefused(RlmBrokerError):
    """A file of a REPL cannot be read, written or listed.

    Example:
        ```python
        try:
            repl.files.read("none.txt")
        except FileRefused as error:
            print(error.kind, error)  # missing 'none.txt' cannot be opened: No such file or directory
        ```

    Attributes:
        kind: Why, as one word.
        is_path: Whether no file can have the path: it has a "..", say.
    """

    kind: FileKind = "file"
    is_path = False

    def __init__(self, message: str, kind: FileKind = "file") -> None:
        super().__init__(message)
        self.kind = kind


class ProgramNotStarted(RlmBrokerError):
    """A program cannot be started in a sandbox.

    It does not exist, cannot be executed, or the REPL has as many processes as `Limits.max_processes` allows.
    """

    kind = "program"


class IsolationUnavailable(RlmBrokerError):
    """This machine cannot give the wanted isolation level. No code ran at a weaker level.

    Example:
        ```python
        try:
            with Sandbox(isolation="strict") as sandbox:
                print(sandbox.level)
        except IsolationUnavailable as error:
            print(error.layer, error.reason, error.remedy)
        ```

    Attributes:
        layer: Name of the failed layer, or None if the cause is not a layer.
        reason: Why it failed, or None.
        remedy: A change of the machine to make it available, or None.
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
    """A variable of a REPL does not exist or cannot be transferred, or a run has no answer; the message says why."""

    kind = "value"


class ProtocolViolation(RlmBrokerError):
    """A peer sent a message that is not allowed at that point; its connection is closed."""

    kind = "protocol"
    exit_code = 4


class RunFailed(RlmBrokerError):
    """Base of the errors that can end a run. Such an error has the run's partial results.

    The attributes are empty if no run had begun, for example when a client raises `ModelFailed` on its own.
    `Completion` has fields of the same names.

    Example:
        ```python
        try:
            rlm.completion("a", "How many?", limits=RunLimits(max_tokens=1))
        except RunFailed as error:
            print(error, error.partial_answer, error.usage_summary.total_cost)
        ```

    Attributes:
        partial_answer: Best answer so far: the draft in `answer["content"]`, else the text of the model's last reply
            outside of its code, else None.
        root_model: Name of the run's model.
        isolation: Enforced isolation, or None if the run had no REPL.
        messages: Conversation with the root model.
        trajectory: Turns of the run. The last turn may lack the running block.
        child_traces: Child runs of the run.
        usage_summary: Usage of the run and everything below it, by model, without a call under way.
        usage_by_depth: The same usage by depth.
        execution_time: Duration of the run in seconds.
    """

    partial_answer: str | None = None
    root_model: str | None = None
    isolation: "Isolation | None" = None
    messages: "tuple[ChatMessage, ...]" = ()
    trajectory: "tuple[Iteration, ...]" = ()
    child_traces: "tuple[ChildTrace, ...]" = ()
    usage_summary: UsageSummary = UsageSummary()
    usage_by_depth: Mapping[int, Usage] = MappingProxyType({})
    execution_time: float = 0.0

    def take(self, run: "Completion", partial_answer: str | None) -> None:
        """Copy the results of a run without a response. A partial answer that the error has already is kept."""
        self.partial_answer = self.partial_answer or partial_answer
        self.messages, self.trajectory, self.child_traces = run.messages, run.trajectory, run.child_traces
        self.usage_summary, self.usage_by_depth = run.usage_summary, run.usage_by_depth
        self.execution_time = run.execution_time
        self.root_model, self.isolation = run.root_model, run.isolation

    def __repr__(self) -> str:
        said = {"partial_answer": self.partial_answer, "root_model": self.root_model, **summary_fields(self)}
        return f"{type(self).__name__}({str(self)!r}{', ' + described(**said) if self.execution_time else ''})"


class SandboxFailed(RunFailed):
    """The sandbox itself broke. The state of the code that ran in it is unknown."""

    kind = "sandbox"
    exit_code = 4


class WorkerDied(SandboxFailed):
    """A worker's processes ended before their block did."""


class ReplClosed(SandboxFailed):
    """The REPL was closed, or was restarted as often as `Limits.max_repl_restarts` allows."""


class ModelFailed(RunFailed):
    """A language model call failed; the message is one sentence in the provider's own words.

    Example:
        ```python
        try:
            RLM(ScriptedClient([ModelFailed("the key is wrong")])).completion("a", "How many?")
        except ModelFailed as error:
            print(error.cause, error)  # provider the key is wrong
        ```

    Attributes:
        cause: Whether another attempt, or another model, may help; see `FailureCause`.
        retry_after_s: Seconds that the provider asks to wait before the next call, or None if it does not say.
        is_lasting: Whether every further call would fail alike: with a wrong key, or a missing model or host.
    """

    kind = "provider"
    exit_code = 5

    def __init__(
        self,
        message: str,
        cause: FailureCause = "provider",
        retry_after_s: float | None = None,
        *,
        is_lasting: bool = False,
    ) -> None:
        super().__init__(message)
        self.cause: FailureCause = cause
        self.retry_after_s = retry_after_s
        self.is_lasting = is_lasting

    @property
    def is_too_long(self) -> bool:
        """Whether the provider's message says that the request was longer than its model reads."""
        lower = str(self).lower()
        return any(each in lower for each in _TOO_LONG)


class ReplayDiverged(ModelFailed):
    """A replayed run asked for an unrecorded reply; the message shows the difference.

    It is also raised at the call during which the recorded run was stopped.

    Example:
        ```python
        models = Models(record="run.recording")
        RLM("offline", models=models).completion("a", "Which letter is it?")
        try:
            RLM(models=Models(replay="run.recording")).completion("b", "Which word is it?")
        except ReplayDiverged as error:
            print(error)
        ```
    """

    kind = "replay"
    exit_code = 1


class OutputInvalid(RunFailed):
    """The answer is not of the wanted type, also after `Limits.max_output_retries` further turns.

    Example:
        ```python
        try:
            rlm.completion("a", "How many?", output_type=dict[str, int])
        except OutputInvalid as error:
            print(error.answer)  # 2
        ```

    Attributes:
        answer: Last answer of the model, as text.
    """

    kind = "output"

    def __init__(self, problem: str, answer: str) -> None:
        super().__init__(f"the answer is not of the wanted type: {problem}")
        self.answer = self.partial_answer = answer


class LimitReached(RunFailed):
    """A limit ended a run, or refused a call or a child run.

    Example:
        ```python
        try:
            rlm.completion("a", "How many?", limits=RunLimits(max_tokens=1))
        except LimitReached as error:
            print(error.limit, error.allowed)  # max_tokens 1
        ```

    Attributes:
        limit: Name of the field of `Limits`.
        spent: Amount used, in the unit of the field.
        allowed: Value of the field.
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
    """The run was cancelled before it had an answer, for example by Ctrl+C.

    Example:
        ```python
        run = rlm.start("a", "How many?")
        run.cancel()
        try:
            run.result()
        except RunCancelled as error:
            print(error.partial_answer)
        ```
    """

    kind = "cancelled"
    exit_code = 130

    def __init__(self, partial_answer: str | None = None) -> None:
        super().__init__("the run was cancelled before it had an answer")
        self.partial_answer = partial_answer


SHORT_OF: Mapping[int, str] = MappingProxyType(
    {
        errno.EMFILE: "raise the limit of open files (`ulimit -n 4096`)",
        errno.ETOOMANYREFS: "raise the limit of open files (`ulimit -n 4096`)",
        errno.ENFILE: "raise the machine's limit of open files (`sysctl fs.file-max`)",
        errno.EAGAIN: "raise the limit of processes (`ulimit -u`, LimitNPROC= or TasksMax= of a unit, --pids-limit)",
        errno.ENOMEM: "free some memory, or raise the container's limit of it",
        errno.ENOBUFS: "free some memory, or raise the container's limit of it",
    }
)
"""Error number of the kernel for a shortage of the process or the machine → its remedy."""


class PlainErrors(contextlib.AbstractContextManager[None]):
    """Takes the frames of this package from its errors at the public door.

    They say nothing to a caller, and fill a page in a notebook. The cause stays: it may be in code of the user's.
    """

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RlmBrokerError):
            error.__traceback__, error.__suppress_context__ = None, True


def refused_by_machine(what: str, error: OSError) -> SandboxFailed:
    """Return the error for a refusal by the kernel. `what` is the beginning of its sentence."""
    remedy = SHORT_OF.get(error.errno or 0)
    return SandboxFailed(f"{what}: {error.strerror or error}" + (f"; {remedy}" if remedy else ""))


def is_shortage(error: BaseException) -> bool:
    """Whether the error says that the process or the machine is short of something, see `SHORT_OF`."""
    return isinstance(error, OSError) and error.errno in SHORT_OF


@contextlib.contextmanager
def shortage_told(what: str) -> Iterator[None]:
    """Raise `SandboxFailed` in place of a shortage. `what` is the beginning of its sentence."""
    try:
        yield
    except OSError as error:
        if not is_shortage(error):
            raise
        raise refused_by_machine(what, error) from None


def require_kind(what: str, value: object, *kinds: type) -> None:
    """Raise `ConfigurationError` if a value is of none of the `kinds`. A bool does not count as a number.

    Args:
        what: Name of the value in the message.
        value: Value to check.
        kinds: Allowed types; with `type(None)` among them, None is allowed.
    """
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = [kind.__name__ for kind in kinds if kind is not type(None)]
        article = "an" if names[0][0] in "aeiou" else "a"
        raise ConfigurationError(f"{what} must be {article} {' or '.join(names)}, not {type(value).__name__}")


def _unpickled(kind: type[RlmBrokerError], *args: Any) -> RlmBrokerError:
    return kind.__new__(kind, *args)
