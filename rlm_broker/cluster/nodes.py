"""A cluster of nodes whose agents dial in: the public `Nodes`, which an `RLM` takes as its `sandbox`."""

import asyncio
import contextlib
import logging
import os
import shlex
import socket

from rlm_broker.broker.broker import Completing
from rlm_broker.broker.routing import Routing
from rlm_broker.cluster.admission import Admission, is_loopback
from rlm_broker.cluster.contexts import Contexts
from rlm_broker.cluster.described import limits_spec
from rlm_broker.cluster.link import Link
from rlm_broker.cluster.messages import EngineSpec, FromAgent, Join, Quit
from rlm_broker.cluster.node import Node
from rlm_broker.cluster.placement import Placement
from rlm_broker.cluster.remote_run import RemoteRun
from rlm_broker.cluster.tls import ServerTls, made_tls, tls_of
from rlm_broker.cluster.tokens import Tokens
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.errors import ConfigurationError, SandboxFailed, require_kind
from rlm_broker.events.event import TreeEvents
from rlm_broker.limits import Limits
from rlm_broker.run.request import RunRequest
from rlm_broker.sandbox.sandbox import Sandbox, SandboxOptions, options_of
from rlm_broker.values.stats import ClusterStats

EVERY_ADDRESS = ("", "0.0.0.0", "::")
CLOSED = "the cluster was closed"

_log = logging.getLogger("rlm_broker.cluster")


class Nodes(AsyncResource):
    """A cluster of nodes: other machines, or this one, on which whole runs take place.

    Each node runs an agent, `rlm-broker node`, which connects to this process. Models, keys, limits of cost, tools and
    results stay here. An open cluster stays open; a closed one is opened while an `RLM` uses it.

    Example:
        ```python
        with Nodes("0.0.0.0:7077") as nodes, RLM("openai/gpt-5-mini", sandbox=nodes) as rlm:
            print(nodes.join_command(), nodes.token)  # run the command on each node, with the token in a file
            print(rlm.completion(Path("logs/"), "Which service failed first?").response)
        ```

    Args:
        bind: Address and port to listen on, such as "0.0.0.0:7077". Port 0 takes a free one.
        sandbox: Isolation level of the REPLs on nodes, or a `Sandbox` with their level, `allow_exec`, `seed`, `python`
            or `packages`, which is never opened here.
        advertise: Address that nodes connect to, with or without a port, if it differs from `bind`: that of a service
            of Kubernetes, for example. None takes `bind`, or this machine's name if that is every address.
        plain: Whether nodes connect without TLS beyond loopback. Then tokens, prompts and contexts can be read on the
            network. Loopback needs no TLS.
        cert, key: Paths of PEM files of a certificate of yours and its key. None makes a certificate for the life of
            the process. Nodes pin its fingerprint in either case.
        token: Token of at least 32 characters with which nodes may join, such as one that a secret of Kubernetes has.
            None draws one.
        min_nodes: Nodes that must have joined before the first run begins, so that the first runs are spread.
        join_timeout_s: Seconds that a run waits while there are too few nodes; then it fails with `ClusterFailed`.
            Nodes of a batch system may need hours to start.

    Attributes:
        token: The token, for any number of nodes, as long as the process lives.

    Raises:
        ConfigurationError: An argument cannot be used.
    """

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        sandbox: Sandbox | str | None = None,
        advertise: str | None = None,
        plain: bool = False,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        token: str | None = None,
        min_nodes: int = 1,
        join_timeout_s: float = 60.0,
    ) -> None:
        require_kind("plain", plain, bool)
        require_kind("sandbox", sandbox, Sandbox, str, type(None))
        made = sandbox if isinstance(sandbox, Sandbox) else Sandbox(isolation="auto" if sandbox is None else sandbox)
        self._options = options_of(made)
        require_kind("token", token, str, type(None))
        require_kind("min_nodes", min_nodes, int)
        require_kind("join_timeout_s", join_timeout_s, int, float)
        if min_nodes < 1 or not join_timeout_s > 0:
            raise ConfigurationError("min_nodes must be 1 or more, and join_timeout_s above 0")
        if (cert is None) != (key is None):
            raise ConfigurationError("give cert and key together: a certificate needs its key")
        if cert is not None and plain:
            raise ConfigurationError("give either a certificate or plain=True: a certificate is for TLS")
        self._bind = host_and_port(bind, "bind")
        self._advertise = None if advertise is None else host_and_port(advertise, "advertise", port=0)
        self._plain = plain
        self._files = None if cert is None or key is None else (os.fspath(cert), os.fspath(key))
        self._min_nodes = min_nodes
        self._join_timeout_s = join_timeout_s
        self._tokens = Tokens()
        if token is None:
            self.token = self._tokens.make()
        else:
            self._tokens.add(token)
            self.token = token
        self._tls: ServerTls | None = None
        self._listening: tuple[str, int] | None = None
        self._admission: Admission | None = None
        self._placement: Placement | None = None
        self._contexts = Contexts()
        self._serving: set[asyncio.Task[None]] = set()
        self._lost_nodes = 0

    # -- what nodes need ---------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that nodes connect to.

        Raises:
            SandboxFailed: The cluster is not open.
        """
        if self._listening is None:
            raise SandboxFailed("the cluster is not open: use it as `with Nodes(...) as nodes:`")
        bound, bound_port = self._listening
        host, port = self._advertise or (socket.gethostname() if bound in EVERY_ADDRESS else bound, 0)
        return host, port or bound_port

    @property
    def fingerprint(self) -> str | None:
        """SHA-256 of the certificate that nodes pin; None if they connect without TLS."""
        return None if self._tls is None else self._tls.fingerprint

    def join_command(self) -> str:
        """Return the command that a node runs to join. The token is not part of it: other users see a command line.

        Raises:
            SandboxFailed: The cluster is not open.
        """
        host, port = self.address
        words = ["rlm-broker", "node", "--connect", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        if self.fingerprint is not None:
            words += ["--fingerprint", self.fingerprint]
        elif not is_loopback(host):
            words.append("--plain")
        return shlex.join(words)

    def new_token(self, uses: int | None = None, valid_s: float | None = None) -> str:
        """Return a further token.

        Args:
            uses: How many nodes may join with it; None is any number.
            valid_s: Seconds after which it expires; None is as long as the process lives.

        Raises:
            ConfigurationError: A number cannot be used.
        """
        require_kind("uses", uses, int, type(None))
        require_kind("valid_s", valid_s, int, float, type(None))
        return self._tokens.make(uses=uses, valid_s=valid_s)

    def stats(self) -> ClusterStats:
        """Return the nodes that are there and their runs, and what was lost."""
        placement = self._placement
        if placement is None:
            return ClusterStats((), lost_nodes=self._lost_nodes)
        nodes = tuple(node.stats() for node in list(placement.nodes))
        return ClusterStats(nodes, placement.waiting, self._lost_nodes, placement.lost_runs)

    @property
    def _place_(self) -> "NodePlace":
        """The cluster as an engine knows it."""
        return NodePlace(self)

    # -- its life ----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        host, port = self._bind
        if self._files is not None:
            self._tls = tls_of(*self._files)
        elif not self._plain and not is_loopback(host):
            self._tls = made_tls()
        self._admission = Admission(self._tokens, self._joined, self._tls)
        self._listening = await self._admission.open(host, port, plain=self._plain)
        hint = f"run on each node, with the token in FILE: {self.join_command()} --token-file FILE"
        self._placement = Placement(self._min_nodes, self._join_timeout_s, hint)

    async def _close(self) -> None:
        admission, placement = self._admission, self._placement
        self._admission = self._placement = self._listening = self._tls = None
        if placement is not None:
            placement.close(CLOSED)
            for node in placement.nodes:
                node.link.post(Quit(CLOSED))
            await asyncio.gather(*(node.link.aclose() for node in placement.nodes))
        if admission is not None:
            await admission.aclose()
        if self._serving:
            await asyncio.wait(self._serving)

    def _joined(self, link: Link[FromAgent], join: Join, source: str) -> None:
        placement = self._placement
        if placement is None:
            link.close(CLOSED)
            return
        node = Node(link, join, self._contexts, placement.look, source)
        placement.add(node)
        _log.info("the node %s has joined the cluster", node.name)
        task = asyncio.get_running_loop().create_task(self._serve(node, placement))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, node: Node, placement: Placement) -> None:
        """Have a node until it is lost or has left."""
        try:
            why = await node.serve()
        finally:
            placement.remove(node)
        if placement is self._placement:
            self._lost_nodes += 1
            if node.has_quit and self._admission is not None:
                self._admission.forget(node.name)
                placement.forget(node.name)
            _log.warning("the node %s of the cluster is gone: %s", node.name, why)


class NodePlace:
    """The nodes of a cluster as a place of whole runs; see `RunPlace`."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._options: SandboxOptions = nodes._options
        self.level = self._options.isolation
        self.seed = self._options.seed

    @property
    def event_loop(self) -> EventLoopRef | None:
        """The loop that the cluster lives on; None where that is not decided yet."""
        return self._nodes.event_loop

    def borrowed(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Have the cluster open inside the block."""
        return self._nodes.borrowed()

    def answering(
        self,
        request: RunRequest,
        *,
        routing: Routing,
        handler: Completing,
        limits: Limits,
        seed: int | None,
        events: TreeEvents,
    ) -> RemoteRun:
        """Return a run on the cluster, which has not begun.

        Raises:
            ConfigurationError: The request has what cannot cross, or the cluster lives on another event loop.
            SandboxFailed: The cluster is not open.
        """
        placement, event_loop = self._nodes._placement, self._nodes.event_loop
        if placement is None:
            raise SandboxFailed(CLOSED)
        if event_loop is None or not event_loop.is_here:
            raise ConfigurationError("the handler and the cluster were opened on two event loops: open both on one")
        said = self._options
        python = None if said.python is None else os.fspath(said.python)
        packages = None if said.packages is None else tuple(said.packages)
        return RemoteRun(
            request,
            routing=routing,
            handler=handler,
            engine=EngineSpec(limits_spec(limits), said.isolation, said.allow_exec, seed, python, packages),
            events=events,
            placement=placement,
            contexts=self._nodes._contexts,
        )


def host_and_port(text: object, what: str, *, port: int | None = None) -> tuple[str, int]:
    """Return the host and the port of an address such as "10.0.0.1:7077" or "[::1]:7077".

    Args:
        text: The address.
        what: Name of the argument, for errors.
        port: Port of an address without one; None refuses it.

    Raises:
        ConfigurationError: It is no such address.
    """
    require_kind(what, text, str)
    given = str(text).strip()
    host, colon, digits = given.rpartition(":")
    if port is not None and (not colon or given.endswith("]") or (host.count(":") and not host.startswith("["))):
        host, digits = given, str(port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        digits = ""  # an IPv6 address without brackets: where its port would begin is not clear
    if not digits.isdecimal() or len(digits) > 5 or int(digits) > 65_535:
        raise ConfigurationError(
            f"{what} must be an address and a port, such as 0.0.0.0:7077 or [::]:7077, not {text!r}"
        )
    return host, int(digits)
