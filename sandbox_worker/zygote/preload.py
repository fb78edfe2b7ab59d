"""What a fork server has ready for all of its workers: modules, a context, and the variables of set-up code.

It is done once, before the first fork, and none of it is model code: `setup` is the user's, and trusted like the rest
of his program. At "strict" it runs without network in the private root, elsewhere like the rest of his program.
"""

import builtins
import gc
import importlib
import os
import threading
from typing import Any

from sandbox_worker.isolation import mounts, namespaces, seccomp, syscalls
from sandbox_worker.isolation.layer import ZygoteLayers, layer
from sandbox_worker.isolation.worker_layers import be_the_first_to_go
from sandbox_worker.loading.context import ContextBroken, load_into
from sandbox_worker.loading.preloaded import Preloaded
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.values import decode_context
from sandbox_worker.wire.zygote_control import Configure, PreparationStep


class PreparationFailed(Exception):
    """The imports, the context or the setup of a template failed. Its layers are in place.

    Attributes:
        step: Which of them.
        reason: What went wrong in it.
    """

    def __init__(self, step: PreparationStep, reason: str) -> None:
        super().__init__(f"its {step} failed: {reason}")
        self.step = step
        self.reason = reason


def prepare(configure: Configure, fds: list[int], shared: ZygoteLayers, mapping_works: bool) -> Preloaded:
    """Get it all.

    Raises:
        PreparationFailed: One of them could not be done.
        LayerFailed: What they run behind cannot be had.
    """
    preloaded = Preloaded(seed=configure.seed)
    before = _open_files()
    if configure.preload or configure.setup:
        _have_scratch(shared, configure.new_root)
    for module in configure.preload:
        _import(module)
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
    syscalls.collapse_own_memory()
    return preloaded


def _have_scratch(shared: ZygoteLayers, folder: str) -> None:
    """Some modules refuse to be imported where they find no folder to write to, such as matplotlib.

    Args:
        folder: One of the host's, which ends with this fork server; at "strict" it has one of its own.
    """
    if shared.level.has_own_root:
        with layer("scratch", []):
            mounts.lend_scratch()
        folder = mounts.SCRATCH
    os.environ["HOME"] = os.environ["TMPDIR"] = folder


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - a module may do anything when it is imported
        raise PreparationFailed("imports", f"{module}: {_said(error)}") from None
    if started := other_threads():
        raise PreparationFailed("imports", f"{module} starts {started}: leave this import to the REPLs")


def other_threads() -> str | None:
    """Say how many threads there are beside this one, with their names, and that there may be none."""
    known = {each.native_id: each.name for each in threading.enumerate()}
    own = os.readlink("/proc/self")  # noqa: PTH115 - by its name there: where it is a container's, not by os.getpid
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
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - as it is, and no path
    except OSError:  # that of the listing itself
        return ""


def _refuse_what_is_left(before: set[str]) -> None:
    """What workers would share: a file or shared memory is a channel between them, a process outlives them.

    Raises:
        PreparationFailed: "setup", with what it left.
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
    """The first mapping that forks share and can write to, now or after mprotect: it may be read-only just now."""
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
    except BaseException as error:  # noqa: BLE001 - it is the user's, and may raise anything
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
