"""Bodies of responses: their fields, their items, and how a run's end becomes a status."""

import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rlm_broker import Usage
from rlm_broker.serve.questions.client_tools import ClientCall
from rlm_broker.serve.questions.conversation import Item
from rlm_broker.serve.questions.request import TOOLS
from rlm_broker.serve.responses.request import ResponseRequest, text_part

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
LIMIT_REASON: Final = "max_output_tokens"
"""Reason of an incomplete response. The schemas know only this one and `content_filter`; `rlm.limit` has the name."""


@dataclass(slots=True)
class Resource:
    """One response, as its body shows it.

    Attributes:
        id: Unguessable text beginning with "resp_".
        model: Name under which the client asked for the model.
        asked: Fields of the body that repeat the request.
        created_at: Unix time in seconds.
        status: Its status now.
        output: Items that are complete.
        usage: Usage of its part of the run, as `usage_of` makes it; None until its end.
        error: Code and message of a failure, or None.
        rlm: Facts about the run that OpenAI's fields have no place for.
    """

    id: str
    model: str
    asked: dict[str, Any]
    created_at: int = field(default_factory=lambda: int(time.time()))
    status: Status = "in_progress"
    completed_at: int | None = None
    output: list[Item] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    rlm: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ended(self) -> bool:
        """Whether the status is the last one."""
        return self.status not in ("queued", "in_progress")

    def body(self) -> dict[str, Any]:
        """Return the body as it is now."""
        is_incomplete = self.status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "status": self.status,
            "model": self.model,
            "output": list(self.output),
            "error": self.error,
            "incomplete_details": {"reason": LIMIT_REASON} if is_incomplete else None,
            "usage": self.usage,
            **self.asked,
            "rlm": dict(self.rlm),
        }


def usage_of(usage: Usage, told: Usage) -> dict[str, Any]:
    """Return the tokens of the whole tree that no earlier response has told."""
    read = usage.total_input_tokens - told.total_input_tokens
    written = usage.total_output_tokens - told.total_output_tokens
    cached = usage.cached_input_tokens - told.cached_input_tokens
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }


def message(id: str, text: str, status: str) -> Item:
    """Return the item of an answer."""
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": [text_part(text)]}


def reasoning(id: str, text: str | None, status: str) -> Item:
    """Return the item of a turn's prose; `text` is None while it has none."""
    summary = [] if text is None else [summary_part(text)]
    return {"id": id, "type": "reasoning", "summary": summary, "status": status, "encrypted_content": None}


def summary_part(text: str) -> dict[str, Any]:
    """Return the part of a reasoning summary."""
    return {"type": "summary_text", "text": text}


def function_call(id: str, call: ClientCall, arguments: str, status: str) -> Item:
    """Return the item of a call of a function of the client, with the arguments so far."""
    namespace = {} if call.namespace is None else {"namespace": call.namespace}
    about = {"id": id, "type": "function_call", "call_id": call.id, "name": call.name, **namespace}
    return {**about, "arguments": arguments, "status": status}


def code_call(id: str, container: str, code: str, status: str, logs: str | None = None) -> Item:
    """Return the item of a block.

    Args:
        logs: Output of the block, if the request wants it.
    """
    return {
        "id": id,
        "type": "code_interpreter_call",
        "container_id": container,
        "code": code,
        "status": status,
        "outputs": None if logs is None else [{"type": "logs", "logs": logs}],
    }


def repeated(request: ResponseRequest) -> dict[str, Any]:
    """Return the fields of a body that repeat the request, with the defaults of what it leaves out."""
    text = request.text
    return {
        "background": bool(request.background),
        "frequency_penalty": 0.0,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": _reasoning_of(request.reasoning),
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": _format_of(text.format), "verbosity": text.verbosity or "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool_of(tool) for tool in request.tools or () if tool.get("type") in TOOLS],
        "top_logprobs": 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _reasoning_of(given: dict[str, Any] | None) -> dict[str, Any]:
    said = {key: value for key, value in (given or {}).items() if value is not None}
    return {"effort": None, "summary": None, **said}


def _format_of(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None or given.get("type") != "json_schema":
        return given or {"type": "text"}
    return {"description": None, "strict": True, **{key: value for key, value in given.items() if value is not None}}


def _tool_of(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}
