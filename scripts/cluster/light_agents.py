"""Light agents, many in one process: they speak the protocol of an agent, and have neither a sandbox nor a REPL.

    python -m scripts.cluster.light_agents < ORDER

The question of a run is a number. The run makes so many calls, one after the other, and ends with an answer.
"""

import asyncio
import resource
import sys
import time
from collections.abc import Callable

import msgspec

from rlm_broker.cluster.dialing import Target, attend
from rlm_broker.cluster.link import Link
from rlm_broker.cluster.messages import PROTOCOL, Ask, Begin, Cancel, Ended, FromBroker, Join, Load, Reply, Welcome
from rlm_broker.cluster.outcomes import encoded_completion
from rlm_broker.results import Completion
from rlm_broker.usage import UsageSummary
from sandbox_worker import RELEASE

MESSAGES = (("system", "x" * 6_000), ("user", "y" * 1_000))
"""Messages of each call: as long as those of a run's first turn."""
ANSWER = encoded_completion(Completion("done", "light", 0, 1, 0.0, UsageSummary({})))
PAUSE_S = 0.005
"""Seconds between two dials: a broker keeps few connections from one address that have not joined."""
WAIT_S = 60.0
CALL_TIMEOUT_S = 600.0


class Order(msgspec.Struct, frozen=True):
    """Order to a process of light agents.

    Attributes:
        host, port, fingerprint, token: What an agent needs to join.
        first: Number of the first agent, for the names of the nodes.
        agents: Number of agents.
        max_runs: Runs of each agent at the same time.
    """

    host: str
    port: int
    fingerprint: str | None
    token: str
    first: int
    agents: int
    max_runs: int


class LightAgent:
    """One agent.

    Args:
        link: Its link.
        tell: Called with the seconds of each call.
    """

    def __init__(self, link: "Link[FromBroker]", tell: Callable[[float], None]) -> None:
        self._link = link
        self._tell = tell
        self._waiting: dict[tuple[int, int], asyncio.Future[Reply]] = {}
        self._tasks = set[asyncio.Task[None]]()
        link.beat = lambda: Load(len(self._tasks), 1 << 34)

    async def work(self) -> None:
        """Answer runs until the link is lost."""
        async for message, _ in self._link.receive():
            match message:
                case Begin():
                    task = asyncio.create_task(self._run(message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case Reply():
                    if (waiting := self._waiting.pop((message.run, message.call), None)) is not None:
                        waiting.set_result(message)
                case Cancel():
                    self._link.post(Ended(message.run, error="RunCancelled"))
        for task in self._tasks:
            task.cancel()

    async def _run(self, begin: Begin) -> None:
        for call in range(int(begin.question or 0)):
            reply = self._waiting[begin.run, call] = asyncio.get_running_loop().create_future()
            started = time.perf_counter()
            await self._link.send(Ask(begin.run, call, "1", MESSAGES, CALL_TIMEOUT_S, is_loop=True))
            await reply
            self._tell(time.perf_counter() - started)
        await self._link.send(Ended(begin.run, completion=ANSWER))


async def _main(order: Order) -> list[float]:
    """Be so many agents, until the cluster ends, and return the seconds of each call."""
    round_trips = list[float]()

    async def serve(link: "Link[FromBroker]", _welcome: Welcome) -> None:
        await LightAgent(link, round_trips.append).work()

    async def agent(number: int) -> None:
        asked = Join(order.token, PROTOCOL, RELEASE, f"light-{number}", 1.0, 1 << 34, order.max_runs)
        await attend(Target(order.host, order.port, order.fingerprint), asked, serve, wait_s=WAIT_S)

    async with asyncio.TaskGroup() as agents:
        for number in range(order.first, order.first + order.agents):
            agents.create_task(agent(number))
            await asyncio.sleep(PAUSE_S)
    return round_trips


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.stdout.buffer.write(
        msgspec.json.encode(asyncio.run(_main(msgspec.json.decode(sys.stdin.buffer.read(), type=Order))))
    )
