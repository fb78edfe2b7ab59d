"""The outcome of a run, made short enough for one message: the answer stays, and outputs go before the conversation."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from rlm_broker.cluster.outcomes import OUTCOME_BYTES, OUTCOME_VALUES, encoded_completion
from rlm_broker.errors import ValueTooLarge
from rlm_broker.results import Block, ChatMessage, Completion, Iteration, without_displays
from sandbox_worker.wire.counting import has_more_values_than

MOST_BYTES = OUTCOME_BYTES
"""Maximum bytes of an outcome on the link. A larger one loses its displays first, then long texts, then early turns."""
MOST_VALUES = OUTCOME_VALUES
"""Maximum values of JSON in an outcome, likewise."""
LONG_CHARS = 20_000
"""Characters of a text of the trajectory or the conversation that stay when long texts are cut."""
SHORT_CHARS = 2_000
"""The same when early turns are left out as well."""
_TEXTS = ("code", "stdout", "stderr", "error", "final_answer", "draft")
"""Fields of a block that are cut."""
LAST_TURNS = 100
"""Turns, messages and children that stay then."""


def encoded_outcome(completion: Completion) -> msgspec.Raw:
    """Return a completion as the value of `Ended.completion`, with as much of it as one message may have.

    Raises:
        ValueTooLarge: Not even its answer fits.
    """
    ways: tuple[Callable[[Completion], Completion], ...] = (
        lambda whole: whole,
        _without_displays,
        lambda whole: _cut(_without_displays(whole), LONG_CHARS),
        lambda whole: _cut(_last(_without_displays(whole)), SHORT_CHARS),
    )
    for shortened in ways:
        raw = encoded_completion(shortened(completion))
        data = bytes(raw)
        if len(data) <= MOST_BYTES and not has_more_values_than(MOST_VALUES, data):
            return raw
    raise ValueTooLarge(f"the answer takes more than {MOST_BYTES:,} bytes, and no message of a cluster has more")


def _without_displays(whole: Completion) -> Completion:
    return _with_blocks(whole, lambda block: without_displays(block, len(block.displays)))


def _cut(whole: Completion, most: int) -> Completion:
    """Cut the texts of the trajectory and the conversation, and leave out what code says about its variables."""
    text = partial(_text, most=most)

    def cut(block: Block) -> Block:
        fields: dict[str, Any] = {"variables": ()}
        for name in _TEXTS:
            value = getattr(block, name)
            fields[name] = text(value) if isinstance(value, str) else value
        if block.post_mortem is not None:
            fields["post_mortem"] = dataclasses.replace(block.post_mortem, stack=text(block.post_mortem.stack))
        return dataclasses.replace(block, **fields)

    messages = tuple(
        ChatMessage(each.role, text(each.content) if isinstance(each.content, str) else text(repr(each.content)))
        for each in whole.messages
    )
    turns = tuple(Iteration(turn.number, text(turn.reply), turn.blocks) for turn in whole.trajectory)
    children = tuple(dataclasses.replace(each, error=each.error and text(each.error)) for each in whole.child_traces)
    return _with_blocks(dataclasses.replace(whole, messages=messages, trajectory=turns, child_traces=children), cut)


def _last(whole: Completion) -> Completion:
    """Keep the system prompt, and the last turns, messages and children."""
    left_out = max(0, len(whole.messages) - LAST_TURNS)
    note = (ChatMessage("user", f"[{left_out:,} messages left out]"),) if left_out else ()
    return dataclasses.replace(
        whole,
        messages=(*whole.messages[:1], *note, *whole.messages[1:][-LAST_TURNS:]) if left_out else whole.messages,
        trajectory=whole.trajectory[-LAST_TURNS:],
        child_traces=whole.child_traces[-LAST_TURNS:],
    )


def _with_blocks(whole: Completion, change: Callable[[Block], Block]) -> Completion:
    turns = (
        Iteration(turn.number, turn.reply, tuple(change(block) for block in turn.blocks)) for turn in whole.trajectory
    )
    return dataclasses.replace(whole, trajectory=tuple(turns))


def _text(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[:most]}\n... [{len(text) - most:,} characters left out: the outcome was too large for one message]"
