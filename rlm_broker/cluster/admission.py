"""The broker's port of a cluster, and which connections become links.

A stranger is looked at in this order: the number of its connections, TLS, the size of its first frame, its token. Not
before the token is valid is anything else of the frame decoded. A wrong, a used and an expired token get one answer.
"""

import asyncio
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Callable

import msgspec

from rlm_broker.broker.transport.acceptor import Acceptor, bind
from rlm_broker.cluster.first_frame import FirstFrame
from rlm_broker.cluster.link import Link, encode, from_agent
from rlm_broker.cluster.messages import PROTOCOL, FromAgent, Join, Refused, Welcome
from rlm_broker.cluster.tls import ServerTls
from rlm_broker.cluster.tokens import Pass, Tokens
from rlm_broker.errors import ConfigurationError
from sandbox_worker import RELEASE

JOIN_S = 5.0
"""Seconds that a connection has from its arrival until its join is complete, TLS included."""
MOST_STRANGERS = 256
"""Connections that have not joined. When one more comes, the oldest of the address with the most is closed."""
MOST_OF_ADDRESS = 64
"""Such connections from one address (of IPv6: one /64). When one more comes, the oldest of them is closed."""
MOST_NODES = 4_096
"""Nodes that are joined at the same time."""
BAD_TOKEN = "the token is not valid, or not any more: take the join command that the orchestrator shows now"

OnJoined = Callable[[Link[FromAgent], Join, str], None]
"""Called with the link of a node that has joined, its facts and its source address, as `source_of` returns it. The
name of the node in the cluster is that of the link."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class _Shown(msgspec.Struct, frozen=True):
    """The token of a first frame. All else in the frame is skipped, and no object is made of it."""

    token: str


class _Version(msgspec.Struct, frozen=True):
    """The version of a first frame, whatever else the frames of that version have."""

    protocol: int
    release: str


_shown = msgspec.json.Decoder(_Shown)
_version = msgspec.json.Decoder(_Version)
_join = msgspec.json.Decoder(Join)


class Admission:
    """The port to which nodes connect.

    Args:
        tokens: Valid tokens.
        joined: Called with each node that joins, also with one that joins again. Its older link is closed before.
        tls: Certificate of the broker, or None for connections in plain text.

    Attributes:
        refused: Number of connections that were turned away or left before they had joined.
    """

    def __init__(self, tokens: Tokens, joined: OnJoined, tls: ServerTls | None = None) -> None:
        self.refused = 0
        self._tokens = tokens
        self._joined = joined
        self._tls = tls
        self._acceptor: Acceptor | None = None
        self._strangers: dict[Stranger, asyncio.Task[None]] = {}
        self._links: dict[str, Link[FromAgent]] = {}

    async def open(self, host: str = "127.0.0.1", port: int = 0, *, plain: bool = False) -> tuple[str, int]:
        """Begin to listen, and return host and port.

        Args:
            host: Address to bind; empty for all.
            port: 0 takes a free one.
            plain: The caller knows that tokens, prompts and contexts cross the network in plain text.

        Raises:
            ConfigurationError: The address is beyond loopback without TLS and without `plain`, or cannot be bound.
        """
        if self._tls is None and not plain and not is_loopback(host):
            raise ConfigurationError(
                f"{host or 'every address'} is beyond loopback: nodes connect to it by TLS, or, if the network "
                "is yours, in plain text with plain=True"
            )
        self._acceptor = Acceptor(await bind(host, port), self._accept, self._make_room)
        return self._acceptor.address

    async def aclose(self) -> None:
        """Stop listening, and close all connections that have not joined. Links are left to their users."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        attending = list(self._strangers.values())
        for task in attending:
            task.cancel()
        if attending:
            await asyncio.wait(attending)

    def forget(self, node: str) -> None:
        """Refuse the secret of a node that has left by itself, and give its name to the next that wants it."""
        self._tokens.forget(node)
        self._links.pop(node, None)

    # -- strangers ---------------------------------------------------------------------------------------------------

    def _accept(self, connected: socket.socket) -> None:
        try:
            source = source_of(connected.getpeername()[0])
        except OSError:  # gone already
            connected.close()
            return
        if self._of(source) >= MOST_OF_ADDRESS:
            self._close_oldest(source)
        elif len(self._strangers) >= MOST_STRANGERS:
            self._make_room()
        stranger = Stranger(source, self._show)
        attending = asyncio.get_running_loop().create_task(self._attend(stranger, connected))
        attending.add_done_callback(lambda _: self._attended(stranger, connected))  # also if it never ran
        self._strangers[stranger] = attending

    def _of(self, source: str) -> int:
        return sum(stranger.source == source for stranger in self._strangers)

    def _make_room(self) -> None:
        """Close the oldest connection of the address with the most: one address cannot keep out another."""
        if self._strangers:
            [(source, _)] = Counter(stranger.source for stranger in self._strangers).most_common(1)
            self._close_oldest(source)

    def _close_oldest(self, source: str) -> None:
        """Close the oldest connection of an address: an agent joins at once, and idle connections only wait."""
        oldest = next(stranger for stranger in self._strangers if stranger.source == source)
        self._strangers.pop(oldest).cancel()

    async def _attend(self, stranger: "Stranger", connected: socket.socket) -> None:
        """Wait until a connection has joined or has ended, for `JOIN_S` at most."""
        loop, tls = asyncio.get_running_loop(), self._tls
        try:
            async with asyncio.timeout(JOIN_S):
                await loop.connect_accepted_socket(
                    lambda: stranger.frame,
                    connected,
                    ssl=None if tls is None else tls.context,
                    ssl_handshake_timeout=None if tls is None else JOIN_S,
                )
                await stranger.frame.gone.wait()
        except OSError:  # a failed handshake, a connection that was lost, or too late
            pass

    def _attended(self, stranger: "Stranger", connected: socket.socket) -> None:
        self._strangers.pop(stranger, None)
        if not stranger.has_joined:
            self.refused += 1
            stranger.frame.hang_up()
            connected.close()

    # -- joining -----------------------------------------------------------------------------------------------------

    def _show(self, stranger: "Stranger", payload: bytes) -> None:
        """Admit the connection whose first frame this is, or refuse it."""
        found = self._tokens.find(_token_of(payload))
        if found is None:
            stranger.refuse(BAD_TOKEN)
            return
        try:
            version = _version.decode(payload)
            if (version.protocol, version.release) != (PROTOCOL, RELEASE):
                stranger.refuse(_other_version(version))
                return
            join = _join.decode(payload)
        except (ValueError, RecursionError) as error:
            stranger.refuse(f"the join is not valid: {str(error)[:200]}")
            return
        present = sum(not link.is_lost for link in self._links.values())
        if found.node is None and present >= MOST_NODES:
            stranger.refuse(f"the cluster has {MOST_NODES:,} nodes, and takes no more")
            return
        self._admit(stranger, join, found)

    def _admit(self, stranger: "Stranger", join: Join, found: Pass) -> None:
        self._tokens.use(found)
        self._strangers.pop(stranger)  # it is closed to make room no more
        if found.node is None:
            node = self._free_name(join.name)
            secret = self._tokens.secret_of(node)
        else:
            node, secret = found.node, join.token
            older = self._links.get(node)
            if older is not None:
                older.close("the node has joined again")
        link = self._links[node] = Link(node, from_agent)
        stranger.join(link, encode(Welcome(node, secret)))
        self._joined(link, join, stranger.source)

    def _free_name(self, wanted: str) -> str:
        """Return a name like the wanted one that no other node has."""
        while len(self._links) >= MOST_NODES:  # one of them is lost, since fewer are present
            self.forget(next(name for name, link in self._links.items() if link.is_lost))
        plain = _NOT_IN_NAMES.sub("-", wanted).strip("-.")[:60] or "node"
        name, number = plain, 1
        while name in self._links:
            number += 1
            name = f"{plain}-{number}"
        return name


class Stranger:
    """One connection that has not joined.

    Args:
        source: Address that it counts for.
        show: Called with the first frame.

    Attributes:
        frame: Protocol of the connection until it has joined.
        has_joined: Whether it belongs to a link.
    """

    def __init__(self, source: str, show: "Callable[[Stranger, bytes], None]") -> None:
        self.source = source
        self.has_joined = False
        self.frame = FirstFrame(self._came)
        self._show = show

    def refuse(self, why: str) -> None:
        """Say why, and close the connection."""
        if self.frame.transport is not None:
            self.frame.transport.write(encode(Refused(why)))
            self.frame.transport.close()

    def join(self, link: Link[FromAgent], welcome: bytes) -> None:
        """Hand the connection over to a link, after the welcome."""
        assert self.frame.transport is not None
        self.has_joined = True
        self.frame.transport.write(welcome)
        link.begin(self.frame.transport)
        self.frame.gone.set()

    def _came(self, payload: bytes, rest: bytes) -> None:
        if rest:  # an agent waits for its welcome
            self.frame.hang_up()
        else:
            self._show(self, payload)


def source_of(address: str) -> str:
    """Return what counts as one address: of IPv6 the network of 64 bits, of which a machine may use all addresses."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((int(parsed), 64), strict=False))


def is_loopback(host: str) -> bool:
    """Whether an address of the network reaches this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token_of(payload: bytes) -> str:
    """Return the token of a first frame; empty, and so not valid, if there is none."""
    try:
        return _shown.decode(payload).token
    except (ValueError, RecursionError):
        return ""


def _other_version(version: _Version) -> str:
    return (
        f"the node has release {version.release[:40]} of rlm-broker (protocol {version.protocol}) and the broker "
        f"{RELEASE} (protocol {PROTOCOL}): install the same release on both"
    )
