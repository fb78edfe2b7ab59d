"""How a command fails: one sentence on stderr, or one JSON object on stdout, and the right exit code."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rlm_broker.cli.terminal import say
from rlm_broker.errors import RlmBrokerError


def fail(
    command: str, kind: str, sentence: str, exit_code: int, *, as_json: bool, partial_answer: str | None = None
) -> NoReturn:
    """Say why, and exit."""
    if as_json:
        partial = {} if partial_answer is None else {"partial_answer": partial_answer}
        say(json.dumps({"error": {"kind": kind, "message": sentence, **partial}}, ensure_ascii=False))
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
        partial = getattr(error, "partial_answer", None)
        fail(command, error.kind, str(error), error.exit_code, as_json=as_json, partial_answer=partial)
    except KeyboardInterrupt:
        fail(command, "cancelled", "stopped", 130, as_json=as_json)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}", err=True)
