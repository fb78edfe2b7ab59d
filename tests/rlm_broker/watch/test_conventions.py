import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as published
from opentelemetry.semconv.attributes import error_attributes

from rlm_broker.watch import conventions as names
from rlm_broker.watch.conventions import error_type, provider_of

NEWER = {"gen_ai.request.stream", "gen_ai.response.time_to_first_chunk"}
"""Names that OpenTelemetry's Python package may lack: it follows the conventions later."""


def test_names_are_those_of_the_conventions() -> None:
    """Each name is in OpenTelemetry's own package, or is this package's."""
    known = {value for name, value in vars(published).items() if name.startswith("GEN_AI_")}
    known |= {error_attributes.ERROR_TYPE, *NEWER}
    ours = {value for value in vars(names).values() if isinstance(value, str) and "." in value and value != "1.42.0"}
    attributes = {name for name in ours if name.startswith(("gen_ai.", "error."))}
    assert attributes - known == set()
    assert len(attributes) > 15


def test_values_are_those_of_the_conventions() -> None:
    operations = {each.value for each in published.GenAiOperationNameValues}
    assert {names.CHAT, names.INVOKE_AGENT, names.EXECUTE_TOOL} <= operations
    providers = {each.value for each in published.GenAiProviderNameValues} | {"moonshot_ai"}
    assert set(names._PROVIDERS.values()) <= providers
    assert error_attributes.ErrorTypeValues.OTHER.value == names.OTHER_ERROR


@pytest.mark.parametrize(
    ("model", "provider"),
    [
        ("openai/gpt-5-mini", "openai"),
        ("bedrock/anthropic.claude", "aws.bedrock"),
        ("gpt-5-mini", "openai"),
        ("claude-sonnet-4-5", "anthropic"),
        ("offline", "offline"),
        ("qwen3", "unknown"),
        ("", "unknown"),
        ("Not A Provider/x", "unknown"),
        ("x" * 50 + "/y", "unknown"),
    ],
)
def test_provider_is_told_by_the_name(model: str, provider: str) -> None:
    assert provider_of(model) == provider


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("cancelled", "cancelled"),
        ("m: HTTP status 429: slow down", "429"),
        ("m: no answer within 3 s", "timeout"),
        ("lookup() took longer than tool_timeout_s = 3 s", "timeout"),
        ("openai/gpt: RateLimitError: slow down", "RateLimitError"),
        ("ZeroDivisionError: division by zero", "ZeroDivisionError"),
        ("lookup() raised KeyError: 'secret'", "KeyError"),
        ("MadeUpByCodeError: a private text", "_OTHER"),
        ("", "_OTHER"),
    ],
)
def test_error_type_has_no_text_of_others(text: str, kind: str) -> None:
    assert error_type(text) == kind
