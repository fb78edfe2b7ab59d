"""How a command fails: one sentence on stderr, or one JSON object on stdout, and the right exit code."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rlm_broker.cli import stopping
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ModelFailed, RlmBrokerError, RunCancelled, RunFailed


def fail(
    command: str, kind: str, sentence: str, exit_code: int, *, as_json: bool, run: RunFailed | None = None
) -> NoReturn:
    """Say why, and exit. `run` is the error of a run: its partial answer and what it used are in the JSON."""
    if as_json:
        had = {} if run is None else _had(run)
        say(json.dumps({"error": {"kind": kind, "message": sentence, **had}}, ensure_ascii=False))
    else:
        say(f"{' '.join(['rlm-broker', command]).strip()}: {sentence}", err=True)
    sys.exit(exit_code)


@contextmanager
def failures(command: str, *, as_json: bool, debug: bool = False) -> Iterator[None]:
    """What the library raises on purpose ends the command here."""
    warnings.showwarning = _warn
    try:
        yield
    except RlmBrokerError as error:
        if debug:
            raise
        run = error if isinstance(error, RunFailed) else None
        kind, sentence, exit_code = error.kind, str(error), error.exit_code
        if isinstance(error, RunCancelled) or stopping.has_come():  # the signal may have hit the fork server, too
            kind, sentence, exit_code = RunCancelled.kind, str(RunCancelled()), stopping.exit_code()
        if isinstance(error, ModelFailed) and error.partial_answer and not as_json:
            say(error.partial_answer)
        fail(command, kind, sentence, exit_code, as_json=as_json, run=run)
    except KeyboardInterrupt:
        fail(command, "cancelled", "stopped", stopping.exit_code(), as_json=as_json)


def _had(run: RunFailed) -> dict[str, Any]:
    """What a failed run had, under the names that the JSON of an answer has; nothing if none had begun."""
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
