"""`rlm-broker serve`: its settings, one HTTP server, and its end by signals."""

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
import ssl
from pathlib import Path
from typing import Any, Final

from rlm_broker.cli.composition import rlm_of
from rlm_broker.cli.models import say_stand_in
from rlm_broker.cli.settings.settings import Settings, assigned
from rlm_broker.cli.spans import sent_spans
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError
from rlm_broker.serve.app import Service
from rlm_broker.serve.http_server import BoundedServer, configured
from rlm_broker.serve.settings import RIGHTS, ServeSettings
from rlm_broker.values.host_files import refusal_told
from rlm_broker.watch.server import ControlSocket

OF_SERVER: Final = ("host", "port", "max_runs", "drain_s", "certificate", "private_key", "behind_proxy")
"""Options that stand for settings of the same name in the table `serve`."""


def run(
    *, config: Path | None, contexts: tuple[str, ...], key: str | None, assignments: tuple[str, ...], **options: Any
) -> None:
    """Serve until a signal comes.

    Raises:
        ConfigurationError: A setting cannot be used, or the port is in use.
    """
    flags = {name: value for name, value in options.items() if name not in OF_SERVER}
    settings = Settings(assigned(assignments, **flags), file=config)
    of_server = {name: options[name] for name in OF_SERVER if options[name] is not None}
    serving = serve_settings(settings.serve, of_server, contexts, key)
    require_safe(serving)
    with contextlib.closing(_listening(serving)) as listener, sent_spans() as spans:
        asyncio.run(_served(Service(rlm_of(settings), serving, on_event=spans), serving, listener, settings))


def serve_settings(
    table: dict[str, Any], options: dict[str, Any], contexts: tuple[str, ...], key: str | None
) -> ServeSettings:
    """Return the settings of the server.

    Args:
        table: Table `serve` of the settings files.
        options: Options of the command line; they replace the table's.
        contexts: `NAME=PATH` of the command line.
        key: Variable holding a key with all rights, as "env:NAME", or None.

    Raises:
        ConfigurationError: A setting does not exist, or cannot have its value.
    """
    together, named = {**table, **options}, dict[str, str]()
    for context in contexts:
        name, separator, path = context.partition("=")
        if not separator or not name or not path:
            raise ConfigurationError(f"--context {context}: give NAME=PATH, for example logs=logs/")
        if name in named:
            raise ConfigurationError(f"--context {name} is given twice: give each context a name of its own")
        named[name] = path
    if named:
        together["contexts"] = {**together.get("contexts", {}), **named}
    if key is not None:
        together["keys"] = {**together.get("keys", {}), "default": {"key": key, "rights": sorted(RIGHTS)}}
    return ServeSettings.model_validate(together)


def require_safe(settings: ServeSettings) -> None:
    """Refuse to send keys and documents over a network in plain text.

    Raises:
        ConfigurationError: The address is beyond loopback, without TLS and without a proxy; or TLS cannot use
            its files.
    """
    if (settings.certificate is None) != (settings.private_key is None):
        raise ConfigurationError("TLS needs both files: give --certificate and --private-key")
    if settings.certificate is None and not settings.behind_proxy and not _is_loopback(settings.host):
        raise ConfigurationError(
            f"{settings.host} is beyond loopback: give --certificate and --private-key for TLS, or --behind-proxy"
        )
    if settings.certificate is not None and settings.private_key is not None:
        _require_pair(settings.certificate, settings.private_key)


def _require_pair(certificate: str, private_key: str) -> None:
    """Refuse a certificate and a key that TLS cannot use, before an address is printed.

    Raises:
        ConfigurationError: A file cannot be read or is no PEM, the two do not fit, or the key has a passphrase.
    """
    for path in (certificate, private_key):
        with refusal_told(f"{path} cannot be read"):
            Path(path).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key, password=lambda: "")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = getattr(error, "reason", None)
        why = str(reason).lower().replace("_", " ") if reason else "it is no PEM, or the key has a passphrase"
        raise ConfigurationError(f"TLS cannot use {certificate} with {private_key}: {why}") from None


async def _served(service: Service, settings: ServeSettings, listener: socket.socket, of_models: Settings) -> None:
    async with service:
        config = configured(service, settings.certificate, settings.private_key, behind_proxy=settings.behind_proxy)
        server = BoundedServer(config)
        wants_end, at_once = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop(now: bool = False) -> None:
            if now or wants_end.is_set():
                at_once.set()
            wants_end.set()

        async def stopped(now: bool) -> None:
            loop.call_soon_threadsafe(stop, now)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets it
                loop.add_signal_handler(number, stop)
        control = ControlSocket("serve", stopped).start()
        serving = asyncio.ensure_future(server.serve([listener]))
        try:
            _greet(service, settings, listener)
            if not of_models.names_model:
                await asyncio.to_thread(say_stand_in, "serve", of_models)
            ending = asyncio.ensure_future(wants_end.wait())
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if not serving.done():
                hurry = asyncio.ensure_future(_drained_at(service, at_once))
                await service.drain()
                hurry.cancel()
        finally:
            server.should_exit = True
            await serving
            await control.aclose()


async def _drained_at(service: Service, at_once: asyncio.Event) -> None:
    """Stop all runs once the event is set."""
    await at_once.wait()
    await service.drain(0)


def _greet(service: Service, settings: ServeSettings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.certificate is None else "https"
    say(f"{scheme}://{shown}:{port}/v1")
    if service.made_key is not None:
        say(f"key: {service.made_key}")
    of_key = "" if service.made_key is None else f"#key={service.made_key}"  # without it, the page asks for a key
    say(f"viewer: {scheme}://{shown}:{port}/viewer/{of_key}")


def _listening(settings: ServeSettings) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigurationError: The host has no such address, or the port is in use.
    """
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=1_024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it on sockets of its own alone
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"the port {settings.port} is in use: give another one by --port, or 0 for a free one"
        else:
            why = f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
        raise ConfigurationError(why) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
