import json
import random
from typing import Any

import pytest

from rlm_broker.broker.transport.one_shot import (
    MAX_PROMPT_NESTING,
    OneShotRefused,
    OneShotRequest,
    batch_reply,
    error_reply,
    is_one_shot,
    parse_request,
    single_reply,
    to_messages,
)
from rlm_broker.results import Call, ChatMessage
from rlm_broker.usage import Usage
from sandbox_worker import RELEASE
from sandbox_worker.wire.messages import Hello, Ready, encode

USAGE = Usage(1, 10, 5, 0.01)


def refusal(payload: bytes) -> str:
    with pytest.raises(OneShotRefused) as refused:
        parse_request(payload)
    return str(refused.value)


# -- requests


def test_request_is_read_as_by_the_original() -> None:
    message = {"role": "user", "content": "x"}
    assert {text: parse_request(text.encode()) for text in READ} == READ
    assert parse_request(json.dumps({"prompt": message}).encode()) == OneShotRequest((message,), False)
    for depth in ("null", "true", '"1"', "1.0", "NaN", "[1]"):
        assert parse_request(f'{{"prompt": "p", "depth": {depth}}}'.encode()).depth == -1


READ = {
    '{"prompt": "p"}': OneShotRequest(("p",), False),
    '{"prompt": "p", "model": null, "depth": 2, "other": [1]}': OneShotRequest(("p",), False, None, 2),
    '{"prompt": "p", "model": "m"}': OneShotRequest(("p",), False, "m"),
    '{"prompt": "p", "model": ""}': OneShotRequest(("p",), False),
    '{"prompt": "p", "prompts": null}': OneShotRequest(("p",), False),
    '{"prompt": "p", "prompts": []}': OneShotRequest(("p",), False),
    '{"prompt": "p", "prompts": ["a"]}': OneShotRequest(("a",), True),
    '{"prompts": ["", {"role": "user"}, []]}': OneShotRequest(("", {"role": "user"}, []), True),
    '{"prompt": "\\ud800"}': OneShotRequest(("\ud800",), False),
}
REFUSED = {
    b"[]": "Request must be a JSON object",
    b"null": "Request must be a JSON object",
    b"NaN": "Request must be a JSON object",
    b"{}": "Missing 'prompt' or 'prompts' in request.",
    b'{"prompt": null, "prompts": {}}': "Missing 'prompt' or 'prompts' in request.",
    b'{"prompt": []}': "Missing 'prompt' or 'prompts' in request.",
    b"": "Expecting value: line 1 column 1 (char 0)",
    b'{"prompt": "\xff"}': "'utf-8' codec can't decode byte 0xff in position 12: invalid start byte",
    b'{"prompt": NaN}': "'prompt' must be a string, a chat message or a list of chat messages",
    b'{"prompts": ["a", 5]}': "prompts[1] must be a string, a chat message or a list of chat messages",
    b'{"prompts": "abc"}': "'prompts' must be a list",
    b'{"prompt": "p", "model": 5}': "'model' must be a string or null",
}


def test_invalid_request_is_refused_with_its_text() -> None:
    assert {payload: refusal(payload) for payload in REFUSED} == REFUSED


def test_deep_prompt_is_refused_at_its_level() -> None:
    def nested(levels: int) -> bytes:
        return b'{"prompt": [' + b"[" * (levels - 1) + b"1" + b"]" * (levels - 1) + b"]}"

    deepest = parse_request(nested(MAX_PROMPT_NESTING))
    assert json.loads(batch_reply(deepest, ["no"], "m"))["chat_completions"][0]["prompt"] == deepest.prompts[0]
    assert refusal(nested(MAX_PROMPT_NESTING + 1)) == f"'prompt' is nested deeper than {MAX_PROMPT_NESTING} levels"


def test_garbage_raises_only_sendable_refusals() -> None:
    rng = random.Random(20261120)
    hostile = [b"[" * 100_000, b'{"prompt":' * 100_000, b'{"prompt": ' + b"9" * 5_000 + b"}", b"\xef\xbb\xbf{}"]
    for garbage in [*(rng.randbytes(rng.randrange(40)) for _ in range(3000)), *hostile]:
        assert json.loads(error_reply(refusal(garbage))).keys() == {"error", "chat_completion", "chat_completions"}


def test_everything_but_our_hello_is_answered_in_this_protocol() -> None:
    hellos = [encode(Hello("secret")), b'{"token": "t", "type": "hello"}']
    others = [encode(Ready(RELEASE)), b'{"prompt": "p", "depth": 0}', b'{"token": "t"}', b"{}", b"[]", b"\xff", b""]
    assert [payload for payload in (*hellos, *others, b"[" * 100_000) if not is_one_shot(payload)] == hellos


# -- prompts


def test_a_prompt_becomes_chat_messages() -> None:
    parts = [{"type": "text", "text": "t"}]
    cases: list[tuple[Any, tuple[ChatMessage, ...]]] = [
        ("text", (ChatMessage("user", "text"),)),
        ("", (ChatMessage("user", ""),)),
        ({"role": "assistant", "content": "x"}, (ChatMessage("assistant", "x"),)),
        (
            [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}],
            (ChatMessage("system", "s"), ChatMessage("user", parts)),
        ),
    ]
    for prompt, messages in cases:
        assert to_messages(prompt) == messages


def test_unsendable_message_is_refused() -> None:
    cases: list[tuple[Any, str]] = [
        ([], "must not be empty"),
        ({}, "'role'"),
        (["text"], "object with 'role' and 'content'"),
        ({"role": "tool", "content": "x"}, "'role'"),
        ({"role": ["user"], "content": "x"}, "'role'"),
        ({"role": "user"}, "'content'"),
        ([{"role": "user", "content": None}], "'content'"),
    ]
    for prompt, part in cases:
        with pytest.raises(OneShotRefused, match=part):
            to_messages(prompt)


# -- replies


def test_a_cost_that_is_not_known_is_left_out() -> None:
    reply = json.loads(single_reply(OneShotRequest(("p",), False), Call("m", "r", Usage(1, 2, 3), 0.5)))
    assert reply["chat_completion"]["usage_summary"] == {
        "model_usage_summaries": {"m": {"total_calls": 1, "total_input_tokens": 2, "total_output_tokens": 3}}
    }


def test_text_that_utf8_cannot_hold_is_sent_escaped() -> None:
    reply = single_reply(OneShotRequest(("\ud800",), False), Call("m", "\udfff", USAGE, 0.0))
    completion = json.loads(reply)["chat_completion"]
    assert (completion["prompt"], completion["response"]) == ("\ud800", "\udfff")


def test_a_text_of_a_class_below_str_is_sent() -> None:
    class Marked(str):
        """As numpy and template engines have them."""

    reply = single_reply(OneShotRequest(("p",), False), Call("m", Marked("r"), USAGE, 0.0))
    assert json.loads(reply)["chat_completion"]["response"] == "r"


def test_a_failed_prompt_says_which_model_was_wished_for() -> None:
    request = OneShotRequest(("p",), is_batch=True, model="wish", depth=1)
    (failed,) = json.loads(batch_reply(request, ["no"], "sub-model"))["chat_completions"]
    assert (failed["root_model"], failed["requested_model"]) == ("sub-model", "wish")
    assert failed["error"] == "llm() call failed - no"


def test_a_batch_with_an_outcome_missing_is_not_sent() -> None:
    with pytest.raises(ValueError, match="shorter"):
        batch_reply(OneShotRequest(("a", "b"), is_batch=True), ["no"], "m")


def test_an_error_without_words_is_still_an_error() -> None:
    assert json.loads(error_reply(""))["error"]
