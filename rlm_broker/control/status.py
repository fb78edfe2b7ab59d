"""Facts that a process tells about its runs and REPLs: to `ps`, to `stop` and to the viewer."""

import msgspec


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run tree at one moment.

    Attributes:
        id: Id of the run, equal to `Run.id`.
        pid: Process that runs it.
        question: Question, cut to some hundred characters; None if the task is in the context.
        model: Name of the root model.
        state: "queued", "running", or how it ended: a `RunEnded.kind`, such as "answered".
        turn: Turn of the root run, from 1; 0 before the first.
        doing: What the run does at this moment, in a few words, such as "calls gpt-5 (2 of 8)".
        doing_since: Unix time in seconds at which it began to do that.
        started: Unix time in seconds of the run's start.
        ended: Unix time in seconds of its end, or None.
        runs: Number of runs of the tree that go on, the root included.
        tokens: Tokens that the tree has used so far.
        cost_usd: Cost of the tree so far in US dollars; None if a price is not known.
        owner: Name of the key that asked over HTTP; empty for a run of the process itself.
    """

    id: str
    pid: int
    question: str | None
    model: str
    state: str
    turn: int
    doing: str
    doing_since: float
    started: float
    ended: float | None = None
    runs: int = 1
    tokens: int = 0
    cost_usd: float | None = 0.0
    owner: str = ""


class ReplStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A REPL at one moment.

    Attributes:
        id: Id of the REPL in its process.
        pid: Process of the orchestrator that has it.
        run: Id of the run that has it, or None for a REPL of its own, such as a container.
        state: "idle", "busy" or "starting".
        since: Unix time in seconds at which that state began.
        memory_bytes: Memory of its processes together.
        owner: As in `RunStatus`.
    """

    id: str
    pid: int
    run: str | None
    state: str
    since: float
    memory_bytes: int
    owner: str = ""


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process of this user's that runs rlm-broker, at one moment.

    Attributes:
        pid: Process id of the orchestrator.
        command: What it is: "ask", "exec", "serve", "mcp", or "python" for a library process.
        started: Unix time in seconds of its start.
        memory_bytes: Memory of the orchestrator itself.
        runs: Its runs.
        repls: Its REPLs.
        is_hung: Whether it did not answer in time. All lists are empty then.
    """

    pid: int
    command: str
    started: float
    memory_bytes: int = 0
    runs: tuple[RunStatus, ...] = ()
    repls: tuple[ReplStatus, ...] = ()
    is_hung: bool = False
