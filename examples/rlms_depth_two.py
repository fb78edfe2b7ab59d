"""The reference RLM at depth two, with the code of the root and of both children in sandboxes.

Needs `pip install 'rlm-broker[rlms]'`. Without an argument a scripted model answers; else give the name of a model of
OpenAI's, whose key is in the environment.
"""

import sys
from typing import Any

import rlm.core.rlm
from rlm import RLM
from rlm.clients import BaseLM
from rlm.core.types import ModelUsageSummary, UsageSummary

from rlm_broker.integrations import rlms

REVIEWS = "good\nbad\ngood\ngood\nbad\ngood\n"
ROOT = """```repl
lines = context.splitlines()
counts = rlm_query_batched(["\\n".join(lines[:3]), "\\n".join(lines[3:])])
answer["content"] = f"{sum(int(count) for count in counts)} of {len(lines)}"
answer["ready"] = True
```"""
CHILD = """```repl
answer["content"], answer["ready"] = context.count("good"), True
```"""


class Scripted(BaseLM):  # type: ignore[misc]
    """A model that writes the code of a root or of a child."""

    def __init__(self) -> None:
        super().__init__(model_name="scripted")

    def completion(self, prompt: Any) -> str:
        """Return code."""
        return ROOT if "How many" in str(prompt) else CHILD

    async def acompletion(self, prompt: Any) -> str:
        """Return code."""
        return self.completion(prompt)

    def get_usage_summary(self) -> UsageSummary:
        """Return no usage."""
        return UsageSummary(model_usage_summaries={})

    def get_last_usage(self) -> ModelUsageSummary:
        """Return no usage."""
        return ModelUsageSummary(1, 0, 0)


def main() -> None:
    """Answer one question."""
    rlms.install()
    if len(sys.argv) < 2:
        rlm.core.rlm.get_client = lambda *_: Scripted()
    name = sys.argv[1] if len(sys.argv) > 1 else "scripted"
    model = RLM(backend="openai", backend_kwargs={"model_name": name}, max_depth=2)
    print(model.completion(REVIEWS, root_prompt="How many reviews are good?").response)


if __name__ == "__main__":
    main()
