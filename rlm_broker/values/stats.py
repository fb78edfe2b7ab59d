"""Snapshots of the activity of sandboxes, handlers and clusters."""

from msgspec import Struct

from rlm_broker.usage import UsageSummary


class SandboxStats(Struct, frozen=True):
    """Number of workers in a sandbox; see `Sandbox.stats`.

    Example:
        ```python
        stats = sandbox.stats()
        print(stats.level, stats.workers, stats.ready)
        ```

    Attributes:
        level: Isolation level of the sandbox.
        workers: Live workers, with those that wait to be used.
        ready: Workers started ahead that wait to be used.
        started: Workers forked since the sandbox was opened.
    """

    level: str
    workers: int = 0
    ready: int = 0
    started: int = 0


class ClientStats(Struct, frozen=True):
    """Load of one client of a handler.

    Example:
        ```python
        for client in handler.stats().clients:
            print(client)
        ```

    Attributes:
        model: The client's name in reports.
        calls: Calls under way, also between two attempts.
        waiting: Calls waiting for a place.
        is_cooling: Whether its last calls failed, so that its fallbacks are called first.
    """

    model: str
    calls: int
    waiting: int
    is_cooling: bool


class HandlerStats(Struct, frozen=True):
    """Load and usage of a handler; see `LMHandler.stats`.

    Example:
        ```python
        handler.completion("Say a word.")
        print(handler.stats().usage.total_calls)  # 1
        ```

    It is a struct of msgspec and no dataclass: `msgspec.to_builtins(stats)` makes dicts, lists and numbers of it.

    Attributes:
        connections: REPLs connected to its port.
        clients: One entry for each client called so far.
        usage: Usage so far, by model.
    """

    connections: int
    clients: tuple[ClientStats, ...]
    usage: UsageSummary


class NodeStats(Struct, frozen=True):
    """Load of one node of a cluster.

    Attributes:
        name: Name of the node.
        level: Isolation level of its REPLs.
        repls: REPLs it has now.
        places: REPLs it gives at the same time.
    """

    name: str
    level: str
    repls: int
    places: int
