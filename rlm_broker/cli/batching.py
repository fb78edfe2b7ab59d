"""The work of `rlm-broker batch`: settings, one batch, and what the user is told of it."""

import contextlib
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rlm_broker.batch.batch import Batch
from rlm_broker.batch.items import BatchResult
from rlm_broker.batch.limits import BatchLimits
from rlm_broker.batch.progress import BatchProgress
from rlm_broker.cli import stopping
from rlm_broker.cli.batch_input import BatchInput
from rlm_broker.cli.batch_progress import BatchLine, used
from rlm_broker.cli.composing import rlm_of
from rlm_broker.cli.ps import seconds
from rlm_broker.cli.sources import STDIN
from rlm_broker.cli.spans import sent_spans
from rlm_broker.cli.terminal import say
from rlm_broker.control.server import ControlSocket
from rlm_broker.errors import ConfigurationError, LimitReached, RunCancelled
from rlm_broker.rlm import RLM
from rlm_broker.settings.settings import Settings, assigned
from rlm_broker.settings.user_files import function_of, schema_of
from rlm_broker.shown import as_json as to_json
from rlm_broker.trace.story import counted


def run(
    input: str,
    out: Path,
    *,
    root: str | None,
    encoding: str | None,
    strict_text: bool,
    score: str | None,
    system: str | None,
    assignments: tuple[str, ...],
    is_quiet: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Ask the questions of a file, and write their results to another.

    Args:
        flags: Settings, limits of the batch, and further arguments of `RLM.batch`.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: An option, a setting or a line cannot be used, or OUT belongs to another batch.
    """
    _require_apart(input, out)
    arguments = {name: flags.pop(name) for name in ("max_concurrent", "fail_fast", "trajectories", "retry_failed")}
    limits = _limits(**{name: flags.pop(f"batch_{name}") for name in ("budget_usd", "tokens", "timeout")})
    settings = Settings(assigned(assignments, **flags))
    schema = settings.path("output_type")
    items = BatchInput(input, root, encoding, "strict" if strict_text else "replace")
    items.check()
    with ExitStack() as stack:
        rlm = rlm_of(settings, system_prompt=system, on_event=stack.enter_context(sent_spans()))
        batch = rlm.batch(
            items,
            out=out,
            limits=limits,
            output_type=None if schema is None else schema_of(schema),
            score=None if score is None else function_of(score, "score"),
            **arguments,
        )
        stack.enter_context(ControlSocket("batch", _stopping(batch)))
        ...
