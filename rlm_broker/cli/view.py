"""`rlm-broker view`: the runs of this machine in the browser, as they go on."""

import asyncio
import webbrowser

from rlm_broker.cli.terminal import say
from rlm_broker.cli.trace import has_display
from rlm_broker.cli.viewer import Viewer


def run(*, port: int, host: str, no_open: bool) -> None:
    """Print the link of the page, open it, and serve it until Ctrl+C."""
    viewer = Viewer(host, port)
    say(viewer.link)
    if not no_open and has_display():
        webbrowser.open(viewer.link)
    asyncio.run(viewer.serve())
