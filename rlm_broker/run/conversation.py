"""The messages of one run's loop, kept within its model's window.

Each request is counted before it is sent. If it is too long, three steps follow, until it fits: older outputs are cut,
then a summary by the model replaces the conversation, then the newest output is cut. The summary comes second since it
costs a call; the newest output comes last since the model has not read it yet.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from rlm_broker.errors import ModelFailed
from rlm_broker.results import ChatMessage
from rlm_broker.run.tokens import estimated
from rlm_broker.run.tree import Progress
from rlm_broker.values.text import shorten

FEWEST_OLDER_CHARS: Final = 500
"""Minimum characters of an older message after a cut."""
FEWEST_LAST_CHARS: Final = 2_000
"""Minimum characters of the newest message after a cut: its end is the instruction."""
AFTER_REFUSAL: Final = 0.7
"""Share of a refused request: the next request, and all later ones, are cut to it."""
LEAST_FACTOR: Final = 0.5
"""Least ratio of the provider's count of input tokens to our own. A lower one is no count of the whole request: some
providers leave out what they had cached."""
_ALLOWED: Final = re.compile(
    r"(?:maximum|limit|context (?:length|size|window)|at most)\b[^0-9]{0,60}(\d[\d,]{2,9})|> ?(\d[\d,]{2,9}) maximum",
    re.IGNORECASE,
)
"""The bound in a refusal: "maximum context length is 8192 tokens", "210000 tokens > 200000 maximum"."""
Summarise = Callable[[], Awaitable[None]]
"""Replaces all messages of a conversation but the last by a summary."""


class Conversation:
    """Keeps `progress.messages` short enough. The first two, system prompt and opening, stay as they are.

    Args:
        limit_tokens: Maximum tokens of a request; None sets no limit.
        count: Returns the tokens of a text.
    """

    def __init__(
        self, progress: Progress, limit_tokens: float | None, count: Callable[[str], Awaitable[float]]
    ) -> None:
        self._progress = progress
        self._limit_tokens = limit_tokens
        self._count = count
        self._counted: dict[str, float] = {}
        self._factor = 1.0
        self._refused_chars: int | None = None

    async def fit(self, summarise: Summarise) -> None:
        """Make the next request short enough, as far as that is possible.

        Args:
            summarise: Replaces all messages but the last by a summary.
        """
        limit = self._limit_tokens
        if limit is None or len(self._progress.messages) <= 2 or self._certainly_fits(limit):
            return
        if await self.tokens() <= limit:
            return
        await self.shorten(range(2, len(self._progress.messages) - 1), FEWEST_OLDER_CHARS, only_role="user")
        # Up to 4 are the system prompt, the opening, one reply and its outcome: there is no earlier turn to summarise.
        if await self.tokens() > limit and len(self._progress.messages) > 4:
            await summarise()
        await self.shorten(range(len(self._progress.messages) - 1, len(self._progress.messages)), FEWEST_LAST_CHARS)

    async def shorten(self, which: range, fewest_chars: int, only_role: str | None = None) -> None:
        """Cut the longest messages of `which` until the request fits, but none to fewer than `fewest_chars` characters.

        The cap is halved step by step, and all messages above it are cut to it. The tokens of a cut message are
        estimated from its share of characters: counting each again would call the tokenizer once for each step.
        """
        messages = self._progress.messages = [*self._progress.messages]  # marks of earlier turns have the uncut ones
        before = {each: str(messages[each].content) for each in which if only_role in (None, messages[each].role)}
        counted = {each: self._counted.get(text) or estimated(text) for each, text in before.items()}
        cap = max(map(len, before.values()), default=0)
        while cap > fewest_chars and self._limit_tokens is not None and await self.tokens() > self._limit_tokens:
            cap = max(fewest_chars, cap // 2)
            for each, text in before.items():
                if len(text) > cap:
                    self._counted.pop(str(messages[each].content), None)
                    short = shorten(text, cap)
                    self._counted[short] = counted[each] * len(short) / len(text)
                    messages[each] = ChatMessage(messages[each].role, short)

    def _certainly_fits(self, limit: float) -> bool:
        """Whether the next request has no more characters than tokens are allowed. Then counting is needless."""
        return sum(len(str(message.content)) for message in self._progress.messages) * max(1, self._factor) <= limit

    async def tokens(self) -> float:
        """Return the tokens of the next request: the client's count, corrected by the counts of its provider."""
        return await self._counts(self._progress.messages) * self._factor

    async def learn(self, input_tokens: int) -> None:
        """Correct later counts by the provider's count of the last request, whose reply is the last message."""
        if input_tokens and self._limit_tokens is not None:
            counted = await self._counts(self._progress.messages[:-1])
            self._factor = max(LEAST_FACTOR, input_tokens / max(counted, 1.0))

    async def _counts(self, messages: Sequence[ChatMessage]) -> float:
        total = 0.0
        for message in messages:
            text = str(message.content)
            if text not in self._counted:
                self._counted[text] = await self._count(text)
            total += self._counted[text]
        return total

    async def takes_refusal(self, failed: ModelFailed) -> bool:
        """Whether a shorter request may replace a failed one. If so, lower the limit: to less than was refused, and to
        the number of tokens that the provider allows, if its sentence has one."""
        if self._limit_tokens is None or len(self._progress.messages) <= 2 or not failed.is_too_long:
            return False
        chars = sum(len(str(message.content)) for message in self._progress.messages)
        if self._refused_chars is not None and chars >= self._refused_chars:
            return False  # it could not be shortened any more
        self._refused_chars = chars
        self._limit_tokens = min(self._limit_tokens, AFTER_REFUSAL * await self.tokens())
        if (allowed := allowed_tokens(str(failed))) is not None:
            self._limit_tokens = min(self._limit_tokens, allowed)
        return True


def allowed_tokens(sentence: str) -> int | None:
    """Return the number of tokens that a provider's refusal says to be the most; None if it says none."""
    found = _ALLOWED.search(sentence)
    return None if found is None else int(re.sub(r"\D", "", found[1] or found[2]))
