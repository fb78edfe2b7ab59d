"""Responses as they are made: begun or resumed, told while their run goes on, and kept.

Theory of operation
-------------------
Each response has a task that follows its run and tells it into `ResponseEvents`. Clients follow these, so a response in
the background needs no client, and one that comes later sees what the first one has seen.

A response that is stored keeps its REPL (`LastingRepl`), so that the next response of the conversation finds its
variables. If that REPL is gone, or has gone on with another response, the next one begins with a new REPL: its context
is made of the files and long texts of the whole conversation, as if the client had sent all of it. In both cases code
finds the earlier messages in a variable, and `rlm.repl` says whether the variables are there.
"""

import asyncio
import contextlib
import secrets
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final

from rlm_broker.errors import RunCancelled
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.materials import Material, Text
from rlm_broker.serve.models import ServedModel
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.questions.client_tools import FunctionTool
from rlm_broker.serve.questions.conversation import divided, inline_file
from rlm_broker.serve.questions.options import MOST_ITEMS
from rlm_broker.serve.questions.outcome import RunOutcome
from rlm_broker.serve.questions.question import QuestionRequest
from rlm_broker.serve.questions.runs import BEGINNING, Asked, Since, Suspended
from rlm_broker.serve.questions.schemas import checked_in_turn
from rlm_broker.serve.responses.events import Teller
from rlm_broker.serve.responses.request import OUTPUTS, ResponseRequest
from rlm_broker.serve.responses.resource import Item, Resource, given_items, repeated
from rlm_broker.serve.responses.store import LastingRepl, Made, ResponseEvents, Responses

Lookup = Callable[[str, str], Material]
"""Returns the uploaded file of an id; the second argument is its place in the request, for errors."""


@dataclass(slots=True)
class ResponseConversation:
    """Items of a conversation, by what they are for.

    Attributes:
        system: Texts of system and developer messages.
        history: Messages before the last one, as plain values.
        before: Files and long texts of messages before the request, which a REPL that lives on has already.
        files: Files and long texts of messages of the request, but the last one.
        last: Texts and files of the last message of the user, in order; empty if there is none.
        results: Id of a call → result of the function, of the results after the last message.
        at: Place of the last message in the request.
    """

    system: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    before: list[Material] = field(default_factory=list)
    files: list[Material] = field(default_factory=list)
    last: list[Material] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    at: str = "input"


class Reader:
    """Reads items.

    Args:
        file_of: Returns uploaded files.
        inline_chars: Characters beyond which a text of an earlier message is a context, and no part of the variable.
    """

    def __init__(self, file_of: Lookup, inline_chars: int) -> None:
        self._file_of = file_of
        self._inline_chars = inline_chars

    def read(self, before: Sequence[Item], given: Sequence[Item]) -> ResponseConversation:
        """Return what the items of a conversation are for.

        Args:
            before: Items of the responses before this one.
            given: Items of the request.

        Raises:
            ApiError: 400: an item cannot be used, or the last one is not of the user or a function. 404: there is no
                such file.
        """
        read = ResponseConversation()
        items = [(item, "previous_response_id") for item in before]
        items += [(item, f"input.{number}") for number, item in enumerate(given)]
        last = max((n for n, (item, _) in enumerate(items) if item.get("role") == "user"), default=-1)
        for number, (item, at) in enumerate(items):
            if item["type"] == "message":
                if number > last and item["role"] == "assistant" and at.startswith("input."):
                    said = "the last message must be of the user, or a function_call_output"
                    raise ApiError(400, said, param=f"{at}.role")
                read.results.clear()
                self._add_message(read, item, at, is_last=number == last)
            elif item["type"] == "function_call":
                call = {"name": item["name"], "arguments": item["arguments"]}
                read.history.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif item["type"] == "function_call_output":
                text = self._output(item, at)
                read.results[item["call_id"]] = text
                read.history.append({"role": "tool", "content": text, "tool_call_id": item["call_id"]})
        if not any(item.get("role") == "user" or item["type"] == "function_call_output" for item in given):
            raise ApiError(400, "the input has no message of the user: ask a question", param="input")
        return read

    def _add_message(self, read: ResponseConversation, item: Item, at: str, *, is_last: bool) -> None:
        role, parts = item["role"], self._parts(item, f"{at}.content" if at.startswith("input.") else at)
        if role in ("system", "developer"):
            read.system += [part.text for part in parts if isinstance(part, Text)]
        elif is_last:
            read.last, read.at = parts, f"{at}.content"
        else:
            long = [part for part in parts if not isinstance(part, Text) or len(part.text) > self._inline_chars]
            (read.files if at.startswith("input.") else read.before).extend(long)
            shown = {id(part) for part in long}
            said = [_named(part) if id(part) in shown else part.text for part in parts if isinstance(part, Text)]
            said += [_named(part) for part in parts if not isinstance(part, Text)]
            read.history.append({"role": role, "content": said[0] if len(said) == 1 else said or ""})

    def _parts(self, item: Item, at: str) -> list[Material]:
        parts: list[Material] = []
        for number, part in enumerate(item["content"]):
            kind = part["type"]
            if kind == "input_file" and item["role"] == "user":
                parts.append(self._file(part, f"{at}.{number}"))
            elif kind == "input_file" or kind == "input_image":
                why = "images are not taken" if kind == "input_image" else "files are taken in messages of the user"
                raise ApiError(400, f"{at}.{number}: {why}", code="unsupported_content", param=f"{at}.{number}.type")
            else:
                parts.append(Text(f"text_{len(parts) + 1}", part["refusal"] if kind == "refusal" else part["text"]))
        return parts

    def _file(self, part: Mapping[str, Any], at: str) -> Material:
        if part.get("file_url") is not None:
            said = f"{at}.file_url is an address, and nothing is fetched: send file_id or file_data"
            raise ApiError(400, said, param=f"{at}.file_url")
        id, data = part.get("file_id"), part.get("file_data")
        if (id is None) == (data is None):
            raise ApiError(400, f"{at} must have either file_id or file_data", param=at)
        if id is not None:
            return self._file_of(id, f"{at}.file_id")
        return inline_file(data, part.get("filename"), f"{at}.file_data")

    def _output(self, item: Item, at: str) -> str:
        if isinstance(item["output"], str):
            return item["output"]
        if any("text" not in part for part in item["output"]):
            raise ApiError(400, f"{at}.output may have texts alone", code="unsupported_content", param=f"{at}.output")
        return "\n".join(part["text"] for part in item["output"])


def _named(part: Material) -> str:
    return f"[a text of {len(part.text):,} characters]" if isinstance(part, Text) else f"[file {part.name}]"


ID_BYTES: Final = 16
"""Random bytes of the id of a response, which an attacker cannot guess."""
MOST_CONVERSATION_BYTES: Final = 1 << 27
"""Bytes of all requests and answers of one conversation; a further request is refused."""


class Answering:
    """Makes responses.

    Args:
        parts: Parts of the server.
        responses: Responses of all keys.
    """

    def __init__(self, parts: Parts, responses: Responses) -> None:
        self._parts = parts
        self._responses = responses
        self._tasks: set[asyncio.Task[None]] = set()

    async def made(self, owner: Owner, request: ResponseRequest, size: int, key: str | None, fingerprint: str) -> Made:
        """Return the response to a request, whose run goes on.

        The caller joins its run before it awaits anything else; see `Asking.begin`.

        Args:
            owner: Owner of the response.
            request: The request.
            size: Bytes of its body.
            key, fingerprint: As for `QuestionRequest`.

        Raises:
            ApiError: The request cannot be used.
            Busy, MoneySpent, NotAllowed, UnknownHandle: As for `Asking.begin`.
        """
        request.require_supported()
        types = await _types(owner, request)
        model = self._parts.models.named(owner, request.model)
        before = self._before(owner, request, size)
        given = given_items(request)
        reader = Reader(lambda id, at: self._parts.file(owner, id, at), self._parts.settings.inline_chars)
        earlier = () if before is None else before.conversation
        if len(earlier) + len(given) > MOST_ITEMS:
            raise _too_large(f"{MOST_ITEMS:,} items")
        size += 0 if before is None else before.bytes
        said = reader.read(earlier, given)
        asked = self._resumed(owner, said)
        if asked is not None:
            made = _new(owner, asked, request, given, earlier, size)
            if isinstance(first := asked.about, Made):  # a chat completion may have begun the run
                made.repl, made.returning = first.repl, first.returning
            return self._begun(made, asked, request, asked.since)
        _require_no_open_call(before)
        said.files += [self._parts.file(owner, id, at) for id, at in request.file_ids()]
        async with contextlib.AsyncExitStack() as lending:
            repl, is_new = await self._repl(owner, before, request, lending)
            wanted = self._wanted(request, model, said, repl, is_new=is_new)
            wanted = replace(wanted, output_type=types[0], tools=types[1], key=key, fingerprint=fingerprint)
            asked = await self._parts.asking.begin(owner, wanted)
            if isinstance(known := asked.about, Made):  # the same request was sent before
                return known
            made = _new(owner, asked, request, given, earlier, size)
            if repl is not None:
                made.repl, repl.run = repl, asked.hosted.id
                made.returning = self._started(_returned(asked, repl, lending.pop_all()))
                made.resource.rlm["repl"] = "new" if is_new else "kept"
        asked.about = made
        return self._begun(made, asked, request, BEGINNING)

    async def settled(self) -> None:
        """Wait until all responses have been told. Their runs have ended, or end meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    # -- what a request asks for -------------------------------------------------------------------------------------

    def _before(self, owner: Owner, request: ResponseRequest, size: int) -> Made | None:
        if request.previous_response_id is None:
            return None
        made = self._responses.get(owner, request.previous_response_id, "previous_response_id")
        if made.bytes + size > MOST_CONVERSATION_BYTES:
            raise _too_large(f"{MOST_CONVERSATION_BYTES:,} bytes")
        if not made.resource.is_ended:
            said = f"the response {made.resource.id!r} goes on: wait for its end, or cancel it"
            raise ApiError(400, said, code="in_progress", param="previous_response_id")
        return made

    def _resumed(self, owner: Owner, said: ResponseConversation) -> Asked | None:
        """Return the run that waits for the results of a request. None: none waits, and a new one is to begin."""
        if not said.results:
            return None
        try:
            return self._parts.asking.resumed(owner, said.results, "input")
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND or not said.last:
                raise
            return None

    async def _repl(
        self, owner: Owner, before: Made | None, request: ResponseRequest, lending: contextlib.AsyncExitStack
    ) -> tuple[LastingRepl | None, bool]:
        """Return the REPL for a run, and whether it is a new one. None is one of the run's own."""
        repl = None if before is None else before.repl
        if before is not None and repl is not None and repl.last == before.resource.id and repl.is_held:
            repl.last = None  # claimed: another response after the same one gets a REPL of its own
            lending.callback(_unclaimed, repl, before.resource.id)
            await lending.enter_async_context(repl.lent())
            return repl, False
        if not request.is_stored:
            return None, True
        parts = self._parts
        made = LastingRepl(parts.rlm, parts.repls, owner, parts.settings.container_idle_s)
        await lending.enter_async_context(made.lent())
        return made, True

    def _wanted(
        self,
        request: ResponseRequest,
        model: ServedModel,
        said: ResponseConversation,
        repl: LastingRepl | None,
        *,
        is_new: bool,
    ) -> QuestionRequest:
        divide = divided(
            said.last,
            [*said.before, *said.files] if is_new else said.files,
            request.options,
            inline_chars=self._parts.settings.inline_chars,
            has_context=model.context is not None,
            param=said.at,
        )
        limits = request.options.limits(
            max_completion_tokens=request.max_output_tokens, max_blocks=request.max_tool_calls
        )
        return QuestionRequest(
            model=model,
            materials=divide.materials,
            value=request.options.context,
            question=divide.question,
            history=said.history,
            system="\n\n".join([*([request.instructions] if request.instructions else []), *said.system]),
            limits=limits,
            one_at_a_time=request.parallel_tool_calls is False,
            repl=None if repl is None else repl.persistent,
            outlives_s=None if request.background else 0.0,
        )

    # -- what becomes of it ------------------------------------------------------------------------------------------

    def _begun(self, made: Made, asked: Asked, request: ResponseRequest, since: Since) -> Made:
        """Begin to tell a response, and keep it."""
        if made.repl is not None:
            made.repl.last = made.resource.id
        if request.background:
            asked.hosted.outlive(None)
        if made.is_stored:
            self._responses.add(made)
        container = None
        if request.code_tool() is not None:
            container = f"cntr_{asked.hosted.id}" if made.repl is None else made.repl.id
        logs = OUTPUTS in (request.include or ())
        names = request.namespaces()
        teller = Teller(made.resource, made.journal, container=container, tells_logs=logs, namespaces=names)
        is_full = self._parts.runs.running >= self._parts.settings.max_runs
        teller.begin(is_queued=bool(request.background) or (is_full and asked.hosted.state == "queued"))
        self._started(_told(made, asked, teller, since))
        return made

    def _started(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _too_large(what: str) -> ApiError:
    said = f"the conversation has more than {what}: begin a new one, with files"
    return ApiError(413, said, code="too_large", param="previous_response_id")


async def _told(made: Made, asked: Asked, teller: Teller, since: Since) -> None:
    """Follow the run of a response, and tell it until it ends, or waits for the client."""
    try:
        async for step in asked.steps(since):
            if isinstance(step, Suspended):
                teller.called(step.calls)
            elif isinstance(step, RunOutcome):
                await made.returned()
                teller.ended(step)
            else:
                teller.tell(step)
    except Exception as error:  # noqa: BLE001 - each becomes the end of the response
        await made.returned()
        made.error, made.is_paid = error, asked.hosted.is_paid
        teller.failed(error)
    finally:
        made.ended_at = time.time()
        made.ended.set()


async def _types(owner: Owner, request: ResponseRequest) -> tuple[Mapping[str, Any] | None, Sequence[FunctionTool]]:
    """Return the type of the answer and the tools. Their check takes long, so it is done in a thread."""
    if request.text is None and not request.tools:
        return None, request.function_tools()
    return await checked_in_turn(owner, lambda: (request.output_type(), request.function_tools()))


def _unclaimed(repl: LastingRepl, last: str) -> None:
    """Leave the REPL to the response that has it, if no response after it has begun."""
    if repl.last is None:
        repl.last = last


async def _returned(asked: Asked, repl: LastingRepl, lending: contextlib.AsyncExitStack) -> None:
    """Give the REPL back when its run has ended. That of a run whose client has left, or that was cancelled, ends."""
    try:
        await asked.hosted.completion()
    except RunCancelled:
        repl.is_over = True
    except Exception:  # noqa: BLE001, S110 - the response tells it
        pass
    await lending.aclose()


def _require_no_open_call(before: Made | None) -> None:
    """Refuse to leave calls of functions without results, while the run waits for them."""
    if before is None or not before.is_suspended:
        return
    call = next((item["call_id"] for item in before.resource.output if item["type"] == "function_call"), None)
    if call is not None:
        said = f"the call {call!r} waits for its result: send a function_call_output, or cancel the response"
        raise ApiError(400, said, param="input")


def _new(
    owner: Owner, asked: Asked, request: ResponseRequest, given: tuple[Item, ...], earlier: tuple[Item, ...], size: int
) -> Made:
    id = f"resp_{secrets.token_hex(ID_BYTES)}"
    resource = Resource(id, request.model, repeated(request), rlm={"run": asked.hosted.id})
    return Made(owner, resource, ResponseEvents(), weakref.ref(asked), given, earlier, size, request.is_stored)
