"""Reports of the orchestrator of a play to its director, one JSON line each, on standard output."""

from typing import Literal

import msgspec


class Order(msgspec.Struct, frozen=True):
    """Order to an orchestrator, on its standard input.

    Attributes:
        provider: Port of the provider on loopback.
        runs: Items 1 to `runs`.
        at_once: Runs at the same time.
        out: Output file of the batch.
        bind: Address to listen at.
        nodes: Nodes to wait for before the batch begins.
    """

    provider: int
    runs: int
    at_once: int
    out: str
    bind: str
    nodes: int


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """Report that agents may join, with what they need for it. `at` is `time.monotonic()`, here and below."""

    at: float
    address: str
    fingerprint: str | None
    token: str


class Began(msgspec.Struct, frozen=True, tag="began"):
    """Report that all nodes have joined and the batch begins."""

    at: float


class NodeChanged(msgspec.Struct, frozen=True, tag="node"):
    """Report that a node has joined or was lost."""

    at: float
    node: str
    state: Literal["joined", "lost"]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Report that an item has ended."""

    at: float
    item: str
    is_right: bool
    problem: str | None = None


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Report that the batch is over.

    Attributes:
        skipped: Items that an earlier process had finished.
        replayed_calls: Calls that were answered from the journal.
        lost_nodes, lost_runs: Nodes that were lost, and attempts of runs that were lost with them.
    """

    at: float
    skipped: int
    replayed_calls: int
    lost_nodes: int
    lost_runs: int


Report = Listening | Began | NodeChanged | Done | Over

decode_report = msgspec.json.Decoder(Report).decode
decode_order = msgspec.json.Decoder(Order).decode
encode = msgspec.json.encode
