"""Prompts of code, as they reach a client and the events."""

from typing import Any

import pytest

from rlm_broker.events.event import CallStarted, Event
from rlm_broker.limits import Limits
from rlm_broker.results import ChatMessage
from sandbox_worker.wire.messages import Query
from sandbox_worker.wire.prompts import ImagePart, ImageUrl, MessagePart, Part, Prompt, TextPart
from tests.rlm_broker.run.test_calls import CALLER, Counting, calls_with

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
ASKED = Query(
    "1:1",
    "llm",
    [
        [
            MessagePart("system", "brief"),
            MessagePart("user", "a"),
            MessagePart("assistant", "b"),
            MessagePart("user", [TextPart("c"), ImagePart(ImageUrl("data:image/png;base64,AA=="))]),
        ]
    ],
    temperature=0.5,
)


async def test_messages_reach_the_client_with_their_roles() -> None:
    client = Counting()
    calls, _ = calls_with(client, Limits())
    await calls.slots(CALLER, ASKED)
    await calls.slots(CALLER, Query("1:2", "llm", [[TextPart("a")]], system="s"))
    first, second = client.requests
    assert first.messages == (
        ChatMessage("system", "brief"),
        ChatMessage("user", "a"),
        ChatMessage("assistant", "b"),
        ChatMessage("user", [{"type": "text", "text": "c"}, PICTURE]),
    )
    assert second.messages == (ChatMessage("system", "s"), ChatMessage("user", [{"type": "text", "text": "a"}]))
    assert (first.temperature, second.temperature) == (0.5, None)


async def test_event_has_the_whole_conversation_that_code_asks_with() -> None:
    events: list[Event] = []
    calls, _ = calls_with(Counting(), Limits(), events)
    caller = type(CALLER)("1", 1, None, block=1)
    await calls.slots(caller, ASKED)
    await calls.slots(caller, Query("1:2", "llm", ["a"], system="s"))
    told = [(event.prompt, event.system) for event in events if isinstance(event, CallStarted)]
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, PICTURE]},
    ]
    assert told == [(conversation, None), ("a", "s")]


REMOTE: list[Part] = [ImagePart(ImageUrl("http://169.254.169.254/"))]


@pytest.mark.parametrize(
    ("prompt", "system", "said"),
    [
        ([MessagePart("user", "a"), TextPart("b")], None, "content parts or chat messages, not both"),
        ([MessagePart("system", "a"), MessagePart("user", "b")], "s", "takes no system prompt beside it"),
        ([MessagePart("user", REMOTE)], None, "an image is given as data:"),
        (REMOTE, None, "an image is given as data:"),
    ],
)
async def test_prompt_that_is_not_sent_fills_its_slot(prompt: Prompt, system: str | None, said: str) -> None:
    client = Counting()
    calls, _ = calls_with(client, Limits())
    first, second = await calls.slots(CALLER, Query("1:1", "llm", [prompt, "fine"], system=system))
    assert said in (first.error or "")
    assert second.text == "FINE"
    assert len(client.requests) == 1
