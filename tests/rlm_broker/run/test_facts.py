"""Facts of a system prompt are true: the limits, the models that code may name, the packages that it can import."""

import re
import sys
from typing import Any

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.models.models import Models
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.run.runner import MOST_MODELS, reads_chars
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers.python_paths import WORTH_TELLING
from tests.support.tables import table


def sized(tokens: int | None, *replies: str, name: str = "scripted") -> ScriptedClient:
    client = ScriptedClient(replies or ["FINAL(done)"], name)
    client.context_tokens = tokens
    return client


def told(sandbox: Sandbox, model: ScriptedClient, sub: ScriptedClient | None = None, **more: Any) -> str:
    """The system prompt of the root."""
    assert RLM(model, sub, sandbox=sandbox, **more).completion("short", "?").response == "done"
    return str(model.requests[0].messages[0].content)


def test_model_reads_three_characters_a_token() -> None:
    chars = {None: None, 128_000: 380_000, 8_000: 24_000, 1_000_000: 3_000_000, 1: 3}
    assert {tokens: reads_chars(sized(tokens)) for tokens in chars} == chars


def test_call_size_is_that_of_the_answering_model(open_sandbox: Sandbox) -> None:
    prompt = told(open_sandbox, sized(200_000), sized(64_000, name="sub"))
    assert "It can read 190,000 characters." in prompt
    assert "It can read" not in told(open_sandbox, sized(200_000), sized(None, name="sub"))


@table("tokens is_compact", [(15_999, True), (16_000, False), (None, False)])
def test_prompt_length_follows_the_runs_model(open_sandbox: Sandbox, tokens: int | None, is_compact: bool) -> None:
    prompt = told(open_sandbox, sized(tokens), sized(200_000, name="sub"))
    assert ("How to work:" not in prompt) == is_compact


def test_further_models_are_told_with_their_sizes(open_sandbox: Sandbox) -> None:
    models = {"small": sized(10_000, name="provider/small-1"), "other": sized(None, name="other")}
    prompt = told(open_sandbox, sized(None), sized(None, name="sub"), models=models)
    (line,) = [line for line in prompt.splitlines() if line.startswith("- Models for `model=`")]
    assert "`small` (provider/small-1, reads 30,000 characters)" in line
    assert "`other` (of the user's)" in line
    assert "`scripted`" not in line


def test_where_code_may_name_no_model_none_is_told(open_sandbox: Sandbox) -> None:
    models = {"small": sized(10_000, name="small")}
    assert "Models for `model=`" not in told(open_sandbox, sized(None), models=Models(models, policy="pinned"))


def test_so_many_models_are_told_at_most(open_sandbox: Sandbox) -> None:
    models = {f"m{number}": sized(None, name=f"m{number}") for number in range(MOST_MODELS + 10)}
    assert len(re.findall(r"`m\d+`", told(open_sandbox, sized(None), models=models))) <= MOST_MODELS


def test_told_packages_and_python_exist() -> None:
    client = ScriptedClient(["```repl\nimport sys\nFINAL('%d.%d' % sys.version_info[:2])\n```"])
    with Sandbox() as sandbox:
        with RLM(client, sandbox=sandbox) as rlm:
            version = rlm.completion("short", "?").response
        named = sandbox.importable(WORTH_TELLING)
        with sandbox.repl() as repl:
            code = f"import importlib\nfor name in {list(named)!r}: importlib.import_module(name)"
            assert repl.execute(code, timeout_s=300).status == "ok"
            others = [name for name in WORTH_TELLING if name not in named]
            missing = f"import importlib.util\nprint([n for n in {others!r} if importlib.util.find_spec(n)])"
            assert repl.execute(missing).stdout == "[]\n"
    prompt = str(client.requests[0].messages[0].content)
    assert f"This is Python {version}. " in prompt
    assert version == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert all(name in prompt for name in named)


def test_turns_and_children_are_those_of_the_depth(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(["```repl\nFINAL(rlm_query('x'))\n```", "FINAL(done)"])
    told(open_sandbox, client, limits=Limits(max_depth=2, max_iterations=(11, 7)))
    root, child = (str(request.messages[0].content) for request in client.requests)
    assert ("You have 11 turns" in root, "contexts=parts" in root) == (True, True)
    assert ("You have 7 turns" in child, "contexts=parts" in child) == (True, False)
