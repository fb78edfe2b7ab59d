"""Failures of commands: one sentence on stderr, or one JSON object on stdout, and the right exit code."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rlm_broker.cli import signals
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ModelFailed, RlmBrokerError, RunCancelled, RunFailed
from rlm_broker.values.text import shorten

LONGEST_CHARS = 4_000
"""Maximum characters of a sentence; a longer one repeats the user's input, and loses its middle."""


def fail(
    command: str, kind: str, sentence: str, exit_code: int, *, as_json: bool, run: RunFailed | None = None
) -> NoReturn:
    """Print why a command failed, and exit.

    Args:
        command: Its name, for example `ask`; empty for `rlm-broker` itself.
        kind: Name of the error in JSON.
        sentence: Why it failed.
        run: The error of a run. Its partial answer and what it used become part of the JSON.
    """
    sentence = shorten(sentence, LONGEST_CHARS, gap="")
    if as_json:
        had = {} if run is None else _had(run)
        say(json.dumps({"error": {"kind": kind, "message": sentence, **had}}, ensure_ascii=False))
    else:
        say(f"{' '.join(['rlm-broker', command]).strip()}: {sentence}", err=True)
    sys.exit(exit_code)


@contextmanager
def failures(command: str, *, as_json: bool, debug: bool = False) -> Iterator[None]:
    """Turn the errors that the library raises on purpose into the end of a command. `debug` lets them pass."""
    warnings.showwarning = _warn
    try:
        yield
    except RlmBrokerError as error:
        if debug:
            raise
        run = error if isinstance(error, RunFailed) else None
        kind, sentence, exit_code = error.kind, str(error), error.exit_code
        if isinstance(error, RunCancelled) or signals.has_come():  # signals may hit the fork server, too
            kind, sentence, exit_code = RunCancelled.kind, str(RunCancelled()), signals.exit_code()
        if isinstance(error, ModelFailed) and error.partial_answer and not as_json:
            say(error.partial_answer)
        fail(command, kind, sentence, exit_code, as_json=as_json, run=run)
    except KeyboardInterrupt:
        fail(command, "cancelled", "stopped", signals.exit_code(), as_json=as_json)


def _had(run: RunFailed) -> dict[str, Any]:
    """Return what a failed run had, by the names in the JSON of an answer; empty if no run had begun."""
    partial = {} if run.partial_answer is None else {"partial_answer": run.partial_answer}
    if not run.execution_time:
        return partial
    return {
        **partial,
        "iterations": len(run.trajectory),
        "execution_time": run.execution_time,
        "usage_summary": run.usage_summary.to_dict(),
        "usage_by_depth": {depth: usage.to_dict() for depth, usage in run.usage_by_depth.items()},
    }


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}", err=True)
