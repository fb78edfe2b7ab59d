"""The user's functions as code on a node finds them. They run in the orchestrator, which gets the arguments."""

import asyncio

from rlm_broker.cluster.agent.exchange import Exchange
from rlm_broker.cluster.messages import ToolReply, ToolsSpec, UseTool
from rlm_broker.errors import ConfigurationError
from rlm_broker.run.tool_set import ToolFacts, ToolSet
from sandbox_worker.wire.errors import FrameTooLarge, ValueInvalid
from sandbox_worker.wire.messages import Slot
from sandbox_worker.wire.values import decode

GRACE_S = 5.0
"""Seconds that a node waits longer than the orchestrator, which ends a tool that is late and says so itself."""


class RemoteTools(ToolSet):
    """Functions of the orchestrator and values for code.

    Decoding a value may import a package, which takes seconds: make it in a thread.

    Args:
        spec: Signatures and encoded values.
        exchange: Asks the orchestrator.
        is_of_child: Whether they are those of child runs.

    Raises:
        ConfigurationError: A value cannot be read, for example because its package is not installed on the node.
    """

    def __init__(self, spec: ToolsSpec, exchange: Exchange, *, is_of_child: bool = False) -> None:
        self._exchange = exchange
        self._is_of_child = is_of_child
        self.functions = {each.name: ToolFacts(each.signature, each.description, each.timeout_s) for each in spec.tools}
        self.notes = spec.descriptions
        self.values = {}
        for name, encoded in spec.values.items():
            try:
                self.values[name] = decode(encoded.encode())
            except ValueInvalid as invalid:
                raise ConfigurationError(f"the value {name!r} cannot be read on the node: {invalid}") from None
        below = spec.for_children
        self.for_children: ToolSet = self if below is None else RemoteTools(below, exchange, is_of_child=True)

    async def call(self, name: str, arguments: str, timeout_s: float) -> Slot:
        """Have the orchestrator call a function; see `ToolSet.call`.

        Raises:
            LinkLost: The orchestrator cannot be asked any more.
        """
        if (refusal := self.refusal(name, arguments)) is not None:
            return refusal
        own_s = self.functions[name].timeout_s
        exchange = self._exchange
        asked = UseTool(exchange.run, exchange.number(), name, arguments, timeout_s, self._is_of_child)
        try:
            async with asyncio.timeout((timeout_s if own_s is None else own_s) + GRACE_S):
                reply = await exchange.asked(asked, ToolReply)
        except TimeoutError:
            return Slot(error=f"{name}() was not answered by the orchestrator in its time")
        except FrameTooLarge as too_large:
            return Slot(error=f"{name}() cannot be sent its arguments: {too_large}")
        return Slot(text=reply.text, error=reply.error)
