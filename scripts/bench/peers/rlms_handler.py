"""The reference implementation's `LMHandler` with a client that answers ok: prints its port, and serves."""

import json
import sys
from typing import Any

from rlm.clients.base_lm import BaseLM  # type: ignore[import-not-found, unused-ignore]
from rlm.core.lm_handler import LMHandler  # type: ignore[import-not-found, unused-ignore]
from rlm.core.types import ModelUsageSummary, UsageSummary  # type: ignore[import-not-found, unused-ignore]


class NoOp(BaseLM):  # type: ignore[misc, unused-ignore]
    """Says ok."""

    def completion(self, _prompt: Any) -> str:
        """One completion."""
        return "ok"

    async def acompletion(self, _prompt: Any) -> str:
        """The same."""
        return "ok"

    def get_usage_summary(self) -> Any:
        """All calls."""
        return UsageSummary(model_usage_summaries={})

    def get_last_usage(self) -> Any:
        """One call."""
        return ModelUsageSummary(total_calls=1, total_input_tokens=0, total_output_tokens=0)


with LMHandler(NoOp(model_name="noop")) as handler:
    for _ in sys.stdin:
        print(json.dumps([handler.port]), flush=True)
