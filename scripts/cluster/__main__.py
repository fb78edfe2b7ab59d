"""Starts a real Ray on three nodes of one machine, and plays the faults that a cluster has to bear.

    python -m scripts.cluster                              # all faults, some minutes
    python -m scripts.cluster "node killed" "link cut"     # those whose names contain one of these
    python -m scripts.cluster --quick                      # two nodes, few items, no bounds of time

Each play is one command, `rlm-broker batch` on a cluster. After the fault it is given again, if it has ended, until all
items are answered. The nodes are network namespaces, which live in namespaces of the script's own, so that whatever
ends the script removes them with all processes. That needs root, or user namespaces. The exit code is 1 if an item was
lost, an answered call was paid again, a loss was noticed too late, or a process was left; 2 if no nodes can be made.
"""

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from scripts.cluster import network, stage
from scripts.cluster.network import HEAD_ADDRESS, Node
from scripts.cluster.provider import CALLS_PER_RUN, answer_of, item

PATIENCE_S = 150.0
"""Seconds to wait for any one thing."""
NOTICED_WITHIN_S = 3.0
"""Seconds until a loss must be noticed, and until all of ours must have ended on a node."""
PORT = 6379


class Play:
    """One batch over the nodes of a Ray cluster, and what was seen of it.

    Attributes:
        nodes: Nodes with a raylet each.
        problems: What was not as it must be.
    """

    def __init__(self, nodes: list[Node], folder: Path, items: int, within_s: float) -> None:
        self.nodes = nodes
        self.problems: list[str] = []
        self._folder = folder
        self._items = items
        self._within_s = within_s
        self._out = folder / "out.jsonl"
        self._provider: subprocess.Popen[str] | None = None
        self._batch: subprocess.Popen[str] | None = None
        self._said: list[tuple[float, str]] = []
        self._port = 0

    @contextlib.contextmanager
    def playing(self) -> Iterator["Play"]:
        """Start Ray, a provider and the batch; go on when the provider holds its answers, so that all runs wait."""
        lines = "\n".join(item(number) for number in range(self._items))
        (self._folder / "items.jsonl").write_text(lines)
        with (self._folder / "ray.log").open("ab") as log, contextlib.ExitStack() as stack:
            head = [*RAY, "--head", f"--node-ip-address={HEAD_ADDRESS}", f"--port={PORT}", "--num-cpus=0"]
            head += ["--include-dashboard=false", f"--temp-dir={self._folder / 'ray'}", "--block"]
            stack.callback(ended, subprocess.Popen(head, stdout=log, stderr=log))
            wait_until(_listens, "Ray's head")
            for node in self.nodes:
                stack.callback(node.end)
                self.join(node)
            command = [sys.executable, "-m", "scripts.cluster.provider", "0.05", str(CALLS_PER_RUN * self._items // 3)]
            self._provider = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(ended, self._provider)
            assert self._provider.stdout is not None
            self._port = int(self._provider.stdout.readline())
            self.start()
            stack.callback(lambda: ended(self._batch))
            self._get("held")
            yield self

    def join(self, node: Node) -> None:
        """Start a raylet on a node, and wait for it: two that start at once would take the same names of sockets."""
        ray = [*RAY, f"--address={HEAD_ADDRESS}:{PORT}", f"--node-ip-address={node.address}", "--num-cpus=2", "--block"]
        log = self._folder / f"{node.name}.log"
        with log.open("wb") as written:
            node.start(ray, written)
        wait_until(lambda: b"Ray runtime started" in log.read_bytes(), f"the raylet of {node.name}")

    def start(self) -> None:
        """Give the command, also again."""
        words = [
            "batch",
            str(self._folder / "items.jsonl"),
            "--out",
            str(self._out),
            "--max-concurrent",
            "8",
            "--quiet",
        ]
        words += ["--set", f"cluster={HEAD_ADDRESS}:{PORT}", "--model", "counted"]
        words += ["--base-url", f"http://127.0.0.1:{self._port}/v1"]
        self._batch = subprocess.Popen(
            [sys.executable, "-m", "rlm_broker", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert self._batch.stderr is not None
        threading.Thread(target=self._listen, args=(self._batch.stderr,), daemon=True).start()

    def kill_batch(self) -> None:
        """Send SIGKILL to the orchestrator."""
        assert self._batch is not None
        self._batch.kill()
        self._batch.wait()

    def go_on(self) -> None:
        """Have the provider hold no answer any more."""
        self._get("go_on")

    def busy(self) -> Node:
        """Return a node that has workers."""
        wait_until(lambda: any(len(node.ours()) > 2 for node in self.nodes), "a node with REPLs")
        return max(self.nodes, key=lambda node: len(node.ours()))

    def notices(self, since: float) -> None:
        """Judge how soon the loss of a node was said."""
        words = ("is gone", "has ended")

        def said_at() -> float | None:
            return next((at for at, line in self._said if at >= since and any(word in line for word in words)), None)

        wait_until(lambda: said_at() is not None, "the news of the loss")
        self._judge_time("the loss was noticed", (said_at() or since) - since)

    def ends_there(self, node: Node, since: float) -> None:
        """Judge how soon nothing of ours is left on a node."""
        wait_until(lambda: not node.ours(), f"the end of all of ours on {node.name}")
        self._judge_time("all of ours had ended", time.monotonic() - since)

    def finish(self) -> None:
        """Let the batch end, give its command again until all items are answered, and judge."""
        self.go_on()
        for _ in range(3):
            assert self._batch is not None
            if self._batch.wait(PATIENCE_S) == 0:
                break
            self.start()
        results = [json.loads(line) for line in self._out.read_text().splitlines()] if self._out.exists() else []
        right = {each["id"] for each in results if each.get("answer") == answer_of(int(each["id"]))}
        if len(right) != self._items:
            self.problems.append(f"{len(right)} of {self._items} items have their answer{self.last_words()}")
        again = json.loads(self._get("counts"))["again"]
        if again:
            self.problems.append(f"{len(again)} answered calls were paid again")
        for node in self.nodes:
            wait_until(lambda node=node: not node.ours(), f"the end of all of ours on {node.name}")  # type: ignore[misc]

    def _judge_time(self, what: str, seconds: float) -> None:
        print(f"        {what} after {seconds:.1f} s", file=sys.stderr)
        if seconds > self._within_s:
            self.problems.append(f"{what} after {seconds:.1f} s")

    def _listen(self, stderr: IO[str]) -> None:
        for line in stderr:
            self._said.append((time.monotonic(), line))

    def last_words(self) -> str:
        return f": {self._said[-1][1].strip()}" if self._said else ""

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{path}", timeout=PATIENCE_S) as reply:
            return bytes(reply.read())


RAY = [str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats"]
REPL, AGENT, RAYLET = "sandbox_worker.zygote", "rlm_broker.nodes.agent", "raylet/raylet"


def _signalled(mark: str, number: signal.Signals) -> Callable[[Play], None]:
    """Return the fault that a process of a busy node gets a signal."""

    def fault(play: Play) -> None:
        node, since = play.busy(), time.monotonic()
        node.named(mark).send_signal(number)
        if mark != REPL:
            play.notices(since)

    return fault


def _node_killed(play: Play) -> None:
    node, since = play.busy(), time.monotonic()
    node.kill()
    play.notices(since)


def _cut(play: Play) -> None:
    node, since = play.busy(), time.monotonic()
    node.cut()
    play.notices(since)
    play.ends_there(node, since)
    node.heal()


def _orchestrator_killed(play: Play) -> None:
    play.busy()
    play.kill_batch()
    since = time.monotonic()
    for node in play.nodes:
        play.ends_there(node, since)
    play.start()


FAULTS: dict[str, Callable[[Play], object]] = {
    "none": Play.busy,
    "REPLs killed": _signalled(REPL, signal.SIGKILL),
    "agent killed": _signalled(AGENT, signal.SIGKILL),
    "agent stopped": _signalled(AGENT, signal.SIGSTOP),
    "raylet killed": _signalled(RAYLET, signal.SIGKILL),
    "node killed": _node_killed,
    "link cut and healed": _cut,
    "orchestrator killed": _orchestrator_killed,
}


def main() -> int:
    """Play the faults that the command line names, and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts.cluster", description="Play the faults of a cluster.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of faults; none is all")
    parser.add_argument("--quick", action="store_true", help="two nodes and few items")
    options = parser.parse_args()
    if not stage.is_inside():
        if missing := stage.what_is_missing():
            print(f"no nodes can be made here: {missing}", file=sys.stderr)
            return 2
        return stage.enter("scripts.cluster", sys.argv[1:])
    stage.prepare()
    nodes = network.build(2 if options.quick else 3)
    bad = 0
    for name, fault in FAULTS.items():
        if options.names and not any(part in name for part in options.names):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="rlm-", ignore_cleanup_errors=True) as folder:
            within_s = 60.0 if options.quick else NOTICED_WITHIN_S
            play = Play(nodes, Path(folder), 12 if options.quick else 60, within_s)
            try:
                with play.playing():
                    fault(play)
                    play.finish()
            except (TimeoutError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                play.problems.append(f"{error}{play.last_words()}")
        bad += bool(play.problems)
        verdict = "; ".join(play.problems) or "as it must be"
        print(f"{time.monotonic() - began:5.1f} s  {name}: {verdict}", flush=True)
    print(f"{bad} not as they must be")
    return 1 if bad else 0


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look until a condition holds.

    Raises:
        TimeoutError: It takes too long.
    """
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come within {PATIENCE_S:g} s")
        time.sleep(0.05)


def ended(process: "subprocess.Popen[str] | subprocess.Popen[bytes] | None") -> None:
    """Kill a process, and wait for its end."""
    if process is not None:
        process.kill()
        process.wait()


def _listens() -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HEAD_ADDRESS, PORT), timeout=1):
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
