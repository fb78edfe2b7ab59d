"""Events of a run, reported as events of a response.

Theory of operation
-------------------
A response is written once, by one `Teller`, into its `ResponseEvents`. Followers read these, also after the end. So all
of them see the same events with the same numbers, whenever they come.

Of the run's tree, only the loop of the root run is told: each turn's prose is an item `reasoning`, and each block an
item `code_interpreter_call` if the request names that tool. A child's calls count in the usage alone. An answer is
known only when the run has ended, since the run may doubt it: its text is then reported in pieces.
"""

import re
import time
from collections.abc import Iterable
from typing import Any, Final

from rlm_broker import (
    Block,
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    CallText,
    Event,
    RlmBrokerError,
    RunCancelled,
    Usage,
)
from rlm_broker.serve.errors import api_error_of
from rlm_broker.serve.questions.client_tools import ClientCall
from rlm_broker.serve.questions.conversation import Item
from rlm_broker.serve.questions.runs import BEGINNING, RunOutcome, Since, output_of
from rlm_broker.serve.responses import bodies as items
from rlm_broker.serve.responses.bodies import Resource, Status, item_id, text_part
from rlm_broker.serve.responses.store import ResponseEvents
from rlm_broker.values.text import shorten

PIECE_CHARS: Final = 2_000
"""Characters of one piece of an answer."""
LOGS_CHARS: Final = 20_000
"""Characters of a block's output in an item; longer output is cut."""
_ENDS: Final = {"completed": "completed", "failed": "failed"}
"""Kind of the last event by status. Both schemas lack one for "cancelled": it is reported as incomplete."""


class Teller:
    """Reports one response.

    Args:
        resource: The response, kept up to date.
        journal: Receiver of the events.
        container: Id of the REPL if blocks are reported as items, else None.
        tells_logs: Whether items of blocks have their output.
        since: Point of the run at which the response before has ended.
    """

    def __init__(
        self,
        resource: Resource,
        journal: ResponseEvents,
        *,
        container: str | None = None,
        tells_logs: bool = False,
        since: Since = BEGINNING,
    ) -> None:
        self.resource = resource
        self._journal = journal
        self._container = container
        self._tells_logs = tells_logs
        self._since = since
        self._count = 0
        self._call: int | None = None
        """Number of the call of the root's loop under way."""
        self._prose: LiveProse | None = None
        self._has_streamed = False
        self._thought: str | None = None
        """Text of the open item `reasoning`, or None if none is open."""
        self._block: Item | None = None

    def begin(self, *, is_queued: bool) -> None:
        """Report that the response exists."""
        self.resource.status = "queued" if is_queued else "in_progress"
        self._tell_whole("created")
        self._tell_whole("queued" if is_queued else "in_progress")

    def tell(self, event: Event) -> None:
        """Report an event of the run's tree, if the response shows it."""
        if self.resource.status == "queued":
            self.resource.status = "in_progress"
            self._tell_whole("in_progress")
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

    def ended(self, outcome: RunOutcome, told: dict[str, Any]) -> None:
        """End the response with the outcome of the run, or with calls of functions of the client."""
        status: Status = "completed" if outcome.is_whole else "incomplete"
        self.resource.rlm |= told
        if outcome.calls:
            self._call_functions(outcome.calls)
        elif outcome.text or outcome.is_whole:
            self._answer(outcome.text, status)
        self._end(status, outcome.usage)

    def failed(self, error: Exception, usage: Usage) -> None:
        """End the response with what ended the run, and with its partial answer if it has one."""
        self.resource.rlm |= {"cost_usd": usage.total_cost, "calls": usage.total_calls}
        if isinstance(error, RunCancelled):
            self._end("cancelled", usage)
            return
        if partial := getattr(error, "partial_answer", None):
            self._answer(partial, "incomplete")
        said = api_error_of(error)
        codes = {429: "rate_limit_exceeded", **dict.fromkeys(range(500, 600), "server_error")}
        self.resource.error = {"code": codes.get(said.status, "invalid_prompt"), "message": said.message}
        self.resource.rlm["error"] = error.kind if isinstance(error, RlmBrokerError) else said.code
        self._end("failed", usage)

    # -- items -------------------------------------------------------------------------------------------------------

    def _think(self, text: str) -> None:
        if self._thought is None:
            if not (text := text.lstrip()):
                return
            item, self._thought = items.reasoning(self._id("rs"), None, "in_progress"), ""
            added = {"summary_index": 0, "part": items.summary_part("")}
            self._begin_item(item, ("reasoning_summary_part.added", added))
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
        self._begin_item(
            items.code_call(id, self._container, "", "in_progress"),
            ("code_interpreter_call.in_progress", {}),
            ("code_interpreter_call_code.delta", {"delta": code}),
            ("code_interpreter_call_code.done", {"code": code}),
            ("code_interpreter_call.interpreting", {}),
        )

    def _end_block(self, outcome: Block) -> None:
        block, self._block = self._block, None
        if not block:
            return
        place = {"item_id": block["id"], "output_index": len(self.resource.output)}
        self._tell("response.code_interpreter_call.completed", **place)
        logs = shorten(output_of(outcome), LOGS_CHARS) if self._tells_logs else None
        status = {"ok": "completed", "exited": "completed", "error": "failed", "killed": "failed"}.get(outcome.status)
        self._done(items.code_call(block["id"], block["container_id"], block["code"], status or "incomplete", logs))

    def _close_items(self) -> None:
        """End the open thought, and a block under way as incomplete."""
        self._end_thought()
        block, self._block = self._block, None
        if block:
            self._done({**block, "status": "incomplete"})

    def _answer(self, text: str, status: str) -> None:
        self._close_items()
        id, at = self._id("msg"), {"content_index": 0}
        pieces = [text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS)]
        self._begin_item(
            {**items.message(id, "", "in_progress"), "content": []},
            ("content_part.added", {**at, "part": text_part("")}),
            *(("output_text.delta", {**at, "delta": piece, "logprobs": []}) for piece in pieces),
            ("output_text.done", {**at, "text": text, "logprobs": []}),
            ("content_part.done", {**at, "part": text_part(text)}),
        )
        self._done(items.message(id, text, status))

    def _call_functions(self, calls: Iterable[ClientCall]) -> None:
        self._close_items()
        for call in calls:
            id = self._id("fc")
            self._begin_item(
                items.function_call(id, call, "", "in_progress"),
                ("function_call_arguments.delta", {"delta": call.arguments}),
                ("function_call_arguments.done", {"name": call.name, "arguments": call.arguments}),
            )
            self._done(items.function_call(id, call, call.arguments, "completed"))

    def _end(self, status: Status, usage: Usage) -> None:
        self._close_items()
        self.resource.status = status
        self.resource.usage = items.usage_of(*self._since.more(usage))
        self.resource.completed_at = int(time.time()) if status == "completed" else None
        self._tell_whole(_ENDS.get(status, "incomplete"))
        self._journal.close()

    def _begin_item(self, item: Item, *events: tuple[str, dict[str, Any]]) -> None:
        """Report a new item, and the events in it, each as its kind and its fields."""
        at = len(self.resource.output)
        self._tell("response.output_item.added", output_index=at, item=item)
        for kind, fields in events:
            self._tell(f"response.{kind}", item_id=item["id"], output_index=at, **fields)

    def _done(self, item: Item) -> None:
        self._tell("response.output_item.done", output_index=len(self.resource.output), item=item)
        self.resource.output.append(item)

    def _id(self, prefix: str) -> str:
        self._count += 1
        return self._last_id(prefix)

    def _last_id(self, prefix: str) -> str:
        return item_id(prefix, self.resource.id, f"o{self._count:04x}")

    def _tell_whole(self, kind: str) -> None:
        self._tell(f"response.{kind}", response=self.resource.body())

    def _tell(self, kind: str, **fields: Any) -> None:
        self._journal.add(kind, fields)


MOST_HELD: Final = 200
"""Characters of a line held back while it may become a fence. A longer line is shown."""
_OPENS = re.compile(r"^[ \t]*+(?:(?:[-*+]|\d{1,3}[.)])[ \t]+)?(?P<mark>`{3,}+|~{3,}+)[ \t]*+(?P<info>[^`\n]*+)$")
_OPENS_AFTER_WORDS = re.compile(r"(?P<mark>`{3,}+)[ \t]*+(?P<info>repl|python3?|py)[ \t]*+$", re.IGNORECASE)
_RUNNABLE = re.compile(r"repl|python3?|py", re.IGNORECASE)
_TAG = re.compile(r"[\s{.]*+([\w+#-]{0,24})")
_BEGINNINGS: Final = frozenset("`~-*+0123456789")
"""Characters with which a line may begin that becomes a fence, or a fence in a list."""
_FINALS: Final = ("FINAL(", "FINAL:", "FINAL_VAR(", "SUBMIT(")


class LiveProse:
    """Splits the prose off one reply that arrives in pieces. What it has returned stands.

    `parsing.parse_reply` is the judge of a whole reply. This one sees no further than the current line, so it may
    show code after an unusual fence; such code is harmless text.
    """

    def __init__(self) -> None:
        self._line = ""
        self._shown = 0
        """Characters of the line returned already."""
        self._mark = ""
        self._hides = False
        self._is_over = False

    def feed(self, piece: str) -> str:
        """Take a piece of the reply; return the prose certain by now."""
        out: list[str] = []
        *whole, rest = piece.replace("\r", "").split("\n")
        for part in whole:
            self._line += part
            out.append(self._ended_line())
        self._line += rest
        out.append(self._certain())
        return "".join(out)

    def end(self) -> str:
        """Return the prose held back, at the end of the reply."""
        return self._ended_line().removesuffix("\n")

    def _ended_line(self) -> str:
        line, shown = self._line, self._shown
        self._line, self._shown = "", 0
        if self._is_over:
            return ""
        if self._mark:
            if (closes := line.strip()).startswith(self._mark) and not closes.strip(self._mark[0]):
                hid, self._mark, self._hides = self._hides, "", False
                return "" if hid else f"{line[shown:]}\n"
            return "" if self._hides else f"{line[shown:]}\n"
        if _is_final(line):
            self._is_over = True
            return ""
        if (opened := _OPENS.match(line) or _OPENS_AFTER_WORDS.search(line)) is not None:
            self._mark = opened["mark"]
            tag = _TAG.match(opened["info"])
            self._hides = tag is not None and _RUNNABLE.fullmatch(tag[1]) is not None
            if self._hides:
                before = line[: opened.start("mark")] if opened.re is _OPENS_AFTER_WORDS else ""
                return f"{before[shown:]}\n" if before.strip() else ""
        return f"{line[shown:]}\n"

    def _certain(self) -> str:
        """Return what of the unended line is prose however the line goes on: a backtick may begin a fence."""
        line, head = self._line, self._line.strip()
        may_be_else = not head or head[0] in _BEGINNINGS or any(final.startswith(head) for final in _FINALS)
        if self._is_over or self._hides or (not self._shown and (may_be_else or _is_final(line)) and not self._is_long):
            return ""
        ticks = -1 if self._is_long else line.find("`", self._shown)
        said = line[self._shown : len(line) if ticks < 0 else ticks]
        self._shown += len(said)
        return said

    @property
    def _is_long(self) -> bool:
        return len(self._line) >= MOST_HELD


def _is_final(line: str) -> bool:
    return line.strip().startswith(_FINALS)
