"""A model that says what another one said: a run replayed."""

import asyncio

import msgspec

from rlm_broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.clients.recording import CallId, Recording, Request
from rlm_broker.errors import ModelFailed, ReplayDiverged
from rlm_broker.results import Usage

OWN_PROMPT = "(the system prompt of rlm-broker)"


class RecordedClient(BaseClient):
    """Replies from a recording; nothing is sent, and nothing is paid.

    When something is asked that was not recorded, that call and all later ones of every client on the recording fail:
    whatever the run did after it would differ for that reason alone.
    """

    def __init__(self, recording: Recording, model_name: str) -> None:
        self.model_name = model_name
        self.context_tokens = recording.models.windows.get(model_name)
        self._recording = recording

    async def complete(self, request: LMRequest) -> LMReply:
        """The recorded reply.

        Raises:
            ReplayDiverged: There is none; the message shows the difference to the nearest, or says that the run was
                stopped in this call.
            ModelFailed: The recorded call failed, in these words.
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
            await asyncio.Event().wait()  # until the same time limit comes again
        if call.failure is not None:
            raise ModelFailed(call.failure.message, "request" if call.failure.cause == "request" else "provider")
        if request.on_text is not None and call.text:
            request.on_text(call.text)
        return LMReply(call.text, Usage(1, 0, 0, 0.0, stored_calls=1), call.problem, call.model)


def recorded_request(request: LMRequest) -> Request:
    """What of a request a recording holds. A system prompt of our own is not compared: packages are told in it."""
    messages = [{"role": message.role, "content": message.content} for message in request.messages]
    if request.has_own_prompt:
        messages[0]["content"] = OWN_PROMPT
    temperature = msgspec.UNSET if request.temperature is None else float(request.temperature)
    return Request(messages, request.model, request.max_completion_tokens, request.depth, request.sample, temperature)
