"""One play: a provider, an orchestrator and some nodes, of which the director knows all processes and reports."""

import contextlib
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from scripts.cluster.network import BROKER_ADDRESS, Node
from scripts.cluster.provider import CALLS_PER_RUN
from scripts.cluster.reports import Began, Done, Listening, NodeChanged, Order, Over, Report, decode_report, encode

PATIENCE_S = 120.0
"""Seconds to wait for any one report."""


class Counts(msgspec.Struct, frozen=True):
    """Counts of the provider.

    Attributes:
        asked, paid: Calls that it got, and that it answered.
        again: For each call that it answered again, when it had answered it before, in `time.monotonic()`.
    """

    asked: int
    paid: int
    again: list[float]


class NotAsPlanned(Exception):
    """A play could not be played to its end; the message says where it stands."""


@dataclass
class Play:
    """One batch over some nodes, and what was seen of it.

    Attributes:
        nodes: Nodes, with no processes at the beginning.
        folder: Folder for output, logs and tokens.
        runs: Number of items.
        delay_s: Seconds that the provider takes for each call.
        done: Reports of the items that have ended, by id.
        changes: Reports of nodes that have joined or were lost.
        over: Report of the end.
        killed_at: When the orchestrator was killed.
    """

    nodes: list[Node]
    folder: Path
    runs: int
    delay_s: float
    done: dict[str, Done] = field(default_factory=dict)
    changes: list[NodeChanged] = field(default_factory=list)
    over: Over | None = None
    killed_at: float | None = None
    _provider: "subprocess.Popen[str] | None" = None
    _orchestrator: "subprocess.Popen[bytes] | None" = None
    _port: int = 0
    _reports: "queue.SimpleQueue[Report | None]" = field(default_factory=queue.SimpleQueue)

    # -- its beginning and end ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def playing(self) -> Iterator["Play"]:
        """Start the provider, the orchestrator and an agent on each node; end all that is left afterwards."""
        try:
            held_after = str(CALLS_PER_RUN * (self.runs // 3))
            command = [sys.executable, "-m", "scripts.cluster.provider", str(self.delay_s), held_after]
            self._provider = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._provider.stdout is not None
            self._port = int(self._provider.stdout.readline())
            self.start_orchestrator()
            yield self
        finally:
            for node in self.nodes:
                node.end()
            for process in (self._orchestrator, self._provider):
                if process is not None:
                    process.kill()
                    process.wait()

    def start_orchestrator(self) -> None:
        """Start an orchestrator for the batch, and an agent on each node that joins it. Return when runs have begun."""
        order = Order(
            self._port, self.runs, 4 * len(self.nodes), str(self.folder / "out.jsonl"), BROKER_ADDRESS, len(self.nodes)
        )
        self._reports = queue.SimpleQueue()
        with self._log("orchestrator") as log:
            self._orchestrator = subprocess.Popen(
                [sys.executable, "-m", "scripts.cluster.orchestrator"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._orchestrator.stdin is not None
        assert self._orchestrator.stdout is not None
        self._orchestrator.stdin.write(encode(order))
        self._orchestrator.stdin.close()
        threading.Thread(target=_read, args=(self._orchestrator.stdout, self._reports), daemon=True).start()
        listening = self.wait_for(lambda report: isinstance(report, Listening))
        assert isinstance(listening, Listening)
        for node in self.nodes:
            self.start_agent(node, listening)
        self.wait_for(lambda report: isinstance(report, Began))

    def start_agent(self, node: Node, listening: Listening) -> None:
        """Start an agent on a node."""
        token = self.folder / f"{node.name}.token"
        token.touch(mode=0o600)
        token.write_text(listening.token)
        joins = ["--connect", listening.address, "--token-file", str(token), "--name", node.name]
        if listening.fingerprint is not None:
            joins += ["--fingerprint", listening.fingerprint]
        with self._log(node.name) as log:
            node.start([sys.executable, "-m", "rlm_broker", "node", *joins], log)

    def kill_orchestrator(self) -> float:
        """Send SIGKILL to the orchestrator, and return when."""
        assert self._orchestrator is not None
        self._orchestrator.kill()
        self._orchestrator.wait()
        self.killed_at = time.monotonic()
        with contextlib.suppress(NotAsPlanned):  # what it has reported, and the end of its output
            self.wait_for(lambda _: False)
        return self.killed_at

    # -- what is seen of it ------------------------------------------------------------------------------------------

    def wait_for(self, is_wanted: Callable[[Report], bool]) -> Report:
        """Take reports until a wanted one.

        Raises:
            NotAsPlanned: The orchestrator has ended, or none came in time.
        """
        while True:
            try:
                report = self._reports.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise NotAsPlanned(f"no report for {PATIENCE_S:g} s, {len(self.done)} of {self.runs} done") from None
            if report is None:
                raise NotAsPlanned(
                    f"the orchestrator ended with {len(self.done)} of {self.runs} done{self._last_words()}"
                )
            match report:
                case Done():
                    self.done[report.item] = report
                case NodeChanged():
                    self.changes.append(report)
                case Over():
                    self.over = report
            if is_wanted(report):
                return report

    def wait_for_done(self, count: int) -> None:
        """Wait until so many items have ended."""
        if len(self.done) < count:
            self.wait_for(lambda _: len(self.done) >= count)

    def wait_until_lost(self, node: Node, since: float) -> float:
        """Wait until the broker has reported the loss of a node, and return the seconds since a moment."""
        return self._wait_for_change(node, "lost", since)

    def wait_until_joined(self, node: Node, since: float) -> None:
        """Wait until a node has joined again, or the batch is over."""
        if self.over is None:
            self._wait_for_change(node, "joined", since)

    def _wait_for_change(self, node: Node, state: str, since: float) -> float:
        def is_it(report: Report) -> bool:
            is_over = isinstance(report, Over) and state == "joined"
            is_change = isinstance(report, NodeChanged) and (report.node, report.state) == (node.name, state)
            return is_over or (is_change and report.at >= since)

        found = next((change for change in self.changes if is_it(change)), None)
        return (found or self.wait_for(is_it)).at - since

    def wait_until_held(self) -> None:
        """Wait until a third of the batch is paid, and the provider holds the answers of the rest.

        Raises:
            NotAsPlanned: It was not in time.
        """
        try:
            self._get("held")
        except OSError as error:
            raise NotAsPlanned(f"the provider was not asked for a third of the batch: {error}") from None

    def go_on(self) -> None:
        """Have the provider hold no answer any more."""
        self._get("go_on")

    def finish(self) -> None:
        """Wait until the batch is over."""
        if self.over is None:
            self.wait_for(lambda report: isinstance(report, Over))

    def counts(self) -> Counts:
        """Return the counts of the provider."""
        return msgspec.json.decode(self._get("counts"), type=Counts)

    @property
    def wanted_calls(self) -> int:
        """Calls that the batch takes if none is paid twice."""
        return self.runs * CALLS_PER_RUN

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{path}", timeout=PATIENCE_S) as reply:
            return bytes(reply.read())

    def _log(self, name: str) -> IO[bytes]:
        return (self.folder / f"{name}.log").open("ab")

    def _last_words(self) -> str:
        lines = (self.folder / "orchestrator.log").read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def seconds_until(condition: Callable[[], bool], since: float, patience_s: float) -> float | None:
    """Look until a condition holds, and return the seconds since a moment; None if that takes too long."""
    while not condition():
        if time.monotonic() > since + patience_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - since


def _read(stdout: IO[bytes], reports: "queue.SimpleQueue[Report | None]") -> None:
    for line in stdout:
        reports.put(decode_report(line))
    reports.put(None)
