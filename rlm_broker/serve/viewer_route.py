"""The viewer of the server: a key sees its own runs, and with the right `watch` those of all keys."""

import os
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.routing import Mount

from rlm_broker.events.trace import encoded, plain
from rlm_broker.serve.bodies import WholeBodies
from rlm_broker.serve.guard import ServerKey, key_of
from rlm_broker.serve.hosting.runs import HostedRun
from rlm_broker.serve.parts import Parts
from rlm_broker.watch.board import QUESTION_CHARS
from rlm_broker.watch.messages import RunStatus
from rlm_broker.watch.viewer.live import MOST_BODY_BYTES, MOST_BODY_VALUES, LiveSource, live_app

PATH = "/viewer"
"""Path of the viewer. The page itself shows no run, so it needs no key; its data does."""


class KeysRuns:
    """The runs that one key may see, as a source of the viewer.

    Args:
        parts: Parts of the server.
        key: The key.
    """

    def __init__(self, parts: Parts, key: ServerKey) -> None:
        self._runs = parts.runs
        self._key = key

    async def runs(self) -> Sequence[RunStatus]:
        """Return the runs of the key, or of all keys if it may watch them."""
        return [status_of(hosted) for hosted in self._seen(may="watch" in self._key.rights)]

    async def lines(self, run: str, after: int) -> AsyncIterator[bytes]:
        """Yield the events of a run, each as a line of a trace, until it ends.

        Raises:
            LookupError: The key sees no such run.
        """
        found = self._found(run, may="watch" in self._key.rights)
        if found is None:
            raise LookupError(run)
        async for event in found.events(after):
            yield encoded(plain(event))

    async def stop(self, run: str, now: bool) -> bool:
        """Stop a run of the key, or of another key if it may stop those; return whether there was one."""
        found = self._found(run, may="stop" in self._key.rights)
        if found is None:
            return False
        if now:
            found.run.cancel()
        else:
            found.stop()
        return True

    def _seen(self, *, may: bool) -> list[HostedRun]:
        return self._runs.all() if may else self._runs.of(self._key.owner)

    def _found(self, run: str, *, may: bool) -> HostedRun | None:
        return next((hosted for hosted in self._seen(may=may) if hosted.id == run), None)


def routes(parts: Parts) -> list[Mount]:
    """Return the routes of the viewer."""

    async def source_of(request: Request) -> LiveSource | None:
        return KeysRuns(parts, key_of(request))

    return [Mount(PATH, WholeBodies(live_app(source_of), MOST_BODY_BYTES, parts.settings.stall_s, MOST_BODY_VALUES))]


def status_of(hosted: HostedRun) -> RunStatus:
    """Return what is told of a run."""
    progress = hosted.progress
    ended = progress.ended
    how = ended.kind if ended is not None else "cancelled"
    question = progress.question or hosted.task
    return RunStatus(
        id=hosted.id,
        pid=os.getpid(),
        question=None if question is None else question[:QUESTION_CHARS],
        model=progress.model,
        state=how if hosted.state == "ended" else hosted.state,
        turn=progress.turn,
        doing=hosted.doing,
        doing_since=progress.since,
        started=hosted.created_at,
        ended=hosted.ended_at,
        runs=progress.runs,
        tokens=progress.tokens,
        cost_usd=progress.cost_usd,
        owner=hosted.owner.name,
    )
