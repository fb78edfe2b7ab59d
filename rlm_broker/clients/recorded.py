"""Replays of recorded runs: a model whose replies come from a recording."""

import asyncio

import msgspec

from rlm_broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.clients.recording import CallId, Recording, Request
from rlm_broker.errors import ModelFailed, ReplayDiverged
from rlm_broker.usage import Usage

OWN_PROMPT = "(the system prompt of rlm-broker)"
"""Text that stands for the built-in system prompt in a recording."""


class RecordedClient(BaseClient):
    """Replies from a recording. No request is sent, and the cost is 0.

    If a call was not recorded, it fails, and so do all later calls of all clients on the recording. Later calls of the
    run would differ for that reason alone, and would hide the first difference.
    """

    def __init__(self, recording: Recording, model_name: str) -> None:
        self.model_name = model_name
        self.context_tokens = recording.models.windows.get(model_name)
        self._recording = recording

    async def complete(self, request: LMRequest) -> LMReply:
        """Return the recorded reply.

        Raises:
            ReplayDiverged: No such call was recorded, and the message shows the difference to the nearest one; or the
                recorded run was stopped in this call.
            ModelFailed: The recorded call failed; the message is the recorded one.
        """
        if self._recording.diverged is not None:
            raise ReplayDiverged(self._recording.diverged)
        asked = recorded_request(request)
        call = self._recording.find(asked)
        if call is None:
            self._recording.diverged = self._recording.difference(asked, request.id or CallId("?", 0, 0))
            raise ReplayDiverged(self._recording.diverged)
        if call.run_stopped:
            path = self._recording.path
            self._recording.diverged = f"the recording {path} ends here: its run was stopped in this call ({call.id})"
            raise ReplayDiverged(self._recording.diverged)
        if call.cancelled:
            await asyncio.Event().wait()  # a time limit cancelled it when it was recorded, and will again
        if call.failure is not None:
            raise ModelFailed(call.failure.message, "request" if call.failure.cause == "request" else "provider")
        if request.on_text is not None and call.text:
            request.on_text(call.text)
        return LMReply(call.text, Usage(1, 0, 0, 0.0, stored_calls=1), call.problem, call.model)


def recorded_request(request: LMRequest) -> Request:
    """Return the parts of a request by which a recording finds its reply.

    The built-in system prompt is left out, because it lists the packages of the machine.
    """
    messages = [{"role": message.role, "content": message.content} for message in request.messages]
    if request.has_own_prompt:
        messages[0]["content"] = OWN_PROMPT
    temperature = msgspec.UNSET if request.temperature is None else float(request.temperature)
    return Request(messages, request.model, request.max_completion_tokens, request.depth, request.sample, temperature)
