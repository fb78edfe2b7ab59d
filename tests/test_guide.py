"""Examples of the guide that need only a model, run as they stand there."""

import re
from typing import Any

import pytest

from rlm_broker import LMRequest, ScriptedClient
from rlm_broker.clients.base import LMReply
from rlm_broker.errors import ModelFailed
from rlm_broker.usage import Usage
from tests.support.places import PROJECT

ASKS = """```repl
first, second = rlm_query_batched(['capital of France', 'capital of Mars'])
FINAL(f"{first}; {second}; {llm_query('plain')}; {llm_query_batched(['one', 'two'])}")
```"""


def example(with_text: str) -> str:
    """The one example of the guide that has this text."""
    examples: list[str] = re.findall(r"```python\n(.*?)```", (PROJECT / "docs/guide.md").read_text(), re.DOTALL)
    (code,) = [code for code in examples if with_text in code]
    return code


def model() -> ScriptedClient:
    def reply(request: LMRequest) -> str:
        return ASKS if request.is_loop else str(request.messages[-1].content).upper()

    return ScriptedClient(reply)


def test_recursion_is_replaced_as_the_guide_does() -> None:
    names: dict[str, Any] = {"model": model()}
    exec(example("query_handler=with_index"), names)
    response = names["rlm"].completion("text", "?").response
    assert response == "Paris; Error: it is not in the index; PLAIN; ['ONE', 'TWO']"


def test_batch_is_followed_as_the_guide_does(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"model": model()}
    exec(example("on_event=show"), names)
    names["rlm"].completion("text", "?")
    told = capsys.readouterr().out.splitlines()
    assert told == [f"batch {batch}: {done} of 2 calls" for batch in (1, 2) for done in (1, 2)]


class Translator:
    model_name = "translator"

    async def complete(self, request: LMRequest) -> LMReply:
        asked = str(request.messages[-1].content)
        if asked == "Translate: Maus":
            raise ModelFailed("translator: not this one")
        return LMReply(f"({asked})", Usage(1, 3, 2))

    async def aclose(self) -> None:
        """Nothing is held."""


def test_handler_is_asked_as_the_guide_does(capsys: pytest.CaptureFixture[str]) -> None:
    exec(example("handler.batch_completion("), {"client": Translator()})
    assert capsys.readouterr().out == "(One question.)\n(Translate: Haus) 2\ntranslator: not this one 0\n"
