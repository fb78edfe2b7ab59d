"""Modules that are adapted when they are imported, so that ordinary code works in a REPL.

- The global generators of `random` and numpy start from the seed of the REPL.
- Pictures of matplotlib and PIL become displays of the block, see `displays`.

At "strict" also:

- `os.setsid` and `subprocess`: the system call setsid succeeds in a REPL without an effect (see
  `isolation/seccomp.py`). A child that asks for a session gets a process group of its own instead. So `os.killpg` of
  its group ends the child, not the REPL. A program that calls setsid itself stays in its group.
- `multiprocessing`: from Python 3.14 on it starts processes through a server on a socket, which a REPL may not have.
  Its start method is set to fork, the default before 3.14.
"""

import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from sandbox_worker.repl import displays
from sandbox_worker.wire.level import Level

SHOWN_BY = {
    "matplotlib": "adapt_matplotlib",
    "matplotlib.figure": "adapt_figure",
    "matplotlib.backend_bases": "adapt_backends",
    "PIL.Image": "adapt_pil",
}
"""Module → name of the function of `displays` that adapts it."""
GENERATORS = ("random", "numpy.random")
"""Modules with a global generator of random numbers and a function `seed`."""
_Adapt = Callable[[ModuleType], object]
_seed: int | None = None
"""Seed of the generators of modules that are imported from now on; None leaves them alone."""


def adapt(level: Level, seed: int | None) -> None:
    """Install the finder that adapts modules. Call this once in the fork server, before it imports the user's modules.

    Args:
        level: Isolation level of the workers.
        seed: Seed of the global generators; None leaves them alone.
    """
    adapted: dict[str, _Adapt] = dict.fromkeys(SHOWN_BY, _adapt_pictures)
    if level.is_security_boundary and level.may_exec:  # a filter is in force, and code may start processes
        os.setsid = _setsid
        adapted |= {"subprocess": _adapt_subprocess, "multiprocessing.context": _adapt_multiprocessing}
    adapted |= dict.fromkeys(GENERATORS, _seed_it)
    begin_with(seed)
    sys.meta_path.insert(0, _Finder(adapted))


def begin_with(seed: int | None) -> None:
    """Seed the generators, also of modules that are imported later; None leaves them alone.

    Call this in each REPL, or numpy would draw the same numbers in all forks of one process. The module `random` seeds
    itself anew after a fork. With a seed, all is drawn again as in an earlier REPL with that seed.
    """
    global _seed
    _seed = seed
    for name in GENERATORS:
        if (module := sys.modules.get(name)) is not None:
            _seed_it(module)


def _seed_it(module: Any) -> None:
    if _seed is not None:
        module.seed(_seed)


def adapt_later(adapted: dict[str, _Adapt]) -> None:
    """Adapt modules when they are imported; one that is imported already stays as it is."""
    to_come = {name: adapt for name, adapt in adapted.items() if name not in sys.modules}
    sys.meta_path.insert(0, _Finder(to_come))


def _setsid() -> None:
    """Make this process the leader of a process group of its own."""
    os.setpgid(0, 0)


def _adapt_subprocess(module: ModuleType) -> None:
    popen = module.Popen.__init__

    def __init__(self: Any, *args: Any, start_new_session: bool = False, **kwargs: Any) -> None:
        if start_new_session and kwargs.get("process_group") in (None, -1):
            kwargs["process_group"] = 0
        popen(self, *args, **kwargs)

    __init__.__wrapped__ = popen  # type: ignore[attr-defined] # so that `inspect.signature` shows the original's
    module.Popen.__init__ = __init__


def _adapt_multiprocessing(module: ModuleType) -> None:
    module._default_context._default_context = module._concrete_contexts["fork"]


def _adapt_pictures(module: ModuleType) -> None:

    getattr(displays, SHOWN_BY[module.__name__])(module)


class _Finder:
    """Finder of the modules to adapt, with a loader that adapts them once they are loaded."""

    def __init__(self, adapted: dict[str, _Adapt]) -> None:
        self._adapted = adapted

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._adapted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _AdaptingLoader(spec.loader, self._adapted[name])  # type: ignore[assignment] # importlib.abc is large
        return spec


class _AdaptingLoader:
    def __init__(self, loader: Any, adapt: _Adapt) -> None:
        self._loader = loader
        self._adapt = adapt

    def __getattr__(self, name: str) -> Any:  # passes on `get_source` and others, for tracebacks and `inspect`
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._adapt(module)
