"""The composition of a batch: the settings of its runs, and what opens them."""

from collections.abc import Callable, Mapping
from typing import Any

from rlm_broker.asked import Asked, MakesCompleting
from rlm_broker.batch.batch import Batch, Wanted
from rlm_broker.batch.items import BatchItem
from rlm_broker.batch.opening import Opening
from rlm_broker.batch.settings import settings_of
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.engine import Engine, EngineParts
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.run import Run


def composed_batch(
    wanted: Wanted,
    asked: Callable[..., Asked],
    run: Callable[[Asked, EventLoopRef], Run],
    rlm: AsyncResource,
    parts: EngineParts,
    engine: Callable[[], Engine],
    settings: Mapping[str, Any],
    event_loop: EventLoopRef | None,
) -> Batch:
    """Return a batch that has not begun.

    Args:
        wanted: The request.
        asked: Returns the request of one run, from a context, a question, the type of the answer, and more.
        run: Returns the run of a request, on an event loop.
        rlm: The `RLM`, which is opened while the batch runs, if it is not open.
        parts: Parts of its engine.
        engine: Returns its engine, once it is open.
        settings: Settings of all runs that the engine does not have, as `settings_of` takes them.
        event_loop: Event loop on which it lives; None: the way of opening it decides.

    Raises:
        ConfigurationError: The type of the answers cannot be used.
    """

    def begin(item: BatchItem, completing: MakesCompleting) -> Run:
        given = item.context, item.question, wanted.output_type
        return run(asked(*given, completing=completing), EventLoopRef.here()).start()

    output_type = None if wanted.output_type is None else OutputType(wanted.output_type)
    opening = Opening(
        rlm, parts, engine, lambda engine: settings_of(parts, engine, output_type=output_type, **settings), wanted
    )
    return Batch(wanted, opening.opened, begin, lambda: rlm.is_open, event_loop)
