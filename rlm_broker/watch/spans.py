"""Spans of run trees, made of their events. Live tracing and the export of trace files share this mapping.

A run is `invoke_agent`. Below it are its calls (`chat`) and its blocks (`execute_tool python`). A block's calls, tools
and child runs are below that block. A REPL of the user's own loop has no run: its spans have no parent here. Names
below `gen_ai.` are of the conventions (`conventions.py`), names below `rlm_broker.` this package's.

Events may come from a trace file in any order: a second beginning counts no more, and an end without a beginning is
left out. A tree's state goes with its root run; `MOST_TREES` bounds the trees without an end.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from rlm_broker.events.event import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    CallText,
    Event,
    ReplReady,
    RunEnded,
    RunStarted,
    ToolEnded,
    ToolStarted,
)
from rlm_broker.values.text import shorten
from rlm_broker.watch.conventions import error_type, provider_of

MOST_TREES: Final = 4_096
"""Trees with open spans at the same time. Beyond it, the least recently used one ends as `unfinished`."""
MOST_OPEN: Final = 16_384
"""Open spans of one tree; further ones are not made."""
MOST_RETRIES: Final = 32
"""Retries of one call as events of its span; further ones are left out."""
AGENT: Final = "rlm_broker"
"""Name of the agent, and of the instrumentation scope."""
CHAT: Final = "chat"
"""Operation of a call of a model."""

Value = str | bool | int | float
"""Value of an attribute."""
Attributes = dict[str, Value]
_Beginning = RunStarted | CallStarted | BlockStarted | ToolStarted
_End = RunEnded | CallEnded | BlockEnded | ToolEnded
_KEYS: Final[dict[type[Event], Callable[[Any], str]]] = {
    **dict.fromkeys((RunStarted, ReplReady, RunEnded), lambda event: f"run {event.run}"),
    **dict.fromkeys((CallStarted, CallText, CallRetried, CallEnded), lambda event: f"call {event.call}"),
    **dict.fromkeys((BlockStarted, BlockEnded), lambda event: f"run {event.run}.b{event.block}"),
    **dict.fromkeys((ToolStarted, ToolEnded), lambda event: f"run {event.run}.t{event.call}"),
}
"""Kind of an event → the key of its span."""


class SpanEvent(msgspec.Struct):
    """An event within a span. `time_ns` is Unix time in nanoseconds."""

    name: str
    time_ns: int
    attributes: Attributes


class Span(msgspec.Struct, eq=False, kw_only=True):
    """One operation.

    Attributes:
        tree: Id of the run tree.
        key: Name of the span within its tree.
        operation: Operation by the conventions.
        below: Open spans directly below this one, by key.
        start_ns, end_ns: Unix times in nanoseconds; `end_ns` is 0 until the end.
        attributes: Attributes known at the start.
        results: Attributes known at the end.
        events: Events within the span, in order.
        has_failed: Whether the operation failed.
        words: Why it failed, if content is on.
        handle: Object of the receiver's, kept with the span.
    """

    tree: str
    key: str
    name: str
    operation: str
    start_ns: int
    parent: "Span | None"
    below: dict[str, "Span"] = {}
    attributes: Attributes
    results: Attributes = {}
    events: list[SpanEvent] = []
    end_ns: int = 0
    has_failed: bool = False
    words: str = ""
    handle: Any = None


class _Tree(msgspec.Struct, eq=False):
    """The open spans of a tree, by key, the model for its code, and the time of its last event."""

    open: dict[str, Span] = {}
    sub_model: str = ""
    last_ns: int = 0


class Spans:
    """Makes spans of events, of any number of trees. It may be used from any thread.

    Args:
        begun: Called with each span at its start.
        ended: Called with each span at its end, children before their parents.
        has_content: Whether prompts, replies, code and output become attributes.
    """

    def __init__(
        self,
        begun: Callable[[Span], None],
        ended: Callable[[Span], None],
        *,
        has_content: bool = False,
    ) -> None:
        self._begun = begun
        self._ended = ended
        self._has_content = has_content
        self._trees: OrderedDict[str, _Tree] = OrderedDict()
        self._lock = threading.RLock()

    def take(self, event: Event) -> None:
        """Take one event."""
        if (key_of := _KEYS.get(type(event))) is None:
            return
        with self._lock:
            tree = self._trees.get(event.tree)
            if tree is None:
                tree = self._trees[event.tree] = _Tree()
                if len(self._trees) > MOST_TREES:
                    self._abandon(self._trees.popitem(last=False)[1])
            else:
                self._trees.move_to_end(event.tree)
            tree.last_ns = _ns(event.time)
            span = tree.open.get(key := key_of(event))
            if span is not None:
                self._go_on(event, tree, span)
            elif isinstance(event, _Beginning) and len(tree.open) < MOST_OPEN:
                self._begin(event, tree, key)
            if not tree.open:
                self._trees.pop(event.tree, None)

    def close(self) -> None:
        """End all open spans as `unfinished`, at the times of the last events of their trees."""
        with self._lock:
            while self._trees:
                self._abandon(self._trees.popitem(last=False)[1])

    # -- beginnings --------------------------------------------------------------------------------------------------

    def _begin(self, event: _Beginning, tree: _Tree, key: str) -> None:
        match event:
            case RunStarted(run=run, block=block):
                name, own = f"invoke_agent {AGENT}", self._of_run(event, tree)
                parent = _block_or_run(tree, run.rpartition(".")[0], block)
            case CallStarted(run=run, block=block):
                own = self._of_call(event, tree)
                name = f"{CHAT} {own.get('gen_ai.request.model', '')}".strip()
                parent = _block_or_run(tree, run, block)
            case BlockStarted(run=run, block=block):
                code = _json({"code": bounded(event.code)}) if self._has_content else None
                name, own = "execute_tool python", _of_tool("python", "extension", block, code)
                own["rlm_broker.block.turn"] = event.iteration
                parent = tree.open.get(f"run {run}")
            case ToolStarted(run=run, block=block):
                tool, arguments = name_text(event.tool), bounded(event.arguments) if self._has_content else None
                name, own = f"execute_tool {tool}", _of_tool(tool, "function", block, arguments)
                own["gen_ai.tool.call.id"] = f"{name_text(run)}:{event.call}"
                parent = _block_or_run(tree, run, block)
        operation = name.partition(" ")[0]
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "rlm_broker.run.id": name_text(event.tree),
            "rlm_broker.run.name": name_text(event.run),
            **own,
        }
        span = tree.open[key] = Span(
            tree=event.tree,
            key=key,
            name=name,
            operation=operation,
            start_ns=tree.last_ns,
            parent=parent,
            attributes=attributes,
        )
        if parent is not None:
            parent.below[key] = span
        self._begun(span)

    def _of_run(self, event: RunStarted, tree: _Tree) -> Attributes:
        attributes: Attributes = {
            "gen_ai.provider.name": provider_of(event.model),
            "gen_ai.agent.name": AGENT,
            "gen_ai.request.model": name_text(event.model),
            "rlm_broker.run.depth": event.depth,
        }
        if not event.depth:
            tree.sub_model = str(event.metadata.get("sub_model") or "")
            attributes["gen_ai.agent.version"] = name_text(str(event.metadata.get("version", "")))
        if self._has_content and event.question is not None:
            attributes["gen_ai.input.messages"] = prompt_value(event.question)
        return attributes

    def _of_call(self, event: CallStarted, tree: _Tree) -> Attributes:
        model = name_text(event.requested_model or _model_of(tree, event))
        attributes: Attributes = {"gen_ai.provider.name": provider_of(model), "rlm_broker.call.number": event.call}
        if model:
            attributes["gen_ai.request.model"] = model
        if event.batch:
            attributes |= {"rlm_broker.call.batch": event.batch, "rlm_broker.call.batch_size": event.of}
        if self._has_content:
            attributes["gen_ai.input.messages"] = prompt_value(event.prompt)
            if event.system is not None:
                attributes["gen_ai.system_instructions"] = instructions_value(event.system)
        return attributes

    # -- what comes later --------------------------------------------------------------------------------------------

    def _go_on(self, event: Event, tree: _Tree, span: Span) -> None:
        match event:
            case CallText():
                if "gen_ai.request.stream" not in span.results:
                    span.results["gen_ai.request.stream"] = True
                    span.results["gen_ai.response.time_to_first_chunk"] = max(0, tree.last_ns - span.start_ns) / 1e9
            case CallRetried():
                if len(span.events) < MOST_RETRIES:
                    self._retry(event, span)
            case ReplReady(isolation=isolation, duration_s=duration_s):
                span.results["rlm_broker.repl.isolation"] = name_text(isolation.level)
                span.results["rlm_broker.repl.start_s"] = duration_s
            case CallEnded() | BlockEnded() | ToolEnded() | RunEnded():
                self._finish(event, tree, span)
                self._end(tree, span)

    def _finish(self, event: _End, tree: _Tree, span: Span) -> None:
        match event:
            case CallEnded():
                self._finish_call(event, span)
            case BlockEnded():
                self._finish_block(event, span)
            case ToolEnded(error=None):
                if self._has_content:
                    span.results["gen_ai.tool.call.result"] = bounded(event.result)
            case ToolEnded(error=str(error)):
                self._fail(span, error_type(error), error)
            case RunEnded():
                for each in reversed(_all_below(span) if event.depth else list(tree.open.values())):
                    if each is not span:
                        self._end_unfinished(tree, each)
                self._finish_run(event, span)

    def _retry(self, event: CallRetried, span: Span) -> None:
        facts: Attributes = {
            "rlm_broker.retry.attempt": event.attempt,
            "rlm_broker.retry.wait_s": event.wait_s,
            "error.type": error_type(event.reason),
        }
        if self._has_content:
            facts["rlm_broker.retry.reason"] = bounded(event.reason)
        span.events.append(SpanEvent("rlm_broker.retry", _ns(event.time), facts))

    def _finish_call(self, event: CallEnded, span: Span) -> None:
        usage, results = event.usage, span.results
        if event.error is None:
            results["gen_ai.usage.input_tokens"] = usage.total_input_tokens
            results["gen_ai.usage.output_tokens"] = usage.total_output_tokens
            if self._has_content:
                results["gen_ai.output.messages"] = reply_value(event.response)
        else:
            self._fail(span, error_type(event.error), event.error)
        if usage.cached_input_tokens:
            results["gen_ai.usage.cache_read.input_tokens"] = usage.cached_input_tokens
        if event.model:
            model = results["gen_ai.response.model"] = name_text(event.model)
            if "gen_ai.request.model" not in span.attributes:  # the loop is the user's own, and named no model
                span.name = f"{CHAT} {model}"
                results |= {"gen_ai.request.model": model, "gen_ai.provider.name": provider_of(model)}
        if usage.stored_calls:
            results["rlm_broker.call.stored"] = True
        if event.is_remembered:
            results["rlm_broker.call.remembered"] = True
        if usage.total_cost is not None:
            results["rlm_broker.cost_usd"] = usage.total_cost

    def _finish_block(self, event: BlockEnded, span: Span) -> None:
        block = event.outcome
        span.results["rlm_broker.block.status"] = block.status
        if block.exit_code is not None:
            span.results["rlm_broker.block.exit_code"] = block.exit_code
        if block.limit is not None:
            span.results["rlm_broker.limit"] = name_text(block.limit)
        if self._has_content:
            span.results["gen_ai.tool.call.result"] = output_value(block.stdout, block.stderr, block.error)
        if block.status not in ("ok", "exited"):
            self._fail(span, error_type(block.error or "") if block.status == "error" else block.status, block.error)

    def _finish_run(self, event: RunEnded, span: Span) -> None:
        total = event.usage.total
        span.results |= {
            "rlm_broker.run.outcome": name_text(event.kind),
            "rlm_broker.run.turns": event.iterations,
            # Of the tree below, and so under names of this package: readers add up `gen_ai.usage` over all spans.
            "rlm_broker.usage.calls": total.total_calls,
            "rlm_broker.usage.stored_calls": total.stored_calls,
            "rlm_broker.usage.input_tokens": total.total_input_tokens,
            "rlm_broker.usage.output_tokens": total.total_output_tokens,
        }
        if event.cost_usd is not None:
            span.results["rlm_broker.cost_usd"] = event.cost_usd
        if event.limit is not None:
            span.results["rlm_broker.limit"] = name_text(event.limit)
        if self._has_content and event.response is not None:
            span.results["gen_ai.output.messages"] = reply_value(event.response)
        if event.kind not in ("answered", "stopped"):
            self._fail(span, name_text(event.kind), event.error)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _fail(self, span: Span, kind: str, words: str | None) -> None:
        span.has_failed = True
        span.results["error.type"] = kind
        if self._has_content:
            span.words = bounded(words or "")

    def _end(self, tree: _Tree, span: Span) -> None:
        del tree.open[span.key]
        if span.parent is not None:
            span.parent.below.pop(span.key, None)
        span.end_ns = max(tree.last_ns, span.start_ns)
        self._ended(span)

    def _end_unfinished(self, tree: _Tree, span: Span) -> None:
        self._fail(span, "unfinished", None)
        self._end(tree, span)

    def _abandon(self, tree: _Tree) -> None:
        """End all open spans of a tree, the last one first."""
        for span in reversed(list(tree.open.values())):
            self._end_unfinished(tree, span)


def _of_tool(tool: str, kind: str, block: int, arguments: str | None) -> Attributes:
    attributes: Attributes = {
        "gen_ai.tool.name": tool,
        "gen_ai.tool.type": kind,
        "gen_ai.agent.name": AGENT,
        "rlm_broker.block.number": block,
    }
    return attributes if arguments is None else {**attributes, "gen_ai.tool.call.arguments": arguments}


def _block_or_run(tree: _Tree, run: str, block: int) -> Span | None:
    """Return the span of a run's block; if it is not open, the run's."""
    return tree.open.get(f"run {run}.b{block}") or tree.open.get(f"run {run}")


def _model_of(tree: _Tree, event: CallStarted) -> str:
    """Return the model of a call without a name: the run's own, or for code the tree's sub-model."""
    run = tree.open.get(f"run {event.run}")
    if event.block and tree.sub_model:
        return tree.sub_model
    return "" if run is None else str(run.attributes["gen_ai.request.model"])


def _all_below(span: Span) -> list[Span]:
    """Return all open spans below one, parents before their children. A trace may nest them without a bound."""
    found = list(span.below.values())
    for each in found:
        found += each.below.values()
    return found


def _ns(seconds: float) -> int:
    """Return Unix seconds as whole nanoseconds; 0 for an impossible time."""
    return int(seconds * 1e6) * 1_000 if 0 <= seconds < 1e10 else 0


# -- texts as the values of attributes: bounded, and prompts and replies in the conventions' form ----------------------

MOST_CHARS: Final = 16_384
"""Characters of one text in an attribute; longer text is cut, and the cut is marked."""
NAME_CHARS: Final = 200
"""Characters of a model's, a run's or a tool's name; longer ones are cut."""
MOST_MESSAGES: Final = 16
"""Messages kept of one prompt: the last."""


def name_text(text: str) -> str:
    """Return a name, cut to `NAME_CHARS` characters."""
    return _encodable(text[:NAME_CHARS])


def bounded(text: str) -> str:
    """Return a text, cut to `MOST_CHARS` characters."""
    return _encodable(shorten(text, MOST_CHARS, end=0, gap=""))


def instructions_value(system: str) -> str:
    """Return the value of `gen_ai.system_instructions`."""
    return _json([_part(system)])


def prompt_value(prompt: str | list[Any]) -> str:
    """Return the value of `gen_ai.input.messages` for a text, or for a list of chat messages."""
    if isinstance(prompt, str):
        return _json([_message("user", prompt)])
    messages = [each for each in prompt if isinstance(each, dict)][-MOST_MESSAGES:]
    return _json([_message(name_text(str(each.get("role", "user"))), each.get("content")) for each in messages])


def reply_value(reply: str) -> str:
    """Return the value of `gen_ai.output.messages` for one reply."""
    return _json([{**_message("assistant", reply), "finish_reason": "stop"}])


def output_value(stdout: str, stderr: str, error: str | None) -> str:
    """Return the value of `gen_ai.tool.call.result` for a block."""
    texts = {"stdout": stdout, "stderr": stderr, "error": error or ""}
    return _json({name: bounded(text) for name, text in texts.items() if text})


def _message(role: str, content: Any) -> dict[str, Any]:
    """Return one message. Pictures and other parts without text are named by their type alone."""
    if isinstance(content, str):
        return {"role": role, "parts": [_part(content)]}
    parts = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    return {"role": role, "parts": [_part(each.get("text"), each.get("type")) for each in parts[:MOST_MESSAGES]]}


def _part(text: Any, kind: Any = None) -> dict[str, Any]:
    if isinstance(text, str):
        return {"type": "text", "content": bounded(text)}
    return {"type": name_text(str(kind))}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _encodable(text: str) -> str:
    """Return a text without lone surrogates: an exporter would drop its whole batch for one."""
    return text if text.isascii() else text.encode(errors="replace").decode()
