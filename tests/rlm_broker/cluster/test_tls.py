"""Certificates, their fingerprints, and handshakes that must fail."""

import asyncio
import hashlib
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_broker.cluster.tls import WrongBroker, checked_fingerprint, client_context, made_tls, require_pinned, tls_of
from rlm_broker.errors import ConfigurationError
from tests.support.command import ENVIRONMENT
from tests.support.waiting import WAIT_S


async def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> asyncio.BaseTransport:
    """The client's transport after a handshake."""
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=server)
    async with listening, asyncio.timeout(WAIT_S):
        port = listening.sockets[0].getsockname()[1]
        transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port, ssl=client, server_hostname="")
        transport.abort()
        return transport


async def test_made_certificate_is_pinned_by_its_fingerprint() -> None:
    tls, other = made_tls(), made_tls()
    transport = await handshake(tls.context, client_context())
    assert transport.get_extra_info("ssl_object").version() == "TLSv1.3"
    require_pinned(transport, checked_fingerprint(tls.fingerprint))
    with pytest.raises(WrongBroker, match="the token was not sent"):
        require_pinned(transport, other.fingerprint)


def test_key_of_made_certificate_is_in_no_file(tmp_path: Path) -> None:
    """The descriptor that the key was read through is closed."""
    code = (
        "import os, sys; from rlm_broker.cluster.tls import made_tls; made = made_tls();"
        "print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')"
        " if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    assert "certificate" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two pairs of a certificate and a key, as files."""
    from rlm_broker.cluster.certificate import made_pem

    folder = tmp_path_factory.mktemp("pem")
    made: dict[str, Path] = {}
    for name in ("a", "b"):
        key, begin, certificate = made_pem().partition(b"-----BEGIN CERTIFICATE-----")
        for kind, content in (("key", key), ("crt", begin + certificate)):
            made[f"{name}.{kind}"] = folder / f"{name}.{kind}"
            made[f"{name}.{kind}"].write_bytes(content)
    return made


async def test_own_certificate_is_pinned_by_its_first_one(files: dict[str, Path], tmp_path: Path) -> None:
    """A chain has further certificates. The first is the one that the broker shows."""
    chain = tmp_path / "chain.pem"
    chain.write_bytes(files["a.crt"].read_bytes() + files["b.crt"].read_bytes())
    tls = tls_of(str(chain), str(files["a.key"]))
    der = ssl.PEM_cert_to_DER_cert(files["a.crt"].read_text())
    assert tls.fingerprint == "sha256:" + hashlib.sha256(der).hexdigest()
    require_pinned(await handshake(tls.context, client_context()), tls.fingerprint)


def test_unusable_certificate_files_are_one_sentence(files: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no PEM")
    certificate, key = str(files["a.crt"]), str(files["a.key"])
    for pair, why in (
        ((str(tmp_path / "missing"), key), "missing cannot be read: No such file"),
        ((certificate, str(tmp_path / "missing")), "missing cannot be read: No such file"),
        ((certificate, str(files["b.key"])), "key values mismatch"),
        ((str(text), key), "TLS cannot use"),
        ((key, key), "TLS cannot use"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            tls_of(*pair)


async def test_older_tls_is_refused() -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await handshake(made_tls().context, old)


def test_fingerprint_has_one_meaning_in_its_common_forms() -> None:
    digits = hashlib.sha256(b"x").hexdigest()
    colons = ":".join(digits[at : at + 2] for at in range(0, 64, 2)).upper()
    for text in (digits, f"sha256:{digits}", f" SHA256:{colons}\n"):
        assert checked_fingerprint(text) == f"sha256:{digits}"
    for wrong in ("", "sha256:", digits[:-1], f"sha1:{digits[:40]}", "g" * 64, digits + "00"):
        with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
            checked_fingerprint(wrong)
