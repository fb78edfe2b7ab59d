"""TLS between an orchestrator and its agents: TLS 1.3, and the orchestrator's certificate pinned by its fingerprint.

No authority signs the certificate, and no name in it is looked at. It is made for the life of the process. An agent's
order has its SHA-256, and the agent sends its token only to the side that has the certificate's key.
"""

import asyncio
import datetime
import hashlib
import hmac
import importlib
import os
import ssl
from dataclasses import dataclass
from typing import Any

from rlm_broker.errors import SandboxFailed
from rlm_broker.values.extras import require_extra

VALID_DAYS = 3_650
"""Days for which the certificate is made. Agents compare its fingerprint, and not its dates."""


@dataclass(frozen=True)
class ServerTls:
    """The orchestrator's side of TLS.

    Attributes:
        context: Context with the certificate and its key, which is in memory alone.
        fingerprint: SHA-256 of the certificate, in hexadecimal digits.
    """

    context: ssl.SSLContext
    fingerprint: str

    @classmethod
    def make(cls) -> "ServerTls":
        """Make a certificate and its key.

        Raises:
            ExtraMissing: The package `cryptography` is not installed.
        """
        with require_extra("ray", "TLS of a cluster"):
            x509: Any = importlib.import_module("cryptography.x509")
            hazmat: Any = importlib.import_module("cryptography.hazmat.primitives.serialization")
            hashes: Any = importlib.import_module("cryptography.hazmat.primitives.hashes")
            curves: Any = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ec")
        key = curves.generate_private_key(curves.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rlm-broker")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(hazmat.Encoding.PEM, hazmat.PrivateFormat.PKCS8, hazmat.NoEncryption())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # no session is resumed, and each handshake is whole
        descriptor = os.memfd_create("rlm-broker-certificate")  # `load_cert_chain` reads files alone
        try:
            os.write(descriptor, private + made.public_bytes(hazmat.Encoding.PEM))
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return cls(context, hashlib.sha256(made.public_bytes(hazmat.Encoding.DER)).hexdigest())


def client_context() -> ssl.SSLContext:
    """Return the context of an agent. It accepts any certificate: `require_pinned` comes after the handshake.

    The handshake shows that the other side has the certificate's key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def require_pinned(transport: asyncio.BaseTransport, fingerprint: str) -> None:
    """Refuse an orchestrator whose certificate is not the pinned one.

    Raises:
        SandboxFailed: The certificate has another fingerprint.
    """
    certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(certificate).hexdigest(), fingerprint):
        raise SandboxFailed("another certificate answers than the order says, so the token was not sent")
