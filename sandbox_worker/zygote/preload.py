"""Preparation of a fork server for its workers: modules, a context, and the variables of set-up code.

It happens once, before the first fork. None of it is model code: the user wrote `setup`, which is trusted like the rest
of the user's program. At "strict" it runs in the private root without network, at the other levels without bounds.
"""

import builtins
import gc
import importlib
import os
import threading
from typing import Any

from sandbox_worker.isolation import mounts, namespaces, seccomp
from sandbox_worker.isolation.layer import ZygoteLayers, layer
from sandbox_worker.isolation.worker_layers import be_the_first_to_go
from sandbox_worker.loading.context import ContextBroken, Preloaded, load_into
from sandbox_worker.wire.control import Configure, PreparationStep
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.values import decode_context
from sandbox_worker.zygote import release_arenas
from sandbox_worker.zygote.heap import make_objects_immortal


class PreparationFailed(Exception):
    """The imports, the context or the set-up code of a fork server failed. Its layers hold.

    Attributes:
        step: Step that failed.
        reason: Description of the failure.
    """

    def __init__(self, step: PreparationStep, reason: str) -> None:
        super().__init__(f"its {step} failed: {reason}")
        self.step = step
        self.reason = reason


def prepare(configure: Configure, fds: list[int], shared: ZygoteLayers, mapping_works: bool) -> Preloaded:
    """Import modules, load the context and run the set-up code.

    Args:
        configure: Message with the modules, the pieces of the context and the code.
        fds: Memfds of the pieces. They are closed.
        shared: Layers in force already.
        mapping_works: Result of `self_test.mapping_works()`.

    Raises:
        PreparationFailed: One of the steps failed.
        LayerFailed: A layer that confines these steps could not be applied.
    """
    preloaded = Preloaded(seed=configure.seed)
    before = _open_files()
    if configure.preload or configure.setup:
        _have_scratch(shared, configure.new_root)
    for module in configure.preload:
        _import(module)
    release_arenas()
    make_objects_immortal()  # before contexts and variables, which code may drop
    if configure.context or configure.setup:
        with layer("out of memory first", []):
            proc_self = namespaces.open_proc_self()
            be_the_first_to_go(proc_self)
            os.close(proc_self)
        if shared.level.confines_zygote:
            with layer("seccomp", []):
                seccomp.install("template", allow_exec=True)
    for fd, piece in zip(fds, configure.context, strict=True):
        try:
            load_into(preloaded.contexts, CONTEXT, fd, piece, mapping_works, decode_context)
        except ContextBroken as error:
            raise PreparationFailed("context", str(error)) from None
        os.close(fd)
    if configure.setup:
        preloaded.variables = _variables_of(configure.setup, preloaded.contexts)
    gc.collect()
    if configure.preload or configure.setup:
        _refuse_what_is_left(before)
        if shared.level.has_own_root:
            mounts.take_scratch_back()
    return preloaded


def _have_scratch(shared: ZygoteLayers, folder: str) -> None:
    """Give imports and set-up code a folder to write to, without which matplotlib, for one, refuses to be imported.

    Args:
        shared: Layers of the fork server. With a root of its own, the fork server mounts a scratch folder.
        folder: Folder of the host for the other levels. The orchestrator removes it with this fork server.
    """
    if shared.level.has_own_root:
        with layer("scratch", []):
            mounts.lend_scratch()
        folder = mounts.SCRATCH
    os.environ["HOME"] = os.environ["TMPDIR"] = folder


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - a module may raise any class when it is imported
        raise PreparationFailed("imports", f"{module}: {_said(error)}") from None
    if started := other_threads():
        raise PreparationFailed("imports", f"{module} starts {started}: leave this import to the REPLs")


def other_threads() -> str | None:
    """Return the number and names of threads beside this one, as part of an error message; None if there are none."""
    known = {each.native_id: each.name for each in threading.enumerate()}
    # This process's number in this /proc, which may be a container's, whose numbers differ from os.getpid's.
    own = os.readlink("/proc/self")  # noqa: PTH115
    others = [int(each) for each in os.listdir("/proc/self/task") if each != own]  # noqa: PTH208
    if not others:
        return None
    names = ", ".join(sorted({known.get(each) or _thread_name(each) for each in others}))
    count = "a thread" if len(others) == 1 else f"{len(others)} threads"
    return f"{count} ({names}), and a fork server may have none"


def _thread_name(thread: int) -> str:
    with open(f"/proc/self/task/{thread}/comm") as file:
        return file.read().strip()


def _open_files() -> set[str]:
    return {f"{fd} -> {_target(fd)}" for fd in os.listdir("/proc/self/fd")}  # noqa: PTH208 - names


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - the target may be no path, such as "socket:[1]"
    except OSError:  # the descriptor of the listing itself, which is closed by now
        return ""


def _refuse_what_is_left(before: set[str]) -> None:
    """Refuse objects that workers would share: files, shared memory and processes.

    Through an open file or shared memory two workers could exchange data. A process would outlive the workers.

    Raises:
        PreparationFailed: The imports or the set-up code left such an object. The step is "setup".
    """
    for opened in sorted(_open_files() - before):
        if not opened.endswith(" -> "):
            raise PreparationFailed("setup", f"it or an import leaves a file open: {opened}")
    if (shared := _shared_memory()) is not None:
        raise PreparationFailed("setup", f"it or an import leaves memory that its forks would share: {shared}")
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return
    raise PreparationFailed("setup", "it or an import leaves a process running")


def _shared_memory() -> str | None:
    """Return the first mapping that forks share and may write to, as a line of smaps; None if there is none.

    The flag "mw" (may write) counts, not the current rights: mprotect could make a read-only mapping writable.
    """
    mapping = ""
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                mapping = line.strip()
            elif name == "VmFlags:" and {"sh", "mw"} <= set(rest.split()):
                return mapping
    return None


def _variables_of(setup: str, contexts: dict[str, Any]) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins, **contexts}
    try:
        exec(compile(setup, "<setup>", "exec"), namespace)
    except BaseException as error:  # noqa: BLE001 - code of the user may raise any class
        raise PreparationFailed("setup", _said(error)) from None
    return {name: value for name, value in namespace.items() if name not in ("__name__", "__builtins__", *contexts)}


def _said(error: BaseException) -> str:
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    file = where.tb_frame.f_code.co_filename if where else __file__
    line = (
        f" (line {where.tb_lineno} of {file})" if where and file != __file__ and not file.startswith("<frozen ") else ""
    )
    text = str(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{line}"
