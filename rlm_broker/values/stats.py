"""Snapshots of the activity of sandboxes, handlers and clusters."""

from dataclasses import dataclass

from rlm_broker.usage import UsageSummary


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """Number of workers in a sandbox; see `Sandbox.stats`.

    Attributes:
        level: Isolation level of the sandbox.
        workers: Live workers, with those that wait to be used.
        ready: Workers that were started ahead and wait to be used.
        started: Workers that were forked since the sandbox was opened.
    """

    level: str
    workers: int = 0
    ready: int = 0
    started: int = 0


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Load of one client of a handler.

    Attributes:
        model: Name under which the client is reported.
        calls: Calls under way, with those that wait between two attempts.
        waiting: Calls that wait for a place.
        is_cooling: Whether its last calls failed, so that its fallbacks are called first.
    """

    model: str
    calls: int
    waiting: int
    is_cooling: bool


@dataclass(frozen=True, slots=True)
class HandlerStats:
    """Load and usage of a handler; see `LMHandler.stats`.

    Attributes:
        connections: REPLs that are connected to its port.
        clients: One entry for each client that was called so far.
        usage: Usage so far, by model.
    """

    connections: int
    clients: tuple[ClientStats, ...]
    usage: UsageSummary


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Load of one node of a cluster.

    Attributes:
        name: Name of the node in the cluster.
        runs: Runs that it has now.
        max_runs: Runs that it takes at the same time.
        free_bytes: Memory that is available on it, in bytes.
        is_full: Whether it takes no further run for now.
        lost_runs: Runs that failed because of the node, and went on elsewhere.
    """

    name: str
    runs: int
    max_runs: int
    free_bytes: int
    is_full: bool
    lost_runs: int = 0


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """Nodes and runs of a cluster; see `Nodes.stats`.

    Attributes:
        nodes: One entry for each node that is there now.
        waiting: Runs that wait for a place on a node.
        lost_nodes: Nodes whose agents were lost or have left, since the cluster was opened.
        lost_runs: Attempts that were lost, with their node or because of it. Each such run has begun again elsewhere.
    """

    nodes: tuple[NodeStats, ...]
    waiting: int = 0
    lost_nodes: int = 0
    lost_runs: int = 0
