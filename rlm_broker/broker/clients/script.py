"""A model with prepared replies, for tests, examples and demonstrations."""

import asyncio
from collections.abc import Callable, Sequence

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.errors import ConfigurationError, ModelFailed
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage


class ScriptedClient(BaseClient):
    """Gives prepared replies, in the order in which the calls begin. It counts words as tokens: text split at white
    space.

    Example:
        ```python
        client = ScriptedClient(["```repl\\nFINAL(len(context))\\n```"])
        RLM(client).completion("abc", "How long is it?").response  # '3'
        ```

    Args:
        replies: One reply for each call, with an exception for a failing one; or a function from the request to the
            text. Calls past the end of a sequence fail.
        model_name: Name in reports.
        delay_s: Seconds that each call takes.
        cost_per_call: US dollars of each call; None is an unknown price.

    Attributes:
        requests: All requests so far, with the failed ones.
    """

    def __init__(
        self,
        replies: Sequence[str | Exception] | Callable[[LMRequest], str],
        model_name: str = "scripted",
        delay_s: float = 0,
        cost_per_call: float | None = None,
    ) -> None:
        if isinstance(replies, str) or not (callable(replies) or isinstance(replies, Sequence)):
            raise ConfigurationError("replies must be a list or a function: put a single reply into a list")
        self.model_name = model_name
        self.requests: list[LMRequest] = []
        self._replies = replies if callable(replies) else tuple(replies)
        self._delay_s = delay_s
        self._cost_per_call = cost_per_call

    async def complete(self, request: LMRequest) -> LMReply:
        """Return the next reply.

        Example:
            ```python
            (await ScriptedClient(["one", "two"]).complete(request)).text  # 'one'
            ```

        Raises:
            ModelFailed: The script says so or is used up, or its function raised.
        """
        self.requests.append(request)
        number = len(self.requests)
        if self._delay_s > 0:
            await asyncio.sleep(self._delay_s)
        text = (
            self._called(self._replies, request) if callable(self._replies) else self._scripted(self._replies, number)
        )
        return LMReply(
            text,
            Usage(
                total_calls=1,
                total_input_tokens=sum(_words(message) for message in request.messages),
                total_output_tokens=len(text.split()),
                total_cost=self._cost_per_call,
            ),
        )

    def _called(self, replies: Callable[[LMRequest], str], request: LMRequest) -> str:
        try:
            return replies(request)
        except Exception as error:  # the function is the user's and may raise anything
            raise self._failed(error) from error

    def _scripted(self, replies: tuple[str | Exception, ...], number: int) -> str:
        if number > len(replies):
            raise ModelFailed(f"{self.model_name}: call {number} of a script with {_counted(len(replies))}")
        reply = replies[number - 1]
        if isinstance(reply, Exception):
            raise self._failed(reply) from reply
        return reply

    def _failed(self, error: Exception) -> ModelFailed:
        if isinstance(error, ModelFailed):
            return ModelFailed(str(error))
        return ModelFailed(f"{self.model_name}: {type(error).__name__}: {error}")


def _counted(replies: int) -> str:
    return "1 reply" if replies == 1 else f"{replies} replies"


def _words(message: ChatMessage) -> int:
    if isinstance(message.content, str):
        return len(message.content.split())
    texts = (part.get("text") for part in message.content if isinstance(part, dict))
    return sum(len(text.split()) for text in texts if isinstance(text, str))
