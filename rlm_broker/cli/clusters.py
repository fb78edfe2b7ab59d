"""The cluster that the options of a command describe: nodes that join it, or Ray."""

import contextlib
import importlib
import logging
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlm_broker.cli.node import token_of
from rlm_broker.cli.parameters import exists
from rlm_broker.cli.terminal import say
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.errors import ConfigurationError
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.values.extras import require_extra
from rlm_broker.watch import folder

FILE_MODE = 0o600


OPTIONS = ("nodes", "advertise", "token_file", "plain", "cluster", "join_timeout_s")


def cluster_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of the cluster out of those of a command, and return them."""
    return {name: options.pop(name) for name in OPTIONS}


@contextlib.contextmanager
def opened_cluster(command: str, where: Mapping[str, Any], sandbox: Sandbox | str = "auto") -> Iterator[Nodes | None]:
    """Open the cluster on which a command runs, and say how nodes join it; None is this machine.

    Args:
        command: Name of the command, such as `ask`.
        where: Options of the cluster, see `cluster_options`.
        sandbox: Sandbox that the nodes open, or the name of its level.

    Raises:
        ConfigurationError: Two options contradict each other, or one of them cannot be used.
    """
    if where["cluster"] is not None and where["nodes"] is not None:
        raise ConfigurationError("give either --nodes or --cluster: both say where runs take place")
    if where["nodes"] is None and (idle := [name for name in ("advertise", "token_file", "plain") if where[name]]):
        raise ConfigurationError(f"--{idle[0].replace('_', '-')} needs --nodes: it is about how nodes join")
    if where["cluster"] is not None:
        with _ray(where["cluster"], where["join_timeout_s"], sandbox) as cluster:
            yield cluster
    elif where["nodes"] is not None:
        with _nodes(command, where, sandbox) as nodes:
            yield nodes
    elif where["join_timeout_s"] is not None:
        raise ConfigurationError("--join-timeout-s needs --nodes or --cluster: it is about nodes")
    else:
        yield None


@contextlib.contextmanager
def _nodes(command: str, where: Mapping[str, Any], sandbox: Sandbox | str) -> Iterator[Nodes]:
    given: str | None = where["token_file"]
    token = token_of(given) if given is not None and exists(given) else None
    timeout = {} if where["join_timeout_s"] is None else {"join_timeout_s": where["join_timeout_s"]}
    told = {name: where[name] for name in ("advertise", "plain")}
    nodes = Nodes(where["nodes"], sandbox=sandbox, token=token, **told, **timeout)
    with _tells_nodes(command), nodes, _token_file(given, nodes.token, is_there=token is not None) as file:
        join = f"{nodes.join_command()} --token-file {shlex.quote(str(file))}"
        say(f"rlm-broker {command}: run on each node, with a copy of the token file: {join}", err=True)
        yield nodes


@contextlib.contextmanager
def _tells_nodes(command: str) -> Iterator[None]:
    """Print which nodes join and leave."""
    log, shown = logging.getLogger("rlm_broker.cluster"), _NodeMessages(command)
    level, propagates = log.level, log.propagate
    log.addHandler(shown)
    log.setLevel(logging.INFO)
    log.propagate = False  # else a loss is printed twice
    try:
        yield
    finally:
        log.propagate = propagates
        log.setLevel(level)
        log.removeHandler(shown)


class _NodeMessages(logging.Handler):
    """Prints what is logged."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command

    def emit(self, record: logging.LogRecord) -> None:
        say(f"rlm-broker {self._command}: {record.getMessage()}", err=True)


@contextlib.contextmanager
def _token_file(given: str | None, token: str, *, is_there: bool) -> Iterator[Path]:
    """Write the token to a file that only this user can read. One of our own choice is removed at the end."""
    if given is not None:
        if not is_there:
            _write(given, token)
        yield Path(given)
        return
    with folder.opened(makes=True) as descriptor:
        name = f"nodes-{os.getpid()}.token"
        with contextlib.suppress(FileNotFoundError):  # of a process of the same id that was killed
            os.unlink(name, dir_fd=descriptor)
        _write(name, token, descriptor)
        try:
            yield folder.place() / name
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)


def _write(path: str, token: str, descriptor: int | None = None) -> None:
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE, dir_fd=descriptor)
    except OSError as error:
        raise ConfigurationError(f"the token file {path} cannot be written: {error.strerror}") from None
    with os.fdopen(opened, "w") as file:
        file.write(f"{token}\n")


@contextlib.contextmanager
def _ray(address: str, join_timeout_s: float | None, sandbox: Sandbox | str) -> Iterator[Nodes]:
    with require_extra("ray", "--cluster"):
        made: Any = importlib.import_module("rlm_broker.cluster.on_ray.ray_cluster").RayCluster
    timeout = {} if join_timeout_s is None else {"join_timeout_s": join_timeout_s}
    with made(address, sandbox=sandbox, **timeout) as cluster:
        yield cluster
