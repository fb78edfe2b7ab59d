"""The opening of a batch: the engine of its runs, with a seed, and its journal."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlm_broker.batch.batch import Wanted
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.engine import Engine, EngineParts
from rlm_broker.journal.header import read_header
from rlm_broker.journal.journal import Journal, folder_of, opened
from rlm_broker.journal.out_file import OutFile
from rlm_broker.models.registry import require_priced
from rlm_broker.sandbox.sandbox import SEED_BITS


class Opening:
    """Opens what the runs of a batch need.

    Args:
        rlm: The `RLM`, which is opened while the batch runs, if it is not open.
        parts: Parts of its engine.
        engine: Returns its engine, once it is open.
        settings: Returns the settings of the runs, once it is open.
        wanted: The request.
    """

    def __init__(
        self,
        rlm: AsyncResource,
        parts: EngineParts,
        engine: Callable[[], Engine],
        settings: Callable[[Engine], dict[str, Any]],
        wanted: Wanted,
    ) -> None:
        self._rlm = rlm
        self._parts = parts
        self._engine = engine
        self._settings = settings
        self._limits = wanted.limits
        self._out = None if wanted.out is None else Path(wanted.out)
        if self._out is not None and self._out.is_symlink():  # a file that replaces it must not replace the link
            self._out = self._out.resolve()
        self._retry_failed = wanted.retry_failed

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Journal | None]:
        """Open the engine and the journal, until the context manager exits.

        Raises:
            ConfigurationError: The file of results or its journal cannot be used, or the price of a model is not known.
        """
        async with contextlib.AsyncExitStack() as own:
            file = header = None
            if (out := self._out) is not None:  # locked first: another process may write its header just now
                file = await in_thread(lambda _: OutFile(out), discard=OutFile.close)
                own.callback(file.close)
                header = await in_thread(lambda _: read_header(folder_of(out)))
            if not self._rlm.is_open:
                known = None if header is None else header.seed
                own.enter_context(self._parts.seeded(secrets.randbits(SEED_BITS) if known is None else known))
            await own.enter_async_context(self._rlm.borrowed())
            engine = self._engine()
            if self._limits.max_budget_usd is not None:
                await require_priced("max_budget_usd", engine.handler.routing.clients)
            journal = None
            if file is not None:
                opens = partial(opened, file, header, self._parts.seed, self._settings(engine))
                retry = self._retry_failed
                journal = await in_thread(lambda _: opens(retry_failed=retry), discard=Journal.close)
                own.push_async_callback(journal.aclose)
            yield journal
