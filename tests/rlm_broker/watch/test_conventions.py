import ast
import re
from pathlib import Path

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as published
from opentelemetry.semconv.attributes import error_attributes

from rlm_broker.watch import conventions, spans
from rlm_broker.watch.conventions import continue_trace, error_type, provider_of, traceparent

NEWER = {"gen_ai.request.stream", "gen_ai.response.time_to_first_chunk"}
"""Names that OpenTelemetry's Python package may lack: it follows the conventions later."""


def test_names_and_values_are_those_of_the_conventions() -> None:
    """Each name and each fixed value in a span is in OpenTelemetry's own package, or is this package's."""
    known = {value for name, value in vars(published).items() if name.startswith("GEN_AI_")}
    known |= {error_attributes.ERROR_TYPE, *NEWER}
    texts = {
        each.value for each in ast.walk(ast.parse(Path(spans.__file__).read_text())) if isinstance(each, ast.Constant)
    }
    attributes = {text for text in texts if isinstance(text, str) and re.fullmatch(r"(gen_ai|error)\.[a-z_.]+", text)}
    assert attributes - known == set()
    assert len(attributes) > 15
    operations = {each.value for each in published.GenAiOperationNameValues}
    assert {"chat", "invoke_agent", "execute_tool"} <= operations
    providers = {each.value for each in published.GenAiProviderNameValues} | {"moonshot_ai"}
    assert set(conventions._PROVIDERS.values()) <= providers
    assert error_attributes.ErrorTypeValues.OTHER.value == error_type("") == "_OTHER"


def test_provider_is_told_by_the_name() -> None:
    known = {"openai/gpt-5-mini": "openai", "bedrock/anthropic.claude": "aws.bedrock", "gpt-5-mini": "openai"}
    known |= {"claude-sonnet-4-5": "anthropic", "offline": "offline"}
    unknown = dict.fromkeys(("qwen3", "", "Not A Provider/x", "x" * 50 + "/y"), "unknown")
    assert {model: provider_of(model) for model in known | unknown} == known | unknown


def test_error_type_has_no_text_of_others() -> None:
    kinds = {
        "cancelled": "cancelled",
        "m: HTTP status 429: slow down": "429",
        "m: no answer within 3 s": "timeout",
        "lookup() took longer than tool_timeout_s = 3 s": "timeout",
        "openai/gpt: RateLimitError: slow down": "RateLimitError",
        "ZeroDivisionError: division by zero": "ZeroDivisionError",
        "lookup() raised KeyError: 'secret'": "KeyError",
        "MadeUpByCodeError: a private text": "_OTHER",
    }
    assert {text: error_type(text) for text in kinds} == kinds


def test_traceparent_of_another_form_is_none() -> None:
    good = f"00-{'ab' * 16}-{'cd' * 8}-01"

    def taken(header: object) -> str | None:
        continue_trace(header)
        return traceparent.get()

    assert taken(good) == taken(f" {good} ") == good
    zeros = (f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'0' * 16}-01")
    others = (None, "", "00", good.upper(), good.replace("00-", "ff-", 1), *zeros, f"{good}\r\nx: y", f"{good}-more")
    assert {taken(header) for header in (5, *others)} == {None}
