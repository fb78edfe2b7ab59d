"""The orchestrator of a play: a batch over a cluster, with reports on standard output.

python -m scripts.cluster.orchestrator < ORDER
"""

import asyncio
import sys
import time

from rlm_broker.batch.items import BatchItem
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from scripts.cluster.provider import answer_of, context_of, question_of
from scripts.cluster.reports import Began, Done, Listening, NodeChanged, Order, Over, Report, decode_order, encode

LOOK_S = 0.02
"""Seconds between two looks at the nodes."""
JOIN_S = 120.0
SEED = 7


def report(said: Report) -> None:
    """Write a report."""
    sys.stdout.buffer.write(encode(said) + b"\n")
    sys.stdout.buffer.flush()


async def _main(order: Order) -> None:
    client = OpenAICompatibleClient(f"http://127.0.0.1:{order.provider}/v1", "counted")
    async with Nodes(f"{order.bind}:0", sandbox=Sandbox(seed=SEED)) as nodes, RLM(client, sandbox=nodes) as rlm:
        host, port = nodes.address
        report(Listening(time.monotonic(), f"{host}:{port}", nodes.fingerprint, nodes.token))
        watching = asyncio.create_task(_watch(nodes))
        await asyncio.wait_for(_until_joined(nodes, order.nodes), JOIN_S)
        report(Began(time.monotonic()))
        items = [BatchItem(str(number), context_of(number), question_of(number)) for number in range(order.runs)]
        batch = rlm.batch(items, max_concurrent=order.at_once, out=order.out)
        async for result in batch:
            is_right = result.answer == answer_of(int(result.id))
            report(
                Done(time.monotonic(), result.id, is_right, None if is_right else f"{result.status}: {result.error}")
            )
        watching.cancel()
        stats, progress = nodes.stats(), batch.progress
        replayed = progress.replayed.total_calls
        report(Over(time.monotonic(), progress.skipped, replayed, stats.lost_nodes, stats.lost_runs))


async def _until_joined(nodes: Nodes, count: int) -> None:
    while len(nodes.stats().nodes) < count:
        await asyncio.sleep(LOOK_S)


async def _watch(nodes: Nodes) -> None:
    there: set[str] = set()
    while True:
        now = {node.name for node in nodes.stats().nodes}
        for name in now ^ there:
            report(NodeChanged(time.monotonic(), name, "joined" if name in now else "lost"))
        there = now
        await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    asyncio.run(_main(decode_order(sys.stdin.buffer.read())))
