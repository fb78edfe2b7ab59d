"""Functions and values of the orchestrator as a node describes them to the model and to code."""

import pytest

from rlm_broker.cluster.agent import tools as module
from rlm_broker.cluster.agent.exchange import Exchange
from rlm_broker.cluster.agent.tools import RemoteTools
from rlm_broker.cluster.described import tools_spec
from rlm_broker.cluster.messages import ToolsSpec
from rlm_broker.errors import ConfigurationError
from rlm_broker.run.tool_set import MAX_ARGUMENT_CHARS
from rlm_broker.run.tools import Tools
from tests.support.links import linked


def find(name: str, *, n: int = 3) -> list[str]:
    """Find it
    everywhere.

    The model does not read this.
    """
    return [name] * n


async def test_the_model_reads_what_it_reads_here() -> None:
    """Documentation, names, values and refusals are equal, also those of children."""
    given = Tools({"find": find, "limit": {"tool": (1, 2), "description": "most lines"}}, {"find": find})
    async with linked() as (_, at_agent):
        made = RemoteTools(tools_spec(given), Exchange(at_agent, 1))
        for there, here in ((made, given), (made.for_children, given.for_children)):
            assert there.documentation() == here.documentation()
            assert (there.names, there.values) == (here.names, here.values)
            assert await there.call("no such", "{}", 1) == await here.call("no such", "{}", 1)
        large = "x" * (MAX_ARGUMENT_CHARS + 1)
        assert await made.call("find", large, 1) == await given.call("find", large, 1)
        assert made.for_children.for_children is made.for_children


async def test_an_orchestrator_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has an end, whatever the orchestrator does."""
    monkeypatch.setattr(module, "GRACE_S", 0)
    async with linked() as (_, at_agent):
        tools = RemoteTools(tools_spec(Tools({"find": find})), Exchange(at_agent, 1))
        slot = await tools.call("find", "{}", 0.01)
    assert slot.error == "find() was not answered by the orchestrator in its time"


async def test_a_value_that_the_node_cannot_read() -> None:
    spec = ToolsSpec(values={"table": '{"$frame":7}'}, descriptions={"table": "a table"})
    async with linked() as (_, at_agent):
        with pytest.raises(ConfigurationError, match="the value 'table' cannot be read on the node"):
            RemoteTools(spec, Exchange(at_agent, 1))
