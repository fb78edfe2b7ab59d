"""Which packages code in a sandbox may import: those of the orchestrator, of an environment, or of a list."""

import asyncio
import functools
import logging
import os
from collections.abc import Sequence

from rlm_broker.errors import ConfigurationError
from rlm_broker.sandbox.packages.requirements import Requirements
from rlm_broker.sandbox.workers.venv import Venv, read_venv

_log = logging.getLogger("rlm_broker")

Chosen = Venv | Requirements | None
"""None: those of the orchestrator."""


def chosen_packages(python: str | os.PathLike[str] | None, packages: Sequence[str] | None) -> Chosen:
    """Return what these two arguments of a `Sandbox` say.

    Raises:
        ConfigurationError: One of them cannot be used, or both are given.
    """
    if python is not None and packages is not None:
        raise ConfigurationError("give either python or packages: a venv of your own, or a list to make one of")
    if packages is not None:
        return Requirements.of(packages)
    return None if python is None else read_venv(python)


async def venv_of(chosen: Chosen) -> Venv | None:
    """Return the environment, which is made if need be.

    Raises:
        ConfigurationError: It cannot be had.
    """
    if isinstance(chosen, Requirements):
        from rlm_broker.sandbox.packages.cache import venv_with  # few sandboxes need it

        return await venv_with(chosen)
    if chosen is None:
        return None
    venv = await asyncio.to_thread(read_venv, chosen.folder)  # again: it may have changed
    if venv.left_out:
        _tell_what_is_left_out(venv)
    return venv


@functools.lru_cache(maxsize=256)
def _tell_what_is_left_out(venv: Venv) -> None:
    _log.warning("packages that lead out of %s are not shown to REPLs: %s", venv.folder, ", ".join(venv.left_out))
