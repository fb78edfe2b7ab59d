"""`rlm-broker view`: the runs of this machine in the browser, as they go on."""

import asyncio

import click

from rlm_broker.cli.failing import fail, failures
from rlm_broker.cli.terminal import say
from rlm_broker.cli.trace import has_display


@click.command("view", epilog="exit codes: 2 the port cannot be had, or packages are missing, 130 Ctrl+C")
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Port (default: a free one).")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address of this machine (default 127.0.0.1).")
@click.option("--no-open", is_flag=True, help="Print the link; do not open the browser.")
def command(port: int, host: str, no_open: bool) -> None:
    """Show the runs of this machine in the browser, follow them, and stop them.

    Shown are the runs that `rlm-broker ps` lists. The link has a key, with which your runs can be seen and stopped:
    keep it to yourself.
    """
    try:
        from rlm_broker.cli.viewer import Viewer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        sentence = "`rlm-broker view` needs packages that are not installed: pip install 'rlm-broker[serve]'"
        fail("view", "configuration", sentence, 2, as_json=False)
    with failures("view", as_json=False):
        viewer = Viewer(host, port)
        say(viewer.link)
        if not no_open and has_display():
            import webbrowser

            webbrowser.open(viewer.link)
        asyncio.run(viewer.serve())
