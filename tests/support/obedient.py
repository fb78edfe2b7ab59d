"""A model that runs the code that its question asks for, so that a test of the server says what the run does."""

import re

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.script import ScriptedClient

_ASKED = re.compile(r"DO: (.*)")


def obedient(name: str = "obedient") -> ScriptedClient:
    """Reply to each call with a block of the line that follows "DO: " in the conversation, or with an answer."""
    return ScriptedClient(_reply, model_name=name, cost_per_call=0.25)


def _reply(request: LMRequest) -> str:
    for message in request.messages[1:]:
        if asked := _ASKED.search(str(message.content)):
            return f"I run it.\n```repl\n{asked[1]}\n```"
    return "FINAL(hello)"
