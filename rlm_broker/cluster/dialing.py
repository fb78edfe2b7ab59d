"""The way of an agent to its broker: it connects, looks at the certificate, joins, and joins again after a loss."""

import asyncio
import os
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from rlm_broker.cluster.first_frame import FirstFrame
from rlm_broker.cluster.link import Link, LinkLost, encode, from_broker
from rlm_broker.cluster.messages import FromBroker, Join, Load, Refused, Welcome
from rlm_broker.cluster.tls import client_context, require_pinned
from rlm_broker.errors import ConfigurationError, RlmBrokerError
from rlm_broker.values.text import printable

DIAL_S = 10.0
"""Seconds for one attempt: the connection, TLS, and the broker's answer."""
PATIENCE_S = 10.0
"""Seconds for which a broker may send nothing while its kernel acknowledges the heartbeats, see `silence`."""
FIRST_PAUSE_S = 0.2
SETTLED_S = 10.0
"""Seconds that a link has lived after which the pauses begin with the first one again."""
LONGEST_PAUSE_S = 5.0
"""Seconds between two attempts, at most. Each pause is twice the one before, less a random part."""

_answer: "msgspec.json.Decoder[Welcome | Refused]" = msgspec.json.Decoder(Welcome | Refused)


class NotReached(RlmBrokerError):
    """No broker of a cluster answered at the address in time."""

    kind = "cluster"


class JoinRefused(ConfigurationError):
    """The broker does not take this node; the message is its sentence."""


@dataclass(frozen=True)
class Target:
    """The broker that an agent joins.

    Attributes:
        host, port: Its address.
        fingerprint: Pinned certificate, as `tls.checked_fingerprint` returns it; None: a connection in plain text.
    """

    host: str
    port: int
    fingerprint: str | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Serve = Callable[[Link[FromBroker], Welcome], Awaitable[object]]
"""Serves one link. It returns when the link has ended, and all that the node ran for it."""


async def join(target: Target, asked: Join) -> tuple[Link[FromBroker], Welcome]:
    """Connect and join once.

    Args:
        target: The broker.
        asked: Facts about the node, with a join token or the secret of an earlier welcome.

    Returns:
        The link, which has begun, and the broker's welcome. Set the link's `beat` before anything is awaited.

    Raises:
        WrongBroker: The certificate is not the pinned one. The token was not sent.
        JoinRefused: The broker says why.
        NotReached: The address does not answer, or not as a broker does.
    """
    answer = _Answer()
    frame = FirstFrame(answer.came)
    try:
        async with asyncio.timeout(DIAL_S):
            await _connect(target, frame)
            assert frame.transport is not None
            if target.fingerprint is not None:
                require_pinned(frame.transport, target.fingerprint)
            frame.transport.write(encode(asked))
            await answer.wait(frame.gone)
            said = _answer.decode(answer.payload)
            if isinstance(said, Refused):
                raise JoinRefused(f"the broker at {target} refused this node: {printable(said.why[:400])}")
            if frame.transport.is_closing():
                raise NotReached(f"the broker at {target} was not reached: it closed the connection after its welcome")
            link = Link(said.node, from_broker, _no_load, patience_s=PATIENCE_S)
            link.begin(frame.transport, answer.rest)
            return link, said
    except BaseException as error:
        frame.hang_up()
        if isinstance(error, OSError | ValueError | RecursionError):
            raise NotReached(f"the broker at {target} was not reached: {_reason(error, target)}") from None
        raise


async def attend(
    target: Target,
    asked: Join,
    serve: Serve,
    *,
    wait_s: float,
    once: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> None:
    """Join and serve; after a loss, join again, until the broker says that the cluster has ended.

    Args:
        target: The broker.
        asked: Facts about the node, with its join token.
        serve: Called with each link.
        wait_s: Seconds for which the broker is looked for, at the start and after each loss; 0 makes one attempt.
        once: Whether to end at the first loss.
        tell: Called with one sentence when the node joins, is lost, or leaves.

    Raises:
        WrongBroker, JoinRefused: The broker is another one, or does not take this node.
        NotReached: It did not answer for `wait_s`.
        LinkLost: The link was lost, with `once`.
    """
    loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
    secret: str | None = None
    while True:
        link, welcome = await _joined(target, asked, secret, wait_s, tell)
        secret = welcome.rejoin
        tell(f"joined {target} as {welcome.node}")
        joined_at = loop.time()
        try:
            await serve(link, welcome)
        finally:
            await link.aclose()
        if link.farewell is not None:
            tell(f"the cluster has ended: {printable(link.farewell[:400])}")
            return
        if once:
            raise LinkLost(f"the broker at {target} was lost: {link.why_lost}")
        tell(f"the broker at {target} was lost: {link.why_lost}; all runs of this node are ended")
        if loop.time() - joined_at >= SETTLED_S:
            pause_s = FIRST_PAUSE_S
        pause_s = await _paused(pause_s)


async def _joined(
    target: Target, asked: Join, secret: str | None, wait_s: float, tell: Callable[[str], object]
) -> tuple[Link[FromBroker], Welcome]:
    """Try to join until `wait_s` are over. A secret that is refused gives way to the join token: the broker is new."""
    loop = asyncio.get_running_loop()
    until, pause_s, has_told = loop.time() + wait_s, FIRST_PAUSE_S, False
    while True:
        try:
            return await join(target, asked if secret is None else msgspec.structs.replace(asked, token=secret))
        except JoinRefused:
            if secret is None:
                raise
            secret = None
            continue
        except NotReached as error:
            if loop.time() + pause_s > until:
                raise
            if not has_told:
                has_told = True
                tell(f"{error}; trying again for {wait_s:g} s")
        pause_s = await _paused(pause_s)


async def _paused(pause_s: float) -> float:
    """Wait, and return the seconds of the next pause."""
    await asyncio.sleep(pause_s * random.uniform(0.5, 1))
    return min(LONGEST_PAUSE_S, 2 * pause_s)


async def _connect(target: Target, frame: FirstFrame) -> None:
    tls = None if target.fingerprint is None else client_context()
    await asyncio.get_running_loop().create_connection(
        lambda: frame, target.host, target.port, ssl=tls, server_hostname=None if tls is None else ""
    )


class _Answer:
    """The broker's first frame, and the bytes behind it."""

    def __init__(self) -> None:
        self.payload = self.rest = b""
        self._has_come = asyncio.Event()

    def came(self, payload: bytes, rest: bytes) -> None:
        self.payload, self.rest = payload, rest
        self._has_come.set()

    async def wait(self, gone: asyncio.Event) -> None:
        """Wait until the frame has come.

        Raises:
            ConnectionResetError: The connection ended before.
        """
        waits = [asyncio.ensure_future(event.wait()) for event in (self._has_come, gone)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if not self._has_come.is_set():
            raise ConnectionResetError


def _reason(error: BaseException, target: Target) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {DIAL_S:g} s"
    if isinstance(error, socket.gaierror):
        return f"no address of {target.host} is known"
    if isinstance(error, ssl.SSLError | ConnectionError) and (error.errno or 0) in (0, ssl.SSL_ERROR_SSL):
        if target.fingerprint is None:
            return "it closed the connection without an answer; if it listens with TLS, give its --fingerprint"
        return "it completed no TLS handshake; if it listens in plain text, give --plain and no --fingerprint"
    if isinstance(error, OSError):
        number = error.errno or 0
        return os.strerror(number) if number > 0 else f"no address of {target.host} answers"
    return "what answered does not speak as a broker does"


def _no_load() -> Load:
    """Return the heartbeat until the agent has set its own."""
    return Load(runs=0, free_bytes=0)
