"""Whole programs of the OpenAI Agents SDK on scripted models, with our sandboxes."""

import asyncio
import contextlib
from collections.abc import Iterator

from rlm_broker.integrations.openai_agents import Client


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """A session that has run a command."""
    client = Client()
    with asyncio.Runner() as runner:
        session = runner.run(client.create())
        runner.run(session.start())
        assert runner.run(session.exec("echo 1")).stdout == b"1\n"
        yield
        runner.run(session.aclose())
        runner.run(client.delete(session))
