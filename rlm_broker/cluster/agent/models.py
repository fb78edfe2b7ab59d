"""The models of a run as a node knows them: names, windows and prices. Their clients are in the orchestrator."""

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.broker.routing import Route, Routing
from rlm_broker.cluster.messages import ModelSpec, RoutingSpec
from rlm_broker.errors import ConfigurationError, ModelFailed


class RemoteModel(BaseClient):
    """Stands for a client of the orchestrator. It makes no call: `RemoteCalls` asks the orchestrator."""

    def __init__(self, spec: ModelSpec) -> None:
        self.model_name = spec.name
        self.context_tokens = spec.context_tokens
        self.is_priced = spec.is_priced
        self.answers_types = spec.answers_types

    async def complete(self, request: LMRequest) -> LMReply:
        """Raise `ModelFailed`: a node has no client."""
        del request
        raise ModelFailed(f"the model {self.model_name} is called by the orchestrator alone")


def routing_of(spec: RoutingSpec) -> Routing:
    """Return the routes of a run. They pick as those of the orchestrator do, which picks again for each call.

    Raises:
        ConfigurationError: The description contradicts itself.
    """
    models = [RemoteModel(each) for each in spec.models]
    try:
        routing = Routing(
            models[spec.root],
            None if spec.sub is None else models[spec.sub],
            model_policy=spec.policy,
            open_client=_opened if spec.opens else None,
        )
        for name, place in spec.named:
            routing.register(name, models[place])
    except IndexError:
        raise ConfigurationError("the description of a run names a model that it does not have") from None
    for route in spec.routes:
        routing.add(Route(*route))
    return routing


def _opened(name: str) -> RemoteModel:
    return RemoteModel(ModelSpec(name))
