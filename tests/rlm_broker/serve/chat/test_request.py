"""Requests that cannot be served: status, code and field, in OpenAI's envelope."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.serve.settings import ServeSettings
from tests.support.obedient import obedient
from tests.support.service import Served, serving

USER = {"role": "user", "content": "Say hello."}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = ServeSettings(inline_chars=50, body_bytes=1 << 14, stall_s=0.5)
    keys: Any = {
        "alice": {"limits": {"max_llm_calls": 5}},
        "idle": {"rights": ("watch",)},
        "confined": {"models": ("second",)},
    }
    with serving(
        RLM(obedient(), models={"second": "offline"}, limits=Limits(max_budget_usd=1)), settings, keys=keys
    ) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.base_url, headers=served.headers, timeout=60) as http:
        yield http


def parts(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


TEXT = {"type": "text", "text": "What is it?"}


def file(**given: Any) -> dict[str, Any]:
    return {"type": "file", "file": given}


def function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema(given: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}


DEEP = {"$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}, "$ref": "#/$defs/d0"}


BAD: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "other"}, 404, "model"),
    ({"model": "obedient@other"}, 404, "model"),
    ({"model": None}, 400, "model"),
    ({"model": "m" * 501}, 400, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "function", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [USER, {"role": "assistant", "content": "x"}]}, 400, "messages.1.role"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "  "}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "messages.0.content"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, 400, "messages.1.tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "call_1", "content": "x"}]}, 404, "messages.0.tool_call_id"),
    (parts({"type": "image_url", "image_url": {"url": "https://a.b/c"}}, TEXT), 400, "messages.0.content.0.type"),
    (parts({"type": "input_audio", "input_audio": {}}, TEXT), 400, "messages.0.content.0.type"),
    (parts({"type": "video", "video": {}}, TEXT), 400, "messages.0.content.0.type"),
    (parts("text"), 400, "messages.0.content.0.type"),
    (parts({"type": "text", "text": 7}), 400, "messages.0.content.0.text"),
    (parts(file(), TEXT), 400, "messages.0.content.0.file"),
    (parts(file(file_id=7), TEXT), 400, "messages.0.content.0.file.file_id"),
    (parts(file(file_id="file-0"), TEXT), 404, "messages.0.content.0.file.file_id"),
    (parts(file(file_data="https://a.b/c", filename="c"), TEXT), 400, "messages.0.content.0.file.file_data"),
    (parts(file(file_data="%%%", filename="c"), TEXT), 400, "messages.0.content.0.file.file_data"),
    (parts(file(file_data="aGVsbG8=", filename="a.txt")), 400, "messages.0.content"),
    (parts(file(file_data="", filename="a.txt"), TEXT), 400, None),
    (parts(TEXT, {"type": "text", "text": "long " * 20}), 400, "messages.0.content"),
    ({**parts(file(file_data="aGVsbG8=", filename="a"), TEXT), "model": "obedient@plain"}, 400, "model"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": "yes"}, "stream": True}, 400, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"n": 2}, 400, "n"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [function("no name")]}, 400, "tools.0.function.name"),
    ({"tools": [function("f", type="array")]}, 400, "tools.0.function.parameters"),
    ({"tools": [function("f", properties=7)]}, 400, "tools.0.function.parameters"),
    ({"tools": [function(f"f{n}") for n in range(129)]}, 400, "tools"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    (schema({"type": "nothing"}), 400, "response_format.json_schema.schema"),
    (schema(DEEP), 400, "response_format.json_schema.schema"),
    ({"rlm": {"colour": "red"}}, 400, "rlm.colour"),
    ({"rlm": {"max_budget_usd": -1}}, 400, "rlm.max_budget_usd"),
    ({"rlm": {"max_budget_usd": 2}}, 400, None),
    ({"rlm": {"max_llm_calls": 6}}, 400, None),
    ({"rlm": {"max_depth": 0}}, 400, "rlm.max_depth"),
    ({"rlm": {"question": " "}}, 400, "rlm.question"),
    ({**parts(TEXT, TEXT), "rlm": {"context": "x"}}, 400, "rlm.context"),
]


def test_bad_request_names_its_field(http: httpx.Client) -> None:
    for change, status, param in BAD:
        answer = http.post("/chat/completions", json={"model": "obedient", "messages": [USER], **change})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), (change, error["message"])
        assert error["type"] == "invalid_request_error"
        assert "\n" not in error["message"]


def test_refusals_of_lists_and_options_are_plain(http: httpx.Client) -> None:
    def said(**change: Any) -> str:
        answer = http.post("/chat/completions", json={"model": "obedient", "messages": [USER], **change})
        return str(answer.json()["error"]["message"])

    assert said(messages=[]) == "messages must have at least 1 item"
    assert said(rlm={"foo": 1}) == "there is no field 'rlm.foo'"
    assert said(rlm=5) == "rlm must be an object"


def test_bad_body_has_its_code(http: httpx.Client) -> None:
    for body, status, code in (
        (b"", 400, "empty"),
        (b"{", 400, "not_json"),
        (b"\xff\xfe", 400, "not_utf8"),
        (b"[" * 5_000, 400, "not_json"),
        (b" " * (1 << 15), 413, "too_large"),
    ):
        answer = http.post("/chat/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), body[:10]


def test_body_that_stalls_is_given_up(served: Served) -> None:
    """A body whose rest does not come is answered, and waits for no longer."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {served.key}\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_key_without_the_right_is_refused(served: Served) -> None:
    """A key that may not run, or not use the model, gets 403; a text that is no key gets 401."""
    body = {"model": "obedient", "messages": [USER]}
    url = f"{served.base_url}/chat/completions"
    for name in ("idle", "confined"):
        assert httpx.post(url, json=body, headers=served.headers_of(name)).status_code == 403
    answer = httpx.post(url, json=body, headers={"authorization": "Bearer sk-wrong"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_too_long_idempotency_key_is_refused(http: httpx.Client) -> None:
    body = {"model": "obedient", "messages": [USER]}
    answer = http.post("/chat/completions", json=body, headers={"idempotency-key": "k" * 300})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_fields_of_chat_windows_are_ignored_and_named(http: httpx.Client) -> None:
    """Fields that clients send to all servers are no errors; those without effect on the answer are named."""
    always = {
        "temperature": 0.7, "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": 5,
        "parallel_tool_calls": True, "n": 1, "logprobs": False, "presence_penalty": 0.0, "stop": None, "top_k": 40,
        "logit_bias": {}, "modalities": ["text"], "stream": False, "max_tokens": -1, "keep_alive": "5m",
        "tools": [{"type": "web_search"}], "tool_choice": "auto",
    }  # fmt: skip
    body = {"model": "obedient", "messages": [{**USER, "id": "m1", "timestamp": 5}], **always}
    answer = http.post("/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    named = ["temperature", "seed", "top_k", "keep_alive", "tools.web_search", "messages.id", "messages.timestamp"]
    assert answer.json()["rlm"]["ignored"] == named


def test_text_that_names_a_file_tells_none(http: httpx.Client) -> None:
    """A text that is the path of a file of the server is a text: no error tells that the file exists."""
    for path in ("/etc/passwd", "/etc/no-such-file"):
        answer = http.post("/chat/completions", json={"model": "obedient", "messages": [{**USER, "content": path}]})
        assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "hello")
        answer = http.post(
            "/chat/completions", json={"model": "obedient", **parts({"type": "text", "text": path}, TEXT)}
        )
        assert answer.status_code == 200
