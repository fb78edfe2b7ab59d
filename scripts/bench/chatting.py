"""Runs over HTTP next to the same runs in the server's process, and what a client waits for."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from scripts.bench.measure import Effort, by_turns
from scripts.bench.peer import Peer
from scripts.bench.peers.http_server import CONTEXT, RUNS_AT_ONCE, RUNS_EACH
from scripts.bench.row import OURS, Row, side
from scripts.bench.serving import SERVER, Connection

CHAT = "/v1/chat/completions"
FOLLOWERS = 1_000
PARTS = [{"type": "text", "text": CONTEXT}, {"type": "text", "text": "How long is it?"}]


def asked(*, stream: bool, model: str = "one-turn") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": PARTS}], "stream": stream}


def chat(effort: Effort) -> list[Row]:
    """Compare one-turn runs per second over HTTP, plain and streamed, with those in the server's process."""
    with Peer("in its process", SERVER, None, "runs") as server, ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(RUNS_AT_ONCE))
        address = server.ask("address")
        connections = [stack.enter_context(Connection(**address)) for _ in range(RUNS_AT_ONCE)]

        def plain(connection: Connection) -> None:
            for _ in range(RUNS_EACH):
                answer = connection.post(CHAT, asked(stream=False))
                assert answer["choices"][0]["message"]["content"] == str(len(CONTEXT)), answer

        def streamed(connection: Connection) -> None:
            for _ in range(RUNS_EACH):
                assert b"[DONE]" in b"".join(connection.stream(CHAT, asked(stream=True)))

        def rate(one: Callable[[Connection], None]) -> Callable[[], list[float]]:
            def measured() -> list[float]:
                started = time.perf_counter()
                list(threads.map(one, connections))
                return [RUNS_EACH * RUNS_AT_ONCE / (time.perf_counter() - started)]

            return measured

        measures: list[Callable[[], list[float]]] = [rate(plain), rate(streamed), lambda: server.samples("runs")]
        for measure in measures:
            measure()
        plains, streams, insides = by_turns(effort.times(10), *measures)
        floor = server.side("/s", insides)
    rows = []
    for name, samples in (("plain", plains), ("streamed", streams)):
        taken = side(OURS, "/s", samples)
        rows.append(Row(f"one-turn runs over HTTP, {name}", taken, [floor], [taken.at_least_times(0.9, floor)]))
    return rows


def waits(effort: Effort) -> list[Row]:
    """Time what a client waits for: the first byte, an event, and the end of a run that it leaves."""
    first, events = [], []
    with Peer("", SERVER, None, "runs") as server, Connection(**server.ask("address")) as connection:
        for _ in range(effort.times(60)):
            started = time.time()
            arrived = [(time.time(), piece) for piece in connection.stream(CHAT, asked(stream=True))]
            first.append(arrived[0][0] - started)
            event_at = next(at for at, piece in arrived if b"reasoning" in piece)  # it may be with the first byte
            events.append(event_at - server.ask("replied")[0])
    gone = []
    with Peer("", SERVER, None, "hanging") as server:
        for _ in range(effort.times(40)):
            with Connection(**server.ask("address")) as leaving:
                pieces = leaving.stream(CHAT, asked(stream=True, model="hanging"))
                next(pieces)
                server.ask("running")
                left = time.time()
            gone.append(server.ask("gone")[0] - left)
    byte, event, ended = side(OURS, "ms", first), side(OURS, "ms", events), side(OURS, "ms", gone)
    return [
        Row("first byte of a streamed run", byte, [], [byte.at_most(20)]),
        Row("a reply of the model, until it is at the client", event, [], [event.at_most(5)]),
        Row("a client leaves, until its REPL and its call are gone", ended, [], [ended.at_most(100)]),
    ]


def followers(effort: Effort) -> list[Row]:
    """Measure what 1,000 clients that follow one run cost the server."""
    many = effort.size(FOLLOWERS)
    with Peer("", SERVER, None, "hanging") as server, ExitStack() as stack:
        address = server.ask("address")
        connection = stack.enter_context(Connection(**address))
        begun = connection.post("/v1/responses", {"model": "hanging", "input": "Is it?", "background": True})
        server.ask("running")
        before = server.ask("rss")[0]
        for _ in range(many):
            follower = stack.enter_context(Connection(**address))
            next(follower.events(f"/v1/responses/{begun['id']}?stream=true"))
        held = side(OURS, "MB", [server.ask("rss")[0] - before])
    return [Row(f"memory of {many:,} followers of one run", held, [], [held.at_most(50)])]
