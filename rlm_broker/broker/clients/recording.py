"""Files with a run's model calls: written during the run, and read to replay it.

The first line is `RecordedModels`, and each further line is one `Recorded` call or one `RecordedNews`, as JSON. A reply
is found by its request, not by its time, because calls of a batch end in any order. Code that waits for children in the
background sees the same of them as done, and what such a child did no more when it was cancelled, it does not do.
"""

import asyncio
import hashlib
import json
import os
import warnings
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rlm_broker.broker.clients.base import BaseClient, CallId, LMReply, LMRequest
from rlm_broker.errors import ConfigurationError, FailureCause, ModelFailed, ReplayDiverged
from rlm_broker.events.redaction import LONGEST_CHARS, redacted
from rlm_broker.usage import Usage
from rlm_broker.values.text import clip
from sandbox_worker.wire.text_json import decode_escaped, encode_escaped

FORMAT = 1
"""Version of the file format. Files of other versions are refused."""
DIFFERENCE_LINES = 24
"""Maximum lines of a difference in an error; further lines are counted."""
OWN_PROMPT = "(the system prompt of rlm-broker)"
"""Text in place of the built-in system prompt in a recording."""
_NEWS = b'{"run":'
"""Beginning of a line with a `RecordedNews`."""
LINE_CHARS = 160
"""Maximum characters of a line in a difference; longer lines are cut."""
DIGEST_BYTES = 16
"""Bytes of the digest of a request: among a billion, two share one with a probability of 1 in 10^21."""
LARGE_CHARS = 1 << 20
"""Characters of requests beyond which their digests are made in a thread: 60 million take a second."""


class Request(msgspec.Struct, frozen=True):
    """Key of a recorded reply. `temperature` is set only if code asked for one."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_completion_tokens: int | None = None
    depth: int = 0
    sample: int = 0
    temperature: float | msgspec.UnsetType = msgspec.UNSET


class Failure(msgspec.Struct, frozen=True):
    """Error of a recorded call: its message and its cause."""

    message: str
    cause: FailureCause = "provider"


class Counted(msgspec.Struct, frozen=True):
    """Usage of a call when it was recorded."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call: one line of the file.

    Attributes:
        model: Name of the serving model.
        cancelled: Whether the call was cancelled before its end.
        run_stopped: Whether it was cancelled because its run was stopped from outside. The recording then ends there.
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


class RecordedNews(msgspec.Struct, frozen=True):
    """News of children in the background: those that had answered when code waited; or a run that was cancelled.

    Attributes:
        run: Run of the code; or the cancelled run.
        query: Id of the query that waited; or None for a cancelled run.
        done: Ids of the queries that were answered by then.
    """

    run: str
    query: str | None = None
    done: list[str] = []


class RecordedModels(msgspec.Struct, frozen=True, omit_defaults=True):
    """First line of the file: names of the run's models, and their routes and policy.

    Attributes:
        rlm_broker_recording: Version of the format, see `FORMAT`.
        seed: Seed of the sandbox of the run's code; see `Sandbox`.
        windows: Name of a model → its context window in tokens, if that was known. A conversation is cut by it.
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
    """Writes calls to a new file, readable by this user alone. Each call is in the file once it has ended.

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
        """Write one call, without apparent secrets. A very long reply loses its middle."""
        self._write(
            msgspec.structs.replace(
                recorded,
                request=without_secrets(recorded.request),
                text=redacted(recorded.text, LONGEST_CHARS),
                problem=redacted(recorded.problem, LONGEST_CHARS),
                failure=recorded.failure
                and Failure(redacted(recorded.failure.message, LONGEST_CHARS), recorded.failure.cause),
            )
        )

    def add_news(self, run: str, query: str | None, done: Sequence[str]) -> None:
        """Write news of children, see `RecordedNews`."""
        self._write(RecordedNews(run, query, [*done]))

    def close(self) -> None:
        """Close the file, and warn if lines are missing. Later calls are not recorded. Call it once."""
        os.close(self._descriptor)
        self._descriptor = -1  # a later `add` must not write to a reused descriptor
        if self._lost:
            warnings.warn(f"the recording {self.path} is not whole: {self._lost}", stacklevel=2)

    def _write(self, value: msgspec.Struct) -> None:
        if self._descriptor < 0:
            return
        line = memoryview(encode_escaped(value) + b"\n")
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:  # a full disk must not end the run; `close` warns
            self._lost = self._lost or error.strerror or str(error)


class Recording:
    """Content of a recording. Replies to equal requests come in their order, and then the last one again.

    Attributes:
        diverged: Message for all further calls after the first unrecorded one, or after the end; None before.

    Raises:
        ConfigurationError: The file cannot be read, or is not a recording.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.diverged: str | None = None
        try:
            first, *lines = self.path.read_bytes().splitlines(keepends=True) or [b""]
            if lines and not lines[-1].endswith(b"\n"):
                lines.pop()  # the process was killed while it wrote this line
            self.models = msgspec.json.decode(first, type=RecordedModels)
            all_news = [decode_escaped(line, RecordedNews) for line in lines if line.startswith(_NEWS)]
            self._calls = [decode_escaped(line, Recorded) for line in lines if not line.startswith(_NEWS)]
        except OSError as error:
            raise ConfigurationError(f"cannot read the recording {self.path}: {error.strerror}") from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"{self.path} is not a recording: {error}") from None
        if self.models.rlm_broker_recording != FORMAT:
            raise ConfigurationError(f"{self.path} has another version of the format: record the run again")
        self._by_request: dict[bytes, deque[Recorded]] = defaultdict(deque)
        self._waits: dict[tuple[str, str], deque[list[str]]] = defaultdict(deque)
        self._cancelled = {news.run for news in all_news if news.query is None}
        for news in all_news:
            if news.query is not None:
                self._waits[news.run, news.query].append(news.done)
        for call in self._calls:
            self._by_request[encode_escaped(without_secrets(call.request))].append(call)

    def find(self, request: Request) -> Recorded | None:
        """Return the call recorded for this request, apart from secrets; None if there is none."""
        calls = self._by_request.get(encode_escaped(without_secrets(request)))
        if not calls:
            return None
        return calls.popleft() if len(calls) > 1 else calls[0]

    def next_done(self, run: str, query: str) -> list[str] | None:
        """Return the ids that were answered when this query had waited, once; None if it was not recorded."""
        return waits.popleft() if (waits := self._waits.get((run, query))) else None

    def was_cancelled(self, run: str) -> bool:
        """Whether a child run, or one above it, was cancelled when it was recorded."""
        return any(run == each or run.startswith(f"{each}.") for each in self._cancelled)

    def difference(self, request: Request, id: CallId) -> str:
        """Return a message with the differences of an unrecorded request from the nearest recorded one.

        Args:
            request: The request.
            id: Place of its call. The nearest is a recorded call of the same place, else the one with most equal lines.
        """
        if not self._calls:
            return f"{self.path} holds no calls"
        ours = _lines_of(without_secrets(request))
        near = [call for call in self._calls if call.id == id]
        nearest = near[0] if near else max(self._calls, key=lambda call: _likeness(_lines_of(call.request), ours))
        import difflib

        changes = difflib.unified_diff(_lines_of(nearest.request), ours, "recorded", "asked now", n=1, lineterm="")
        shown = [clip(line, LINE_CHARS) for line in changes]
        more = len(shown) - DIFFERENCE_LINES
        if more > 0:
            shown = [*shown[:DIFFERENCE_LINES], f"... and {more:,} more lines"]
        head = f"{self.path} has no reply to this call of the run ({id}); the nearest recorded is {nearest.id}:"
        return "\n".join([head, *shown])


def without_secrets(request: Request) -> Request:
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
    """Return the number of different common lines. It is fast for long conversations."""
    return len({*one} & {*other})


class RecordedClient(BaseClient):
    """Replies from a recording. No request is sent, and the cost is 0.

    After the first unrecorded call, all later calls of all clients fail, too: their differences would only hide it.
    """

    def __init__(self, recording: Recording, model_name: str) -> None:
        self.model_name = model_name
        self.context_tokens = recording.models.windows.get(model_name)
        self._recording = recording

    async def complete(self, request: LMRequest) -> LMReply:
        """Return the recorded reply.

        Raises:
            ReplayDiverged: No such call was recorded, or the recorded run was stopped in this call.
            ModelFailed: The recorded call failed; the message is the recorded one.
        """
        if self._recording.diverged is not None:
            raise ReplayDiverged(self._recording.diverged)
        asked = recorded_request(request)
        call = self._recording.find(asked)
        if call is None and request.id is not None and self._recording.was_cancelled(request.id.run):
            await asyncio.Event().wait()  # its run will be cancelled as it was before this call
        if call is None:
            self._recording.diverged = self._recording.difference(asked, request.id or CallId("?", 0, 0))
            raise ReplayDiverged(self._recording.diverged)
        if call.run_stopped:
            path = self._recording.path
            self._recording.diverged = f"the recording {path} ends here: its run was stopped in this call ({call.id})"
            raise ReplayDiverged(self._recording.diverged)
        if call.cancelled:
            await asyncio.Event().wait()  # a time limit cancelled it when it was recorded, and will again
        if call.failure is not None:
            raise ModelFailed(call.failure.message, "request" if call.failure.cause == "request" else "provider")
        if request.on_text is not None and call.text:
            request.on_text(call.text)
        return LMReply(call.text, Usage(1, 0, 0, 0.0, stored_calls=1), call.problem, call.model)


def recorded_request(request: LMRequest) -> Request:
    """Return the key of a request. It leaves out the built-in system prompt: that lists the machine's packages."""
    messages = [{"role": message.role, "content": message.content} for message in request.messages]
    if request.has_own_prompt:
        messages[0]["content"] = OWN_PROMPT
    temperature = msgspec.UNSET if request.temperature is None else float(request.temperature)
    return Request(messages, request.model, request.max_completion_tokens, request.depth, request.sample, temperature)


async def request_digests(requests: Sequence[LMRequest]) -> list[bytes]:
    """Return the digest of each request, by which its answer is found again without a copy of the prompt."""
    if sum(request.chars for request in requests) <= LARGE_CHARS:
        return [*map(_digest, requests)]
    return await asyncio.to_thread(lambda: [*map(_digest, requests)])


def _digest(request: LMRequest) -> bytes:
    return hashlib.blake2b(encode_escaped(recorded_request(request)), digest_size=DIGEST_BYTES).digest()
