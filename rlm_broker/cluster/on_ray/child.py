"""The child of a Ray actor: the agent of its node, which ends when its standard input ends.

    python -m rlm_broker.cluster.on_ray.child < ORDER

The order is one line of standard input, so that the token is in no command line, environment or file.
"""

import asyncio
import contextlib
import os
import sys
import threading

import msgspec

from rlm_broker.cluster.agent.agent import serve
from rlm_broker.cluster.dialing import Target, attend
from rlm_broker.cluster.messages import PROTOCOL, Join
from rlm_broker.errors import RlmBrokerError
from rlm_broker.sandbox.workers.cgroups import memory_bytes
from sandbox_worker import RELEASE

MODULE = "rlm_broker.cluster.on_ray.child"
RUNS_PER_CPU = 16
END_S = 5.0
"""Seconds that it takes to end its runs, at most. Beyond, the process exits."""
WAIT_S = 60.0
"""Seconds for which the broker is looked for. Beyond, the child ends, and the orchestrator starts another."""


class ChildOrder(msgspec.Struct, frozen=True):
    """Order to a child: what it needs to join.

    Attributes:
        host, port, fingerprint: The broker, as `Target` has it.
        token: Join token for this child alone.
        name: Name of the node.
        max_runs: Runs at the same time; None: 16 for each CPU that the process may use.
    """

    host: str
    port: int
    fingerprint: str | None
    token: str
    name: str
    max_runs: int | None = None


async def attend_until_eof(order: ChildOrder, stdin: int) -> None:
    """Be the agent of this node, until the cluster ends or standard input does.

    Raises:
        RlmBrokerError: The broker was not reached, or refused this node.
    """
    loop, cpus = asyncio.get_running_loop(), len(os.sched_getaffinity(0))
    max_runs = order.max_runs or RUNS_PER_CPU * cpus
    join = Join(order.token, PROTOCOL, RELEASE, order.name, float(cpus), memory_bytes(), max_runs)
    target = Target(order.host, order.port, order.fingerprint)
    attending = asyncio.ensure_future(attend(target, join, serve, wait_s=WAIT_S, tell=_tell))

    def read() -> None:
        if not os.read(stdin, 1 << 12):
            loop.remove_reader(stdin)
            _exit_after(END_S)
            attending.cancel()

    loop.add_reader(stdin, read)
    with contextlib.suppress(asyncio.CancelledError):
        await attending


def _exit_after(seconds: float) -> None:
    """End the process after a time, whatever its event loop is doing. What it started ends with it."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def main() -> None:
    """Take the order, and be the agent."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildOrder)
    try:
        asyncio.run(attend_until_eof(order, sys.stdin.fileno()))
    except RlmBrokerError as error:
        sys.exit(f"rlm-broker: {error}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
