"""Fields that a block submits. The orchestrator checks them while the block runs, so that its code can correct them."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from rlm_broker.concurrency.threads import DaemonThreads
from rlm_broker.errors import ConfigurationError
from rlm_broker.json_schema import Unfit
from rlm_broker.values.names import require_field_names
from rlm_broker.wanted_type import WantedType
from sandbox_worker.wire.counting import MAX_VALUES
from sandbox_worker.wire.errors import ValueInvalid
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.values import decode

MAX_SUBMIT_CHARS = 4 << 20
"""Characters of all fields together, encoded; a submission with more is refused."""

_threads = DaemonThreads(16)


class SubmitFields:
    """Fields that one block submits, with their types.

    Args:
        types: Field → its type, as `WantedType` takes it. An empty mapping stands for one value of any type.

    Attributes:
        names: Fields, in order.
        values: Field → value, once the code has submitted them; None before.

    Raises:
        ConfigurationError: A field is not a name, or its type cannot be validated.
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        require_field_names(types)
        self._types = {name: WantedType(wanted, f"the field {name}", name) for name, wanted in types.items()}
        self.names = tuple(self._types)
        self.values: dict[str, Any] | None = None
        self._check: Future[Any] | None = None

    @classmethod
    def of(cls, submit: object) -> "SubmitFields | None":
        """Return the fields that the argument `submit` stands for.

        Args:
            submit: True for one value of any type; a mapping from field to type; None or False for a block that does
                not end at a submission, for which None is returned.

        Raises:
            ConfigurationError: It has any other type, or a field cannot be used.
        """
        if submit is None or submit is False:
            return None
        if submit is not True and not isinstance(submit, Mapping):
            kind = type(submit).__name__
            raise ConfigurationError(
                f"submit must be True or a dict from field to type, such as {{'answer': str}}, not {kind}"
            )
        if submit == {}:
            raise ConfigurationError("submit has no fields: give one, such as {'answer': str}, or True for any value")
        return cls({} if submit is True else submit)

    async def answer(self, query: Query) -> list[Slot]:
        """Check the fields that code wants to submit.

        Returns:
            One slot, without a text if all fields are right, else with an error that says what is wrong.
        """
        encoded = query.texts
        if len(encoded) != 1 or len(query.prompts) != 1:
            return [Slot(error="one submission at a time")] * len(query.prompts)
        if len(encoded[0]) > MAX_SUBMIT_CHARS:
            problem: str | None = f"the fields are {len(encoded[0]):,} characters, more than {MAX_SUBMIT_CHARS:,}"
        else:
            problem = await self._checked(encoded[0])
        return [Slot(error=problem)]

    async def _checked(self, encoded: str) -> str | None:
        """Check in a thread, since a type may have a package imported. Each block uses one of these threads at most."""
        if self._check is not None and not self._check.done():
            return "another submission of this block is being checked"
        self._check = _threads.submit(partial(self._take, encoded))
        problem: str | None = await asyncio.wrap_future(self._check)
        return problem

    def _take(self, encoded: str) -> str | None:
        """Keep the values of the fields, or return what is wrong with them."""
        try:
            given = decode(encoded.encode(), MAX_VALUES)
        except ValueInvalid as invalid:
            return f"the submission is invalid: {invalid}"
        if type(given) is not dict or given.keys() != self._types.keys():
            return f"give the fields {', '.join(self.names)}, each once; {_told(given)}"
        try:
            self.values = {name: wanted.of(given[name]) for name, wanted in self._types.items()}
        except Unfit as unfit:
            return str(unfit)
        return None


def _told(given: object) -> str:
    if type(given) is not dict:
        return "given was no dict of fields"
    return f"given were {', '.join(map(str, given)) or 'none'}"[:200]
