"""A run's model calls on disk: written as they are made, found again when the run is replayed."""

import difflib
import json
import os
import warnings
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rlm_broker.errors import ConfigurationError, FailureCause
from rlm_broker.redaction import LONGEST_CHARS, redacted
from sandbox_worker.wire.text_json import decode_escaped, encode_escaped

FORMAT = 1
DIFFERENCE_LINES = 24
LINE_CHARS = 160


class CallId(msgspec.Struct, frozen=True):
    """Which call it was: of which run, in or after which of its blocks (0: before the first), and its number there."""

    run: str
    block: int
    n: int

    def __str__(self) -> str:
        return f"run {self.run}, block {self.block}, call {self.n}"


class Request(msgspec.Struct, frozen=True):
    """What a reply is found by. A temperature is in it only where code has asked for one."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_completion_tokens: int | None = None
    depth: int = 0
    sample: int = 0
    temperature: float | msgspec.UnsetType = msgspec.UNSET


class Failure(msgspec.Struct, frozen=True):
    """How a call failed."""

    message: str
    cause: FailureCause = "provider"


class Counted(msgspec.Struct, frozen=True):
    """What a call used when it was recorded."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call: a line of the file.

    Attributes:
        model: The one that served.
        cancelled: It was cancelled before its end.
        run_stopped: It was, because its run was stopped from outside: what the run did is known up to here.
    """

    id: CallId
    request: Request
    model: str
    text: str = ""
    problem: str | None = None
    failure: Failure | None = None
    used: Counted = Counted()
    cancelled: bool = False
    run_stopped: bool = False


class RecordedModels(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line: what the run's models were called, and by which routes and policy they were found.

    Attributes:
        seed: Of the sandbox that the run's code was in, see `Sandbox`.
        windows: Name of a model → tokens that it can read, where that was known: conversations are cut by it.
    """

    rlm_broker_recording: int
    root: str
    sub: str | None = None
    others: list[str] = []
    routes: list[tuple[str, str | None, str]] = []
    policy: Literal["allow", "pinned", "open"] = "allow"
    seed: int | None = None
    windows: dict[str, Annotated[int, msgspec.Meta(ge=1)]] = {}


class Recorder:
    """Writes calls to a new file, readable for this user alone; each is there when its call has ended.

    Raises:
        ConfigurationError: The file exists, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], models: RecordedModels) -> None:
        self.path = Path(path)
        self._lost: str | None = None
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except FileExistsError:
            raise ConfigurationError(f"{self.path} exists: remove it, or record to another file") from None
        except OSError as error:
            raise ConfigurationError(f"cannot record to {self.path}: {error.strerror}") from None
        self._write(models)

    def add(self, recorded: Recorded) -> None:
        """Write one call, without what looks like a secret, and of a reply that is too long without its middle."""
        self._write(
            msgspec.structs.replace(
                recorded,
                request=_without_secrets(recorded.request),
                text=redacted(recorded.text, LONGEST_CHARS),
                problem=redacted(recorded.problem, LONGEST_CHARS),
                failure=recorded.failure
                and Failure(redacted(recorded.failure.message, LONGEST_CHARS), recorded.failure.cause),
            )
        )

    def close(self) -> None:
        """Once. Warns if lines are missing. What a call that is still under way adds later is lost."""
        os.close(self._descriptor)
        self._descriptor = -1  # the number may be another file's by then
        if self._lost:
            warnings.warn(f"the recording {self.path} is not whole: {self._lost}", stacklevel=2)

    def _write(self, value: msgspec.Struct) -> None:
        if self._descriptor < 0:
            return
        line = memoryview(encode_escaped(value) + b"\n")
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:  # a run is not to end because it cannot be recorded
            self._lost = self._lost or error.strerror or str(error)


class Recording:
    """What a file holds. Calls with equal requests are given out in their order, the last one again and again.

    Attributes:
        diverged: How the run that is replayed asked for something else, once it did, or where it was stopped.

    Raises:
        ConfigurationError: It cannot be read, or is no recording.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.diverged: str | None = None
        try:
            first, *lines = self.path.read_bytes().splitlines(keepends=True) or [b""]
            if lines and not lines[-1].endswith(b"\n"):
                lines.pop()  # of a run that was killed while it wrote
            self.models = msgspec.json.decode(first, type=RecordedModels)
            self._calls = [decode_escaped(line, Recorded) for line in lines]
        except OSError as error:
            raise ConfigurationError(f"cannot read the recording {self.path}: {error.strerror}") from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"{self.path} is no recording: {error}") from None
        if self.models.rlm_broker_recording != FORMAT:
            raise ConfigurationError(f"{self.path} was recorded by another version of rlm-broker")
        self._by_request: dict[bytes, deque[Recorded]] = defaultdict(deque)
        for call in self._calls:
            self._by_request[encode_escaped(_without_secrets(call.request))].append(call)

    def find(self, request: Request) -> Recorded | None:
        """The call that was recorded for this request, or for one that differs in secrets alone."""
        calls = self._by_request.get(encode_escaped(_without_secrets(request)))
        if not calls:
            return None
        return calls.popleft() if len(calls) > 1 else calls[0]

    def difference(self, request: Request, id: CallId) -> str:
        """How a request that was not recorded differs from the nearest: the one of the same place, else of any."""
        if not self._calls:
            return f"{self.path} holds no calls"
        ours = _lines_of(_without_secrets(request))
        near = [call for call in self._calls if call.id == id]
        nearest = near[0] if near else max(self._calls, key=lambda call: _likeness(_lines_of(call.request), ours))
        changes = difflib.unified_diff(_lines_of(nearest.request), ours, "recorded", "asked now", n=1, lineterm="")
        shown = [line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]}..." for line in changes]
        more = len(shown) - DIFFERENCE_LINES
        if more > 0:
            shown = [*shown[:DIFFERENCE_LINES], f"... and {more:,} more lines"]
        head = f"the run asks what {self.path} has no reply to ({id}); the nearest is {nearest.id}:"
        return "\n".join([head, *shown])


def _without_secrets(request: Request) -> Request:
    return msgspec.structs.replace(request, messages=redacted(request.messages))


def _lines_of(request: Request) -> list[str]:
    settings = [f"{name}: {getattr(request, name)}" for name in ("model", "max_completion_tokens", "depth", "sample")]
    lines = list(settings)
    if request.temperature is not msgspec.UNSET:
        lines.append(f"temperature: {request.temperature}")
    for message in request.messages:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        lines += [f"[{message.get('role')}]", *text.splitlines()]
    return lines


def _likeness(one: Sequence[str], other: Sequence[str]) -> int:
    """Lines that both have: enough to find the nearest, and fast for long conversations."""
    return len({*one} & {*other})
