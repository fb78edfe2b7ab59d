"""Spans of run trees, made of their events. Live tracing and the export of trace files share this mapping.

A run is `invoke_agent`. Below it are its calls (`chat`) and its blocks (`execute_tool python`). The calls, the tools
and the child runs that a block asked for are below that block. A REPL of the user's own loop has no run: its spans have
no parent here.

Events may come from a trace file, so no order of theirs is believed: what began twice counts once, and what ends
without a beginning is left out. A tree's state goes with its root run. `MOST_TREES` bounds the trees that never end.
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
from rlm_broker.watch import conventions as names

MOST_TREES: Final = 4_096
"""Trees whose spans are open at the same time. Of more, the one whose last event is oldest ends as `unfinished`."""
MOST_OPEN: Final = 16_384
"""Spans of one tree that are open at the same time; further ones are not made."""
MOST_RETRIES: Final = 32
"""Retries of one call that become events of its span."""
GOOD_ENDS: Final = frozenset({"answered", "stopped"})
_GOOD_BLOCKS: Final = frozenset({"ok", "exited"})

Value = str | bool | int | float
"""Value of an attribute."""


class SpanEvent(msgspec.Struct):
    """An event within a span. `time_ns` is Unix time in nanoseconds."""

    name: str
    time_ns: int
    attributes: dict[str, Value]


class Span(msgspec.Struct, eq=False, kw_only=True):
    """One operation.

    Attributes:
        tree: Id of the run tree.
        key: Name of the span within its tree.
        operation: Operation by the conventions.
        below: Open spans whose parent this is, by key.
        start_ns, end_ns: Unix times in nanoseconds; `end_ns` is 0 until the end.
        attributes: Attributes known at the start.
        results: Attributes known at the end.
        events: Events within the span, in order.
        has_failed: Whether the operation failed.
        words: Why it failed, if content is on.
        handle: Object of the receiver's, which it keeps with the span.
    """

    tree: str
    key: str
    name: str
    operation: str
    start_ns: int
    parent: "Span | None"
    below: dict[str, "Span"] = {}
    attributes: dict[str, Value]
    results: dict[str, Value] = {}
    events: list[SpanEvent] = []
    end_ns: int = 0
    has_failed: bool = False
    words: str = ""
    handle: Any = None


class _Tree(msgspec.Struct, eq=False):
    """The open spans of a tree, by key, the model that its code asks, and the time of its last event."""

    open: dict[str, Span] = {}
    sub_model: str = ""
    last_ns: int = 0


class Spans:
    """Makes spans of events, of any number of trees. It may be used from any thread.

    Args:
        begun: Called with each span at its start.
        ended: Called with each span at its end, children before their parents.
        has_content: Whether prompts, replies, code and output become attributes.
        most_trees: Trees that are open at the same time.
    """

    def __init__(
        self,
        begun: Callable[[Span], None],
        ended: Callable[[Span], None],
        *,
        has_content: bool = False,
        most_trees: int = MOST_TREES,
    ) -> None:
        self._begun = begun
        self._ended = ended
        self._has_content = has_content
        self._most_trees = most_trees
        self._trees: OrderedDict[str, _Tree] = OrderedDict()
        self._lock = threading.RLock()
        self._takers: dict[type[Event], Callable[[Any, _Tree], None]] = {
            RunStarted: self._run_started,
            ReplReady: self._repl_ready,
            CallStarted: self._call_started,
            CallText: self._call_text,
            CallRetried: self._call_retried,
            CallEnded: self._call_ended,
            BlockStarted: self._block_started,
            BlockEnded: self._block_ended,
            ToolStarted: self._tool_started,
            ToolEnded: self._tool_ended,
            RunEnded: self._run_ended,
        }

    def take(self, event: Event) -> None:
        """Take one event."""
        taker = self._takers.get(type(event))
        if taker is None:
            return
        with self._lock:
            tree = self._trees.get(event.tree)
            if tree is None:
                tree = self._trees[event.tree] = _Tree()
                if len(self._trees) > self._most_trees:
                    self._abandon(self._trees.popitem(last=False)[1])
            else:
                self._trees.move_to_end(event.tree)
            tree.last_ns = _ns(event.time)
            taker(event, tree)
            if not tree.open:
                self._trees.pop(event.tree, None)

    @property
    def open_trees(self) -> int:
        """Number of trees that have open spans."""
        return len(self._trees)

    def close(self) -> None:
        """End all open spans as `unfinished`, at the times of the last events of their trees."""
        with self._lock:
            while self._trees:
                self._abandon(self._trees.popitem(last=False)[1])

    # -- the kinds of events -----------------------------------------------------------------------------------------

    def _run_started(self, event: RunStarted, tree: _Tree) -> None:
        above = event.run.rpartition(".")[0]
        attributes: dict[str, Value] = {
            names.OPERATION: names.INVOKE_AGENT,
            names.PROVIDER: names.provider_of(event.model),
            names.AGENT_NAME: names.SCOPE,
            names.REQUEST_MODEL: name_text(event.model),
            names.TREE: name_text(event.tree),
            names.RUN: name_text(event.run),
            names.DEPTH: event.depth,
        }
        if not event.depth:
            tree.sub_model = str(event.metadata.get("sub_model") or "")
            attributes[names.AGENT_VERSION] = name_text(str(event.metadata.get("version", "")))
        if self._has_content and event.question is not None:
            attributes[names.INPUT_MESSAGES] = prompt_value(event.question)
        parent = self._parent(tree, above, event.block) if above else None
        name = f"{names.INVOKE_AGENT} {names.SCOPE}"
        self._begin(event, tree, f"run {event.run}", name, parent, attributes)

    def _repl_ready(self, event: ReplReady, tree: _Tree) -> None:
        if span := tree.open.get(f"run {event.run}"):
            span.results[names.ISOLATION] = name_text(event.isolation.level)
            span.results[names.REPL_START_S] = event.duration_s

    def _run_ended(self, event: RunEnded, tree: _Tree) -> None:
        span = tree.open.get(f"run {event.run}")
        if span is None:
            return
        for each in reversed(_all_below(span) if event.depth else list(tree.open.values())):
            if each is not span:
                self._unfinished(tree, each, _ns(event.time))
        total = event.usage.total
        span.results |= {
            names.OUTCOME: name_text(event.kind),
            names.TURNS: event.iterations,
            # Of the tree below, and so under names of this package: readers add up `gen_ai.usage` over all spans.
            names.CALLS: total.total_calls,
            names.STORED_CALLS: total.stored_calls,
            names.TREE_INPUT_TOKENS: total.total_input_tokens,
            names.TREE_OUTPUT_TOKENS: total.total_output_tokens,
        }
        if event.cost_usd is not None:
            span.results[names.COST_USD] = event.cost_usd
        if event.limit is not None:
            span.results[names.LIMIT] = name_text(event.limit)
        if self._has_content and event.response is not None:
            span.results[names.OUTPUT_MESSAGES] = reply_value(event.response)
        if event.kind not in GOOD_ENDS:
            self._fail(span, name_text(event.kind), event.error)
        self._end(tree, span, _ns(event.time))

    def _call_started(self, event: CallStarted, tree: _Tree) -> None:
        parent = self._parent(tree, event.run, event.block)
        model = name_text(event.requested_model or self._model_of(tree, event))
        attributes: dict[str, Value] = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: names.provider_of(model),
            names.TREE: name_text(event.tree),
            names.RUN: name_text(event.run),
            names.CALL: event.call,
        }
        if model:
            attributes[names.REQUEST_MODEL] = model
        if event.batch:
            attributes |= {names.BATCH: event.batch, names.BATCH_SIZE: event.of}
        if self._has_content:
            attributes[names.INPUT_MESSAGES] = prompt_value(event.prompt)
            if event.system is not None:
                attributes[names.SYSTEM_INSTRUCTIONS] = instructions_value(event.system)
        self._begin(event, tree, f"call {event.call}", f"{names.CHAT} {model}".strip(), parent, attributes)

    def _call_text(self, event: CallText, tree: _Tree) -> None:
        span = tree.open.get(f"call {event.call}")
        if span is not None and names.REQUEST_STREAM not in span.results:
            span.results[names.REQUEST_STREAM] = True
            span.results[names.FIRST_CHUNK_S] = max(0, _ns(event.time) - span.start_ns) / 1e9

    def _call_retried(self, event: CallRetried, tree: _Tree) -> None:
        span = tree.open.get(f"call {event.call}")
        if span is not None and len(span.events) < MOST_RETRIES:
            told: dict[str, Value] = {names.ATTEMPT: event.attempt, names.WAIT_S: event.wait_s}
            told[names.ERROR_TYPE] = names.error_type(event.reason)
            if self._has_content:
                told[names.REASON] = bounded(event.reason)
            span.events.append(SpanEvent(names.RETRY, _ns(event.time), told))

    def _call_ended(self, event: CallEnded, tree: _Tree) -> None:
        span = tree.open.get(f"call {event.call}")
        if span is None:
            return
        usage = event.usage
        if event.error is None:
            span.results[names.INPUT_TOKENS] = usage.total_input_tokens
            span.results[names.OUTPUT_TOKENS] = usage.total_output_tokens
        else:
            self._fail(span, names.error_type(event.error), event.error)
        if usage.cached_input_tokens:
            span.results[names.CACHED_TOKENS] = usage.cached_input_tokens
        if event.model:
            model = span.results[names.RESPONSE_MODEL] = name_text(event.model)
            if names.REQUEST_MODEL not in span.attributes:  # the loop is the user's own, and named no model
                span.name = f"{names.CHAT} {model}"
                span.results |= {names.REQUEST_MODEL: model, names.PROVIDER: names.provider_of(model)}
        if usage.stored_calls:
            span.results[names.STORED] = True
        if usage.total_cost is not None:
            span.results[names.COST_USD] = usage.total_cost
        if self._has_content and event.error is None:
            span.results[names.OUTPUT_MESSAGES] = reply_value(event.response)
        self._end(tree, span, _ns(event.time))

    def _block_started(self, event: BlockStarted, tree: _Tree) -> None:
        attributes = self._of_tool(event, names.PYTHON, "extension")
        attributes |= {names.BLOCK: event.block, names.TURN: event.iteration}
        if self._has_content:
            attributes[names.TOOL_ARGUMENTS] = code_value(event.code)
        parent = tree.open.get(f"run {event.run}")
        name = f"{names.EXECUTE_TOOL} {names.PYTHON}"
        self._begin(event, tree, f"run {event.run}.b{event.block}", name, parent, attributes)

    def _block_ended(self, event: BlockEnded, tree: _Tree) -> None:
        span = tree.open.get(f"run {event.run}.b{event.block}")
        if span is None:
            return
        block = event.outcome
        span.results[names.STATUS] = block.status
        if block.exit_code is not None:
            span.results[names.EXIT_CODE] = block.exit_code
        if block.limit is not None:
            span.results[names.LIMIT] = name_text(block.limit)
        if self._has_content:
            span.results[names.TOOL_RESULT] = output_value(block.stdout, block.stderr, block.error)
        if block.status not in _GOOD_BLOCKS:
            kind = names.error_type(block.error or "") if block.status == "error" else block.status
            self._fail(span, kind, block.error)
        self._end(tree, span, _ns(event.time))

    def _tool_started(self, event: ToolStarted, tree: _Tree) -> None:
        tool = name_text(event.tool)
        attributes = self._of_tool(event, tool, "function")
        attributes |= {names.BLOCK: event.block, names.TOOL_CALL_ID: f"{name_text(event.run)}:{event.call}"}
        if self._has_content:
            attributes[names.TOOL_ARGUMENTS] = bounded(event.arguments)
        parent = self._parent(tree, event.run, event.block)
        key = f"run {event.run}.t{event.call}"
        self._begin(event, tree, key, f"{names.EXECUTE_TOOL} {tool}", parent, attributes)

    def _tool_ended(self, event: ToolEnded, tree: _Tree) -> None:
        span = tree.open.get(f"run {event.run}.t{event.call}")
        if span is None:
            return
        if event.error is not None:
            self._fail(span, names.error_type(event.error), event.error)
        elif self._has_content:
            span.results[names.TOOL_RESULT] = bounded(event.result)
        self._end(tree, span, _ns(event.time))

    # -- beginnings and ends -----------------------------------------------------------------------------------------

    def _of_tool(self, event: Event, tool: str, kind: str) -> dict[str, Value]:
        return {
            names.OPERATION: names.EXECUTE_TOOL,
            names.TOOL_NAME: tool,
            names.TOOL_TYPE: kind,
            names.AGENT_NAME: names.SCOPE,
            names.TREE: name_text(event.tree),
            names.RUN: name_text(event.run),
        }

    def _parent(self, tree: _Tree, run: str, block: int) -> Span | None:
        """Return the span of a run's block; if it is not open, the run's."""
        return tree.open.get(f"run {run}.b{block}") or tree.open.get(f"run {run}")

    def _model_of(self, tree: _Tree, event: CallStarted) -> str:
        """Return the model of a call naming none: the run's own, or for code the one that the tree has for it."""
        run = tree.open.get(f"run {event.run}")
        if event.block and tree.sub_model:
            return tree.sub_model
        return "" if run is None else str(run.attributes[names.REQUEST_MODEL])

    def _begin(
        self, event: Event, tree: _Tree, key: str, name: str, parent: Span | None, attributes: dict[str, Value]
    ) -> None:
        if key in tree.open or len(tree.open) >= MOST_OPEN:
            return
        operation = str(attributes[names.OPERATION])
        span = Span(
            tree=event.tree,
            key=key,
            name=name,
            operation=operation,
            start_ns=_ns(event.time),
            parent=parent,
            attributes=attributes,
        )
        tree.open[key] = span
        if parent is not None:
            parent.below[key] = span
        self._begun(span)

    def _fail(self, span: Span, kind: str, words: str | None) -> None:
        span.has_failed = True
        span.results[names.ERROR_TYPE] = kind
        if self._has_content:
            span.words = bounded(words or "")

    def _end(self, tree: _Tree, span: Span, end_ns: int) -> None:
        del tree.open[span.key]
        if span.parent is not None:
            span.parent.below.pop(span.key, None)
        span.end_ns = max(end_ns, span.start_ns)
        self._ended(span)

    def _unfinished(self, tree: _Tree, span: Span, end_ns: int) -> None:
        self._fail(span, names.UNFINISHED, None)
        self._end(tree, span, end_ns)

    def _abandon(self, tree: _Tree) -> None:
        """End all open spans of a tree, the last one first."""
        for span in reversed(list(tree.open.values())):
            self._unfinished(tree, span, tree.last_ns)


def _all_below(span: Span) -> list[Span]:
    """Return all open spans below one, parents before their children. A trace may nest them without a bound."""
    found = list(span.below.values())
    for each in found:
        found += each.below.values()
    return found


def _ns(seconds: float) -> int:
    """Return Unix seconds as whole nanoseconds; 0 for a time that cannot be."""
    return int(seconds * 1e6) * 1_000 if 0 <= seconds < 1e10 else 0


# -- texts as the values of attributes: bounded, and prompts and replies in the conventions' form ----------------------

MOST_CHARS: Final = 16_384
"""Characters of one text in an attribute; longer text is cut, and the cut is marked."""
NAME_CHARS: Final = 200
"""Characters of a model's, a run's or a tool's name; longer ones are cut."""
MOST_MESSAGES: Final = 16
"""Messages of one prompt; of more the last are kept."""


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


def code_value(source: str) -> str:
    """Return the value of `gen_ai.tool.call.arguments` for a block."""
    return _json({"code": bounded(source)})


def output_value(stdout: str, stderr: str, error: str | None) -> str:
    """Return the value of `gen_ai.tool.call.result` for a block."""
    told = {"stdout": stdout, "stderr": stderr, "error": error or ""}
    return _json({name: bounded(text) for name, text in told.items() if text})


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
    """Return a text without lone surrogates, for which an exporter would drop all spans of its batch."""
    return text if text.isascii() else text.encode(errors="replace").decode()
