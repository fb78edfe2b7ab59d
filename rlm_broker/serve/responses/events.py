"""Events of a run, told as events of a response.

Theory of operation
-------------------
A response is told once, by one `Teller`, into its `ResponseEvents`. Followers read these, also after the end. So each
of them sees the same events with the same numbers, whenever it comes.

Of the run's tree, only the loop of the root run is told: each turn's prose is an item `reasoning`, and each block an
item `code_interpreter_call` if the request names that tool. A child's calls count in the usage alone. An answer is
known only when the run has ended, since the run may doubt it: its text is then told in pieces.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rlm_broker.errors import RlmBrokerError, RunCancelled
from rlm_broker.events.event import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    CallText,
    Event,
)
from rlm_broker.results import Block
from rlm_broker.serve.errors import api_error_of
from rlm_broker.serve.prose import LiveProse
from rlm_broker.serve.questions.client_tools import ClientCall
from rlm_broker.serve.questions.outcome import RunOutcome, output_of
from rlm_broker.serve.responses import resource as items
from rlm_broker.serve.responses.resource import Item, Resource, Status
from rlm_broker.serve.responses.store import ResponseEvents
from rlm_broker.usage import Tally
from rlm_broker.values.text import shorten

PIECE_CHARS: Final = 2_000
"""Characters of one piece of an answer."""
LOGS_CHARS: Final = 20_000
"""Characters of a block's output that an item has; longer output is cut."""
_ENDS: Final = {"completed": "completed", "failed": "failed"}
"""Kind of the last event by status. Both schemas lack one for "cancelled": it is told as incomplete."""


class Teller:
    """Tells one response.

    Args:
        resource: The response, which is kept up to date.
        journal: Receiver of the events.
        container: Id of the REPL if blocks are told as items, else None.
        tells_logs: Whether items of blocks have their output.
        namespaces: Namespace and name of functions in namespaces, by the name that code has for them.
    """

    def __init__(
        self,
        resource: Resource,
        journal: ResponseEvents,
        *,
        container: str | None = None,
        tells_logs: bool = False,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.resource = resource
        self._journal = journal
        self._container = container
        self._tells_logs = tells_logs
        self._namespaces = namespaces or {}
        self._tally = Tally()
        self._count = 0
        self._call: int | None = None
        """Number of the call of the root's loop that is under way."""
        self._prose: LiveProse | None = None
        self._has_streamed = False
        self._thought: str | None = None
        """Text of the open item `reasoning`, or None if none is open."""
        self._block: Item | None = None

    def begin(self, *, is_queued: bool) -> None:
        """Tell that the response exists."""
        self.resource.status = "queued" if is_queued else "in_progress"
        self._tell_whole("created")
        self._tell_whole("queued" if is_queued else "in_progress")

    def tell(self, event: Event) -> None:
        """Tell an event of the run's tree, if the response shows it."""
        if self.resource.status == "queued":
            self.resource.status = "in_progress"
            self._tell_whole("in_progress")
        if isinstance(event, CallEnded):
            self._tally.add(event.usage)
        if event.depth:
            return
        match event:
            case CallStarted(block=0, call=call) if self._block is None:
                self._call, self._prose, self._has_streamed = call, LiveProse(), False
            case CallText(call=call, text=text) if call == self._call and self._prose is not None:
                self._has_streamed = True
                self._think(self._prose.feed(text))
            case CallRetried(call=call) if call == self._call:
                self._end_thought()
                self._prose = LiveProse()
            case CallEnded(call=call, response=response) if call == self._call and self._prose is not None:
                self._think(("" if self._has_streamed else self._prose.feed(response)) + self._prose.end())
                self._end_thought()
                self._call = self._prose = None
            case BlockStarted(code=code):
                self._begin_block(code)
            case BlockEnded(outcome=outcome):
                self._end_block(outcome)

    def called(self, calls: Iterable[ClientCall]) -> None:
        """End the response with calls of functions of the client."""
        self._end_thought()
        self._interrupt_block()
        for call in calls:
            id, name = self._id("fc"), self._namespaces.get(call.name, (None, call.name))
            at = self._add(items.function_call(id, call.id, name, "", "in_progress"))
            place = {"item_id": id, "output_index": at}
            self._tell("response.function_call_arguments.delta", **place, delta=call.arguments)
            self._tell("response.function_call_arguments.done", **place, name=name[1], arguments=call.arguments)
            self._done(items.function_call(id, call.id, name, call.arguments, "completed"))
        self.resource.rlm |= {"cost_usd": self._tally.usage.total_cost, "calls": self._tally.usage.total_calls}
        self._end("completed")

    def ended(self, outcome: RunOutcome) -> None:
        """End the response with the outcome of the run."""
        status: Status = "completed" if outcome.is_whole else "incomplete"
        self.resource.rlm |= outcome.told(self.resource.rlm["run"])
        if outcome.text or outcome.is_whole:
            self._answer(outcome.text, status)
        self._end(status)

    def failed(self, error: Exception) -> None:
        """End the response with what ended the run."""
        self.resource.rlm |= {"cost_usd": self._tally.usage.total_cost, "calls": self._tally.usage.total_calls}
        if isinstance(error, RunCancelled):
            self._end("cancelled")
            return
        said = api_error_of(error)
        codes = {429: "rate_limit_exceeded", **dict.fromkeys(range(500, 600), "server_error")}
        self.resource.error = {"code": codes.get(said.status, "invalid_prompt"), "message": said.message}
        self.resource.rlm["error"] = error.kind if isinstance(error, RlmBrokerError) else said.code
        self._end("failed")

    # -- items -------------------------------------------------------------------------------------------------------

    def _think(self, text: str) -> None:
        if self._thought is None:
            text = text.lstrip()
            if not text:
                return
            id = self._id("rs")
            at = self._add(items.reasoning(id, None, "in_progress"))
            self._thought = ""
            self._tell(
                "response.reasoning_summary_part.added",
                item_id=id,
                output_index=at,
                summary_index=0,
                part=items.summary_part(""),
            )
        if text:
            self._thought += text
            self._tell("response.reasoning_summary_text.delta", **self._summary_place(), delta=text)

    def _end_thought(self) -> None:
        if (text := self._thought) is None:
            return
        place = self._summary_place()
        self._tell("response.reasoning_summary_text.done", **place, text=text)
        self._tell("response.reasoning_summary_part.done", **place, part=items.summary_part(text))
        self._done(items.reasoning(place["item_id"], text, "completed"))
        self._thought = None

    def _summary_place(self) -> dict[str, Any]:
        return {"item_id": self._last_id("rs"), "output_index": len(self.resource.output), "summary_index": 0}

    def _begin_block(self, code: str) -> None:
        self._end_thought()
        self._block = {}
        if self._container is None:
            return
        id = self._id("ci")
        self._block = items.code_call(id, self._container, code, "in_progress")
        at = self._add(items.code_call(id, self._container, "", "in_progress"))
        place = {"item_id": id, "output_index": at}
        self._tell("response.code_interpreter_call.in_progress", **place)
        self._tell("response.code_interpreter_call_code.delta", **place, delta=code)
        self._tell("response.code_interpreter_call_code.done", **place, code=code)
        self._tell("response.code_interpreter_call.interpreting", **place)

    def _end_block(self, outcome: Block) -> None:
        block, self._block = self._block, None
        if not block:
            return
        place = {"item_id": block["id"], "output_index": len(self.resource.output)}
        self._tell("response.code_interpreter_call.completed", **place)
        logs = _logs(outcome) if self._tells_logs else None
        status = {"ok": "completed", "exited": "completed", "error": "failed", "killed": "failed"}.get(outcome.status)
        self._done(items.code_call(block["id"], block["container_id"], block["code"], status or "incomplete", logs))

    def _interrupt_block(self) -> None:
        block, self._block = self._block, None
        if block:
            self._done({**block, "status": "incomplete"})

    def _answer(self, text: str, status: str) -> None:
        self._end_thought()
        self._interrupt_block()
        id = self._id("msg")
        at = self._add({**items.message(id, "", "in_progress"), "content": []})
        place = {"item_id": id, "output_index": at, "content_index": 0}
        self._tell("response.content_part.added", **place, part=items.text_part(""))
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            self._tell("response.output_text.delta", **place, delta=piece, logprobs=[])
        self._tell("response.output_text.done", **place, text=text, logprobs=[])
        self._tell("response.content_part.done", **place, part=items.text_part(text))
        self._done(items.message(id, text, status))

    def _end(self, status: Status) -> None:
        self._end_thought()
        self._interrupt_block()
        self.resource.status = status
        self.resource.usage = self._tally.usage
        self.resource.completed_at = int(time.time()) if status == "completed" else None
        self._tell_whole(_ENDS.get(status, "incomplete"))
        self._journal.close()

    def _add(self, item: Item) -> int:
        at = len(self.resource.output)
        self._tell("response.output_item.added", output_index=at, item=item)
        return at

    def _done(self, item: Item) -> None:
        self._tell("response.output_item.done", output_index=len(self.resource.output), item=item)
        self.resource.output.append(item)

    def _id(self, prefix: str) -> str:
        self._count += 1
        return self._last_id(prefix)

    def _last_id(self, prefix: str) -> str:
        return f"{prefix}_{self.resource.id.removeprefix('resp_')}{self._count:04x}"

    def _tell_whole(self, kind: str) -> None:
        self._tell(f"response.{kind}", response=self.resource.body())

    def _tell(self, kind: str, **fields: Any) -> None:
        self._journal.add(kind, fields)


def _logs(outcome: Block) -> str:
    """Return the output of a block, with the reason of its end, of at most `LOGS_CHARS` characters."""
    return shorten(output_of(outcome), LOGS_CHARS)
