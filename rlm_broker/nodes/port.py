"""The port for agents: TLS 1.3 with a pinned certificate, and a one-time token in the first frame.

No authority signs the certificate, and no name in it is looked at. It is made for the life of the port. An agent's
order has its SHA-256, and the agent sends its token only to the side with the certificate's key.
"""

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import importlib
import os
import secrets
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

import msgspec

from rlm_broker.broker.transport.acceptor import Acceptor, bind
from rlm_broker.errors import SandboxFailed
from rlm_broker.nodes.messages import MAX_JOIN_BYTES, PROTOCOL, Join, join_decoder
from rlm_broker.values.extras import require_extra
from sandbox_worker import RELEASE
from sandbox_worker.wire.errors import WireError
from sandbox_worker.wire.frames import FrameDecoder, encode_frame

TOKEN_BYTES = 32
"""Random bytes of a token: 256 bits cannot be guessed."""
JOIN_TIMEOUT_S = 10.0
"""Seconds for TLS and the first frame; then a stranger is dropped."""
MOST_STRANGERS = 64
"""Connections without a token. With one more, the oldest is dropped: its agent is started again."""
VALID_DAYS = 3_650
"""Days of validity of the certificate. Agents compare its fingerprint, and not its dates."""


class AgentPort:
    """Accepts the connections of agents.

    Args:
        is_encrypted: Whether it has a certificate; else it is plain text, on loopback.

    Attributes:
        fingerprint: SHA-256 of the certificate, in hexadecimal digits; None without one.
        strangers: Connections without a token, the oldest first.

    Raises:
        ExtraMissing: The package `cryptography` is not installed.
    """

    def __init__(self, *, is_encrypted: bool) -> None:
        made = made_certificate() if is_encrypted else None
        self._tls = None if made is None else made[0]
        self.fingerprint = None if made is None else made[1]
        self._acceptor: Acceptor | None = None
        self._expected: dict[str, Callable[[], asyncio.Protocol]] = {}
        self._tokens: dict[str, str] = {}
        self.strangers: dict[Newcomer, None] = {}
        self._arriving: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> tuple[str, int]:
        """Listen on a free port of an address, and return both.

        Raises:
            ConfigurationError: The address cannot be bound.
        """
        self._acceptor = Acceptor(await bind(host, 0), self._accepted, self._drop_oldest)
        return self._acceptor.address

    async def close(self) -> None:
        """Close the port, and all connections without a token. Has no effect when repeated."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor.close()
        self._expected.clear()
        for task in list(self._arriving):
            task.cancel()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        for stranger in list(self.strangers):
            stranger.hang_up()

    def expect(self, name: str, make: Callable[[], asyncio.Protocol]) -> str:
        """Return a token for a node, in place of its last one. It can be shown once; `make` then returns what takes the
        connection."""
        self._expected.pop(self._tokens.get(name, ""), None)
        token = self._tokens[name] = secrets.token_urlsafe(TOKEN_BYTES)
        self._expected[token] = make
        return token

    def _accepted(self, connected: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._arrive(connected))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _arrive(self, connected: socket.socket) -> None:
        if len(self.strangers) >= MOST_STRANGERS:
            self._drop_oldest()
        loop = asyncio.get_running_loop()
        timeout_s = JOIN_TIMEOUT_S if self._tls else None
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                stranger = Newcomer(self, connected)
                await loop.connect_accepted_socket(
                    lambda: stranger, connected, ssl=self._tls, ssl_handshake_timeout=timeout_s
                )
        except OSError:  # no TLS, or the stranger has left; SSLError and TimeoutError are OSErrors
            stranger.hang_up()
            connected.close()

    def _drop_oldest(self) -> None:
        if self.strangers:
            next(iter(self.strangers)).hang_up()

    def claim(self, join: Join) -> asyncio.Protocol | None:
        """Return the taker of an agent's connection, whose token is used up; None for another first frame."""
        if (join.protocol, join.release) != (PROTOCOL, RELEASE):
            return None
        make = self._expected.pop(join.token, None)
        return None if make is None else make()


class Newcomer(asyncio.Protocol):
    """A connection without a token. It is one of the strangers from its beginning, before its TLS handshake."""

    def __init__(self, port: AgentPort, connected: socket.socket) -> None:
        self._port = port
        self._connected = connected
        self._frames = FrameDecoder(MAX_JOIN_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer = asyncio.get_running_loop().call_later(JOIN_TIMEOUT_S, self.hang_up)
        port.strangers[self] = None

    def hang_up(self) -> None:
        """Close the connection without a message."""
        self._leave()
        if self._transport is not None:
            self._transport.abort()
        else:
            with contextlib.suppress(OSError):
                self._connected.shutdown(socket.SHUT_RDWR)  # ends the handshake of TLS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self not in self._port.strangers:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._leave()

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._frames.feed(data)
            taker = self._port.claim(join_decoder.decode(payloads[0])) if payloads else None
        except (WireError, msgspec.MsgspecError, RecursionError, UnicodeError):
            taker, payloads = None, [b""]
        if payloads and taker is None:  # no reply: a stranger must not learn of tokens
            self.hang_up()
        elif taker is not None:
            assert self._transport is not None
            self._leave()
            self._transport.set_protocol(taker)
            taker.connection_made(self._transport)
            early = b"".join(encode_frame(each, len(each)) for each in payloads[1:]) + self._frames.pending
            if early:
                taker.data_received(early)

    def _leave(self) -> None:
        self._timer.cancel()
        self._port.strangers.pop(self, None)


def made_certificate() -> tuple[ssl.SSLContext, str]:
    """Make a certificate and its key, in memory alone; return a context with both, and the fingerprint."""
    with require_extra("ray", "TLS of a cluster"):
        x509: Any = importlib.import_module("cryptography.x509")
        forms: Any = importlib.import_module("cryptography.hazmat.primitives.serialization")
        hashes: Any = importlib.import_module("cryptography.hazmat.primitives.hashes")
        curves: Any = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ec")
    key = curves.generate_private_key(curves.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rlm-broker")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
    made = made.not_valid_after(now + datetime.timedelta(days=VALID_DAYS)).sign(key, hashes.SHA256())
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session is resumed, and each handshake is whole
    descriptor = os.memfd_create("rlm-broker-certificate")  # `load_cert_chain` reads files alone
    try:
        os.write(descriptor, private + made.public_bytes(forms.Encoding.PEM))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context, hashlib.sha256(made.public_bytes(forms.Encoding.DER)).hexdigest()


def client_context() -> ssl.SSLContext:
    """Return the context of an agent. It accepts any certificate: `require_pinned` comes after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def require_pinned(transport: asyncio.BaseTransport, fingerprint: str) -> None:
    """Refuse an orchestrator with another certificate than the pinned one.

    Raises:
        SandboxFailed: The certificate has another fingerprint.
    """
    certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(certificate).hexdigest(), fingerprint):
        raise SandboxFailed("another certificate answers than the order says, so the token was not sent")
