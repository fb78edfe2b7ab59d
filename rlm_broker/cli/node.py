"""`rlm-broker node`: who the broker is, what this machine offers, and the end by a signal."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from rlm_broker.cli.terminal import say
from rlm_broker.cluster.admission import is_loopback
from rlm_broker.cluster.agent.agent import serve
from rlm_broker.cluster.dialing import Target, attend
from rlm_broker.cluster.messages import JOIN_BYTES, PROTOCOL, Join
from rlm_broker.cluster.tls import checked_fingerprint
from rlm_broker.errors import ConfigurationError
from rlm_broker.sandbox.workers.cgroups import memory_bytes
from rlm_broker.values.text import printable
from sandbox_worker import RELEASE

TOKEN_VARIABLE = "RLM_BROKER_NODE_TOKEN"
RUNS_PER_CPU = 16
"""Runs at a time for each CPU: most runs wait for a model. A node that is short of memory takes fewer by itself."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    *,
    address: str,
    fingerprint: str | None,
    token_file: str | None,
    name: str | None,
    max_runs: int | None,
    wait_s: float,
    once: bool,
    plain: bool,
) -> None:
    """Join a broker, and run what it sends, until the cluster ends or a signal comes.

    Raises:
        ConfigurationError: An option or the token cannot be used, or the broker refused this node.
        NotReached, LinkLost: The broker did not answer, or was lost.
    """
    target = target_of(address, fingerprint, plain=plain)
    cpus = len(os.sched_getaffinity(0))
    asked = Join(
        token=token_of(token_file),
        protocol=PROTOCOL,
        release=RELEASE,
        name=(name or socket.gethostname() or "node")[:200],
        cpus=float(cpus),
        memory_bytes=memory_bytes(),
        max_runs=max_runs or RUNS_PER_CPU * cpus,
    )
    came = asyncio.run(_offered(target, asked, wait_s, once))
    if came is not None:
        sys.exit(128 + came)


def target_of(address: str, fingerprint: str | None, *, plain: bool) -> Target:
    """Return the broker to join.

    Args:
        address: `HOST:PORT`, an IPv6 address in brackets.
        fingerprint: Pinned certificate, or None for plain text.
        plain: Whether plain text is permitted beyond loopback.

    Raises:
        ConfigurationError: The address is none, or it is not said how to connect.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"--connect {address}: give HOST:PORT, for example 10.0.0.1:8800 or [::1]:8800")
    if fingerprint is not None and plain:
        raise ConfigurationError("give --fingerprint for TLS, or --plain for plain text, and not both")
    if fingerprint is None and not plain and not is_loopback(host):
        raise ConfigurationError(
            f"{host} is beyond loopback: give the broker's --fingerprint, or --plain if the network is yours alone"
        )
    return Target(host, int(port), None if fingerprint is None else checked_fingerprint(fingerprint))


def token_of(token_file: str | None) -> str:
    """Return the join token of a file or of the variable. No child process gets the variable.

    Raises:
        ConfigurationError: There is no token, or the file cannot be read.
    """
    variable = os.environ.pop(TOKEN_VARIABLE, "").strip()
    if token_file is None:
        if not variable:
            raise ConfigurationError(f"no join token: give --token-file FILE, or set {TOKEN_VARIABLE}")
        return variable
    try:
        with Path(token_file).open("rb") as file:
            token = file.read(JOIN_BYTES).decode().strip()
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigurationError(f"the token file {token_file} cannot be read: {why}") from None
    if not token or len(token.split()) != 1 or len(token) > JOIN_BYTES // 4:
        raise ConfigurationError(f"the token file {token_file} must have the join token, and no other text")
    return token


async def _offered(target: Target, asked: Join, wait_s: float, once: bool) -> int | None:
    """Attend to the broker. Return the number of the signal that ended it, or None."""
    came: int | None = None
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        nonlocal came
        came = number
        for each in SIGNALS:  # a second signal ends the process at once, and with it all below it
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        attending.cancel()

    attending = loop.create_task(attend(target, asked, serve, wait_s=wait_s, once=once, tell=_tell))
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets it
            loop.add_signal_handler(number, stop, number)
    try:
        await attending
    except asyncio.CancelledError:
        if came is None:
            raise
        _tell(f"stopped by {signal.Signals(came).name}: all runs of this node are ended")
    return came


def _tell(text: str) -> None:
    say(f"rlm-broker node: {printable(text)}", err=True)
