"""All names and fixed values in spans.

They come from OpenTelemetry's semantic conventions for generative AI, which have a repository of their own since May
2026 (`open-telemetry/semantic-conventions-genai`, version 1.42.0, in development), as they were in August 2026.
`error.type` is of the core conventions 1.44.0. Names below `rlm_broker.` are this package's.
"""

import builtins
import re
from contextvars import ContextVar
from typing import Final

VERSION: Final = "1.42.0"
"""Version of the conventions for generative AI."""

# -- the conventions' names --------------------------------------------------------------------------------------------

OPERATION: Final = "gen_ai.operation.name"
INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"
PROVIDER: Final = "gen_ai.provider.name"
AGENT_NAME: Final = "gen_ai.agent.name"
AGENT_VERSION: Final = "gen_ai.agent.version"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FIRST_CHUNK_S: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
ERROR_TYPE: Final = "error.type"
OTHER_ERROR: Final = "_OTHER"

# Content, which is off by default.
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"

# -- names of this package ---------------------------------------------------------------------------------------------

SCOPE: Final = "rlm_broker"
"""Name of the instrumentation scope, and of the agent."""
PYTHON: Final = "python"
"""Name of the REPL as a tool."""
TREE: Final = "rlm_broker.run.id"
RUN: Final = "rlm_broker.run.name"
DEPTH: Final = "rlm_broker.run.depth"
OUTCOME: Final = "rlm_broker.run.outcome"
LIMIT: Final = "rlm_broker.limit"
TURNS: Final = "rlm_broker.run.turns"
ISOLATION: Final = "rlm_broker.repl.isolation"
REPL_START_S: Final = "rlm_broker.repl.start_s"
COST_USD: Final = "rlm_broker.cost_usd"
CALLS: Final = "rlm_broker.usage.calls"
STORED_CALLS: Final = "rlm_broker.usage.stored_calls"
TREE_INPUT_TOKENS: Final = "rlm_broker.usage.input_tokens"
TREE_OUTPUT_TOKENS: Final = "rlm_broker.usage.output_tokens"
STORED: Final = "rlm_broker.call.stored"
CALL: Final = "rlm_broker.call.number"
BATCH: Final = "rlm_broker.call.batch"
BATCH_SIZE: Final = "rlm_broker.call.batch_size"
BLOCK: Final = "rlm_broker.block.number"
TURN: Final = "rlm_broker.block.turn"
STATUS: Final = "rlm_broker.block.status"
EXIT_CODE: Final = "rlm_broker.block.exit_code"
RETRY: Final = "rlm_broker.retry"
"""Name of a span event: an attempt of a call failed."""
ATTEMPT: Final = "rlm_broker.retry.attempt"
WAIT_S: Final = "rlm_broker.retry.wait_s"
REASON: Final = "rlm_broker.retry.reason"
UNFINISHED: Final = "unfinished"
"""`error.type` of a span whose end was never reported."""

_PROVIDERS: Final = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "moonshot": "moonshot_ai",
    "vertex_ai": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}
"""Provider in a model's name → its name in the conventions, where they differ."""
_BARE_NAMES: Final = {"gpt-": "openai", "claude-": "anthropic", "gemini-": "gcp.gemini"}
_OF_CLIENTS: Final = frozenset(
    {
        "APIConnectionError",
        "APIError",
        "APIResponseValidationError",
        "AuthenticationError",
        "BadGatewayError",
        "BadRequestError",
        "BudgetExceededError",
        "ClientError",
        "ContentPolicyViolationError",
        "ContextWindowExceededError",
        "InternalServerError",
        "InvalidRequestError",
        "NotFoundError",
        "PermissionDeniedError",
        "RateLimitError",
        "ServiceUnavailableError",
        "Timeout",
        "UnprocessableEntityError",
        "UnsupportedParamsError",
    }
)
"""Names of errors that model clients put before the words of a provider."""
_STATUS = re.compile(r"\bHTTP status ([45]\d\d)\b")
_CLASS = re.compile(r"(?:^|: |\braised )([A-Z]\w{0,60}(?:Error|Exception|Timeout|Interrupt))\b")
_LATE = re.compile(r"no answer within|took longer than|not done within|timed out", re.IGNORECASE)


def provider_of(model: str) -> str:
    """Return the provider of a model by its name, as the conventions call it; "unknown" if the name does not tell."""
    prefix, slash, _ = model.partition("/")
    if slash and re.fullmatch(r"[a-z][a-z0-9_.-]{0,40}", prefix):
        return _PROVIDERS.get(prefix, prefix)
    if model == "offline":
        return model
    return next((provider for start, provider in _BARE_NAMES.items() if model.startswith(start)), "unknown")


def error_type(error: str) -> str:
    """Return the class of an error by its text: an HTTP status, `timeout`, `cancelled`, the name of an exception.

    The names of exceptions are Python's, and the ones that model clients put before a provider's words. All other
    errors are `_OTHER`, so that no untrusted text becomes a class.
    """
    if error == "cancelled":
        return error
    if status := _STATUS.search(error[:500]):
        return status[1]
    if _LATE.search(error[:500]):
        return "timeout"
    found = _CLASS.search(error[:500])
    return found[1] if found and _is_known(found[1]) else OTHER_ERROR


def _is_known(name: str) -> bool:
    return name in _OF_CLIENTS or isinstance(getattr(builtins, name, None), type)


# -- the caller's place in a distributed trace -------------------------------------------------------------------------

traceparent: ContextVar[str | None] = ContextVar("rlm_broker_traceparent", default=None)
"""W3C `traceparent` of the caller of the runs started in this context; None if there is none.

A server sets it around `RLM.start`. It is read when the root run starts, and is not sent to a provider by itself.
"""
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def continue_trace(header: object) -> None:
    """Make the runs that are started in this context a part of the trace that a client has named.

    Example:
        ```python
        async def answer(request):  # of a server of your own
            continue_trace(request.headers.get("traceparent"))
            return await rlm.acompletion(request.text)
        ```

    Args:
        header: What the client sent as `traceparent`. It is ignored where it has not the form of W3C Trace Context.
    """
    text = header.strip() if isinstance(header, str) else ""
    traceparent.set(text if len(text) == 55 and _TRACEPARENT.fullmatch(text) else None)
