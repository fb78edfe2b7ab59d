"""TLS between the broker of a cluster and its nodes: TLS 1.3, and the broker's certificate pinned by its fingerprint.

No authority signs the certificate, and no name in it is looked at. The join command has the SHA-256 of the
certificate, and a node sends its token only to the broker that has that certificate's key.
"""

import asyncio
import hashlib
import hmac
import importlib
import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from rlm_broker.errors import ConfigurationError
from rlm_broker.values.extras import require_extra

PREFIX = "sha256:"
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class WrongBroker(ConfigurationError):
    """The broker that answered does not have the pinned certificate. No token was sent to it."""


@dataclass(frozen=True)
class ServerTls:
    """The broker's side of TLS.

    Attributes:
        context: Context with the certificate and its key.
        fingerprint: What the join command pins: "sha256:" and 64 hexadecimal digits.
    """

    context: ssl.SSLContext
    fingerprint: str


def made_tls() -> ServerTls:
    """Make a certificate for the life of this process. Its key is in memory alone, and in no file.

    Raises:
        ExtraMissing: The package `cryptography` is not installed.
    """
    with require_extra("cluster", "TLS of a cluster"):
        pem: bytes = importlib.import_module("rlm_broker.cluster.certificate").made_pem()
    descriptor = os.memfd_create("rlm-broker-certificate")  # `load_cert_chain` reads files alone
    try:
        os.write(descriptor, pem)
        path = f"/proc/self/fd/{descriptor}"
        return ServerTls(_server_context(path, path), _fingerprint(pem))
    finally:
        os.close(descriptor)


def tls_of(certificate: str, private_key: str) -> ServerTls:
    """Use the caller's certificate and key.

    Args:
        certificate: Path of a PEM file. Its first certificate is the one that nodes pin.
        private_key: Path of a PEM file without a passphrase.

    Raises:
        ConfigurationError: A file cannot be read or used, or the two do not belong together.
    """
    try:
        pem = Path(certificate).read_bytes()
        Path(private_key).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror}") from None
    try:
        return ServerTls(_server_context(certificate, private_key), _fingerprint(pem))
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = getattr(error, "reason", None)
        why = str(reason).lower().replace("_", " ") if reason else "it is no PEM, or the key has a passphrase"
        raise ConfigurationError(f"TLS cannot use {certificate} with {private_key}: {why}") from None


def client_context() -> ssl.SSLContext:
    """Return the context of a node. It accepts any certificate: `require_pinned` comes after the handshake.

    The handshake shows that the broker has the certificate's key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def require_pinned(transport: asyncio.BaseTransport, fingerprint: str) -> None:
    """Refuse a broker whose certificate is not the pinned one.

    Args:
        transport: Connection after its TLS handshake.
        fingerprint: As `checked_fingerprint` returns it.

    Raises:
        WrongBroker: The certificate has another fingerprint.
    """
    certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(_hash(certificate), fingerprint):
        raise WrongBroker(
            "the broker has another certificate than the fingerprint says, so the token was not sent: take the join "
            "command that the orchestrator shows now, or look for what answers in its place"
        )


def checked_fingerprint(text: str) -> str:
    """Return a fingerprint in the form that is compared. Colons between digits, and capitals, are permitted.

    Raises:
        ConfigurationError: The text is no SHA-256 fingerprint.
    """
    digits = text.strip().lower().removeprefix(PREFIX).replace(":", "")
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise ConfigurationError("a fingerprint is sha256: and 64 hexadecimal digits, as the join command has it")
    return PREFIX + digits


def _server_context(certificate: str, private_key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session is resumed, and each node's handshake is whole
    context.load_cert_chain(certificate, private_key, password=lambda: "")
    return context


def _fingerprint(pem: bytes) -> str:
    first = _CERTIFICATE.search(pem)
    if first is None:
        raise ValueError("no certificate")
    return _hash(ssl.PEM_cert_to_DER_cert(first[0].decode()))


def _hash(certificate: bytes) -> str:
    return PREFIX + hashlib.sha256(certificate).hexdigest()
