"""The packages that code in a sandbox may import: the orchestrator's, an environment's, or those of a list."""

import functools
import logging
import os
from collections.abc import Sequence

from rlm_broker.concurrency.threads import in_thread
from rlm_broker.errors import ConfigurationError
from rlm_broker.sandbox.packages.requirements import Requirements
from rlm_broker.sandbox.workers.venv import Venv, read_venv

_log = logging.getLogger("rlm_broker")

Chosen = Venv | Requirements | None
"""Environment, or list to make one from; None for the packages of the orchestrator."""


def chosen_packages(python: str | os.PathLike[str] | None, packages: Sequence[str] | None) -> Chosen:
    """Return the choice that the arguments `python` and `packages` of a `Sandbox` make.

    Raises:
        ConfigurationError: One of them cannot be used, or both are given.
    """
    if python is not None and packages is not None:
        raise ConfigurationError("give either python or packages: a venv of your own, or a list to make one of")
    if packages is not None:
        return Requirements.of(packages)
    return None if python is None else read_venv(python)


async def venv_of(chosen: Chosen) -> Venv | None:
    """Return the chosen environment. One from a list is made, unless it was made before and kept.

    Raises:
        ConfigurationError: The environment cannot be read or made.
    """
    if isinstance(chosen, Requirements):
        from rlm_broker.sandbox.packages.cache import venv_with  # imported here, since few sandboxes need it

        return await venv_with(chosen)
    if chosen is None:
        return None
    venv = await in_thread(lambda _: read_venv(chosen.folder))  # read again: it may have changed since it was chosen
    if venv.left_out:
        _tell_what_is_left_out(venv)
    return venv


@functools.lru_cache(maxsize=256)
def _tell_what_is_left_out(venv: Venv) -> None:
    _log.warning("packages that lead out of %s are not shown to REPLs: %s", venv.folder, ", ".join(venv.left_out))
