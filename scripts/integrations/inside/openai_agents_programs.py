"""Whole programs of the OpenAI Agents SDK on scripted models, with our sandboxes."""

import asyncio
import contextlib
import io
import runpy
from collections.abc import Iterator
from pathlib import Path

from rlm_broker.integrations.openai_agents import Client


def example() -> None:
    """The example prints what the agent's command has found."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples" / "sandbox_agent.py"), run_name="__main__")
    assert printed.getvalue() == "It is 30.\n", printed.getvalue()


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """A session that has run a command."""
    client = Client()
    loop = asyncio.new_event_loop()
    try:
        session = loop.run_until_complete(client.create())
        loop.run_until_complete(session.start())
        assert loop.run_until_complete(session.exec("echo 1")).stdout == b"1\n"
        yield
        loop.run_until_complete(session.aclose())
        loop.run_until_complete(client.delete(session))
    finally:
        loop.close()
