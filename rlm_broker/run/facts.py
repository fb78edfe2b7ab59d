"""Facts for the system prompt of a run, read from its tree, so that no number is configured twice."""

import sys
from typing import Final

from rlm_broker.broker.clients.base import BaseClient
from rlm_broker.errors import UnknownModel
from rlm_broker.run.calls import Caller
from rlm_broker.run.ledger import CAUTIOUS_CHARS_PER_TOKEN
from rlm_broker.run.prompts.system import Facts, rounded_down
from rlm_broker.run.tool_set import ToolSet
from rlm_broker.run.tree import Tree
from rlm_broker.sandbox.workers.python_paths import WORTH_TELLING
from sandbox_worker.wire.names import CONTEXT

MOST_MODELS: Final = 20
"""Most models that a prompt names; it leaves out further ones."""


def facts_of(tree: Tree, caller: Caller, tools: ToolSet, context_name: str = CONTEXT) -> Facts:
    """Return the facts of a run.

    Args:
        context_name: Name of the variable that holds the context.
    """
    routing, below = tree.calls.routing, caller.depth + 1
    sandbox = tree.sandbox
    return Facts(
        tree.limits,
        caller.depth,
        reads_chars(routing.pick_for_code(None, below)),
        tree.calls.known_window(caller),
        [] if routing.policy == "pinned" else _models(tree, below),
        () if sandbox is None else sandbox.importable(WORTH_TELLING),
        f"{sys.version_info.major}.{sys.version_info.minor}",
        tools.documentation(),
        [*tools.names, *tools.values],
        context_name,
    )


def reads_chars(client: BaseClient) -> int | None:
    """Return how many characters a model reads for certain, as a round number; None if its window is not known."""
    if client.context_tokens is None:
        return None
    chars = int(client.context_tokens * CAUTIOUS_CHARS_PER_TOKEN)
    return rounded_down(chars, 2)


def _models(tree: Tree, depth: int) -> list[tuple[str, str]]:
    found = []
    for name in tree.calls.routing.names[:MOST_MODELS]:
        try:
            client = tree.calls.routing.pick_for_code(name, depth)
        except UnknownModel:
            continue
        chars = reads_chars(client)
        reads = "" if chars is None else f"reads {chars:,} characters"
        is_known = client.model_name == name
        found.append((name, ", ".join(each for each in ("" if is_known else client.model_name, reads) if each)))
    return [(name, what or "of the user's") for name, what in found]
