"""`rlm-broker runs view`: the runs of this user's processes in the browser, on loopback, behind a key."""

import asyncio
import secrets
import socket
import webbrowser

import uvicorn

from rlm_broker.cli.terminal import has_display, say
from rlm_broker.errors import ConfigurationError
from rlm_broker.serve.guard import Guard, Keys, ServerKey
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.http_server import BoundedServer, configured
from rlm_broker.serve.settings import RIGHTS
from rlm_broker.serve.status import viewer_app
from rlm_broker.watch.client import MachineRuns
from rlm_broker.watch.viewer.live import LiveSource

HOSTS = ("127.0.0.1", "localhost")
"""Addresses at which the viewer may listen. It has no TLS, so no other machine shall reach it."""
MOST_CONNECTIONS = 200
"""Connections at the same time. Any user of the machine can connect, so the server has the bounds of `serve`."""
STALL_S = 30.0
"""Seconds without a byte after which a body is given up."""
LEAVE_S = 1.0
"""Seconds given to open connections when the command ends."""


def run(*, port: int, host: str, no_open: bool) -> None:
    """Print the link of the page, open it, and serve it until Ctrl+C."""
    viewer = Viewer(host, port)
    say(viewer.link)
    if not no_open and has_display():
        webbrowser.open(viewer.link)
    asyncio.run(viewer.serve())


class _Server(BoundedServer):
    """The server of `rlm-broker serve`, which takes the signals itself, and ends streams of events without a word."""

    capture_signals = uvicorn.Server.capture_signals


class Viewer:
    """Listens at an address of this machine. `link` is for the reader alone: it has the key.

    Args:
        port: Port; 0 takes a free one.

    Raises:
        ConfigurationError: The address is not of this machine alone, or the port cannot be had.
    """

    def __init__(self, host: str, port: int, source: LiveSource | None = None) -> None:
        if host not in HOSTS:
            raise ConfigurationError(
                f"view listens on {' or '.join(HOSTS)} only, and not on {host!r:.100}: from another machine, forward "
                "the port with ssh -L"
            )
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(MOST_CONNECTIONS)  # the link may be opened before the server runs
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(
                f"cannot listen on port {port} of {host}: {error.strerror}: give another --port, or none"
            ) from None
        port = self._socket.getsockname()[1]
        key = secrets.token_urlsafe(24)
        self.link = f"http://{host}:{port}/#key={key}"
        keys = Keys([(ServerKey(Owner("view"), RIGHTS), key)])
        guarded = Guard(viewer_app(source or MachineRuns(), STALL_S), keys, open_paths=frozenset({"/"}))
        self._server = _Server(configured(guarded), MOST_CONNECTIONS, close_s=LEAVE_S, says_cut=False)

    async def serve(self) -> None:
        """Answer requests until a signal comes."""
        try:
            await self._server.serve([self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End `serve`. It is called on the event loop of `serve`."""
        self._server.should_exit = True
