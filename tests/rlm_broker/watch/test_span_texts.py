import json

from rlm_broker.watch import spans


def test_messages_have_the_form_of_the_conventions() -> None:
    prompt = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {}}]},
    ]
    assert json.loads(spans.prompt_value(prompt)) == [
        {"role": "system", "parts": [{"type": "text", "content": "be short"}]},
        {"role": "user", "parts": [{"type": "text", "content": "look"}, {"type": "image_url"}]},
    ]
    assert json.loads(spans.reply_value("yes")) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "yes"}], "finish_reason": "stop"}
    ]
    assert json.loads(spans.instructions_value("be short")) == [{"type": "text", "content": "be short"}]


def test_content_is_bounded() -> None:
    """However large a prompt is, its attribute stays small, and is JSON."""
    many = [{"role": "user" * 1_000, "content": [{"type": "text", "text": "x" * 10**5}] * 100}] * 100
    made = spans.prompt_value(many)
    most = spans.MOST_MESSAGES**2 * (spans.MOST_CHARS + 200)
    assert len(made) < most
    assert len(json.loads(made)) == spans.MOST_MESSAGES
    assert "characters cut" in spans.code_value("x" * 10**6)
    assert len(spans.output_value("o" * 10**6, "e" * 10**6, "w" * 10**6)) < 3 * (spans.MOST_CHARS + 100)


def test_malformed_messages_are_no_error() -> None:
    """A trace may hold any plain value in the place of messages."""
    odd = ["text", None, {}, {"role": None, "content": 3}, {"role": "user", "content": ["a", {"type": 7}]}]
    assert len(json.loads(spans.prompt_value(odd))) == 3
