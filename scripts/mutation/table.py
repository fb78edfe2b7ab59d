"""The modules that hold promises, each with the tests that guard them, and the faults that no test can notice."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.mutation.trials import Tried

SURVIVORS = Path(__file__).with_name("survivors.toml")
_PARSING = ["tests/rlm_broker/values/test_parsing.py"]
MODULES = {
    "rlm_broker/limits.py": ["tests/rlm_broker/test_limits.py"],
    "rlm_broker/events/redaction.py": ["tests/rlm_broker/events/test_redaction.py"],
    "rlm_broker/values/pages.py": ["tests/rlm_broker/values/test_markdown.py", "tests/rlm_broker/values/test_pages.py"],
    "rlm_broker/values/markup.py": ["tests/rlm_broker/values/test_markup.py"],
    "rlm_broker/run/ledger.py": ["tests/rlm_broker/run/test_ledger.py"],
    "rlm_broker/run/reply.py": ["tests/rlm_broker/run/test_reply.py"],
    "rlm_broker/run/children.py": ["tests/rlm_broker/run/test_children.py", "tests/rlm_broker/run/test_recursion.py"],
    "rlm_broker/run/conversation.py": ["tests/rlm_broker/run/test_conversation.py"],
    "rlm_broker/run/queries.py": ["tests/rlm_broker/run/test_queries.py"],
    "rlm_broker/run/runner.py": [
        *(f"tests/rlm_broker/run/test_{name}.py" for name in ("reply", "run", "queries", "conversation")),
        "tests/e2e/test_rlm.py",
    ],
    "rlm_broker/sandbox/blocks/block_clock.py": ["tests/rlm_broker/sandbox/blocks/test_block_clock.py"],
    "rlm_broker/broker/routing.py": ["tests/rlm_broker/broker/test_routing.py"],
    "rlm_broker/values/parsing/__init__.py": _PARSING,
    "rlm_broker/values/parsing/fences.py": _PARSING,
    "rlm_broker/values/parsing/finals.py": _PARSING,
    "rlm_broker/values/parsing/notes.py": _PARSING,
    "rlm_broker/values/parsing/source.py": _PARSING,
    "rlm_broker/broker/transport/session.py": ["tests/rlm_broker/broker/transport/test_session.py"],
    "rlm_broker/concurrency/turns.py": ["tests/rlm_broker/concurrency/test_turns.py"],
    "rlm_broker/concurrency/deadline.py": ["tests/rlm_broker/concurrency/test_deadline.py"],
    "rlm_broker/serve/guard.py": ["tests/rlm_broker/serve/test_guard.py"],
    "rlm_broker/serve/bodies.py": ["tests/rlm_broker/serve/test_bodies.py"],
    "rlm_broker/broker/client_queue.py": ["tests/rlm_broker/broker/test_client_queue.py"],
    "rlm_broker/broker/cache.py": ["tests/rlm_broker/broker/test_cache.py"],
    "rlm_broker/serve/hosting/owner.py": ["tests/rlm_broker/serve/hosting/test_owner.py"],
    "rlm_broker/serve/hosting/repls.py": ["tests/rlm_broker/serve/hosting/test_repls.py"],
    "rlm_broker/batch/shards.py": ["tests/rlm_broker/batch/test_status.py"],
    "sandbox_worker/init/usage_watch.py": ["tests/sandbox_worker/init/test_usage_watch.py"],
    "sandbox_worker/init/memory.py": ["tests/sandbox_worker/init/test_memory.py"],
    "sandbox_worker/init/output_pipes.py": ["tests/sandbox_worker/init/test_output_pipes.py"],
    "rlm_broker/sandbox/blocks/block_result.py": [
        "tests/rlm_broker/sandbox/blocks/test_block_result.py",
        "tests/rlm_broker/sandbox/blocks/test_outcome.py",
    ],
    "sandbox_worker/wire/values.py": ["tests/sandbox_worker/wire/test_values.py"],
    "sandbox_worker/wire/frames.py": ["tests/sandbox_worker/wire/test_frames.py"],
    "sandbox_worker/wire/bounds.py": ["tests/sandbox_worker/wire/test_bounds.py"],
}


@dataclass(frozen=True)
class Survivor:
    """A fault that may survive.

    Attributes:
        module, where, was, becomes, number: Of which mutant, see `Mutant`.
        reason: Why no test can notice, or why none should.
    """

    module: str
    where: str
    was: str
    becomes: str
    reason: str
    number: int = 1

    def is_of(self, tried: Tried) -> bool:
        """Whether it is that fault."""
        return (self.module, self.where, self.was, self.becomes, self.number) == (tried.module, *tried.mutant.key)


def accepted(path: Path = SURVIVORS) -> list[Survivor]:
    """Read the table of survivors."""
    return [Survivor(**each) for each in tomllib.loads(path.read_text()).get("survivor", [])]


def unexplained(tried: Iterable[Tried], survivors: Sequence[Survivor]) -> list[Tried]:
    """List the survivors that the table does not have."""
    return [each for each in tried if each.survived and not any(known.is_of(each) for known in survivors)]


def outdated(tried: Sequence[Tried], survivors: Iterable[Survivor], *, all_were_tried: bool) -> list[Survivor]:
    """List the entries of the table whose fault was noticed, or, if all faults were tried, is not there."""
    modules = {each.module for each in tried}
    old = []
    for known in survivors:
        matching = [each for each in tried if known.is_of(each)]
        is_gone = all_were_tried and known.module in modules and not matching
        if is_gone or any(not each.survived for each in matching):
            old.append(known)
    return old
