"""What `rlm-broker ask` does."""

import dataclasses
import json
import sys
from pathlib import Path

from rlm_broker.cli.limiting import limits_from
from rlm_broker.cli.progress import Progress
from rlm_broker.context import Paths
from rlm_broker.errors import ConfigurationError
from rlm_broker.rlm import RLM
from rlm_broker.trace.events import Event
from rlm_broker.trace.writer import TraceWriter
from rlm_broker.types import Completion


def ask(
    question: str,
    paths: tuple[str, ...],
    model: str,
    sub_model: str | None,
    max_depth: int | None,
    isolation: str,
    assignments: tuple[str, ...],
    system: str | None,
    trace: Path | None,
    quiet: bool,
) -> Completion:
    """Answer it, with progress and trace as asked for."""
    limits = limits_from(assignments, max_depth=max_depth)
    progress = None if quiet else Progress(sys.stderr)
    writer = TraceWriter(trace) if trace else None

    def on_event(event: Event) -> None:
        if writer is not None:
            writer(event)
        if progress is not None:
            progress(event)

    try:
        rlm = RLM(model, sub_model, limits=limits, isolation=isolation, system_prompt=system, on_event=on_event)
        return rlm.completion(_context(paths), question)
    finally:
        if progress is not None:
            progress.close()
        if writer is not None:
            writer.close()


def _context(paths: tuple[str, ...]) -> object:
    if "-" not in paths:
        return Paths(paths)
    if len(paths) > 1:
        raise ConfigurationError("- is stdin, and cannot be combined with other paths")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"stdin is not UTF-8 text: byte at offset {error.start}") from None
    if not text:
        raise ConfigurationError("stdin is empty: there is nothing to ask about")
    return text


def as_json(completion: Completion) -> str:
    """One object: everything but the conversation, which a trace holds."""
    shown = dataclasses.asdict(dataclasses.replace(completion, messages=(), trajectory=()))
    del shown["messages"], shown["trajectory"]
    shown["usage_summary"] = completion.usage_summary.to_dict()
    return json.dumps(shown, ensure_ascii=False)
