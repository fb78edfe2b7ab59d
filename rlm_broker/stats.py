"""What sandboxes and handlers are doing just now."""

from dataclasses import dataclass

from rlm_broker.results import UsageSummary


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """What lives in a sandbox.

    Attributes:
        level: Its isolation level.
        workers: REPLs that live, those that wait to be taken included.
        ready: Those that were made ahead and wait to be taken.
        started: All that were forked since it was opened.
    """

    level: str
    workers: int = 0
    ready: int = 0
    started: int = 0


@dataclass(frozen=True, slots=True)
class ClientStats:
    """How one client of a handler is doing.

    Attributes:
        model: The name that it is reported under.
        calls: Calls that are under way, those between two attempts included.
        waiting: Calls that wait for a place.
        is_cooling: Whether its last calls failed, so that its fallbacks are asked first.
    """

    model: str
    calls: int
    waiting: int
    is_cooling: bool


@dataclass(frozen=True, slots=True)
class HandlerStats:
    """What a handler is doing.

    Attributes:
        connections: REPLs that are connected to its port.
        clients: The clients that were called so far.
        usage: What was used so far, by model.
    """

    connections: int
    clients: tuple[ClientStats, ...]
    usage: UsageSummary
