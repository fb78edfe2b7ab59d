"""The command line of `rlm-broker serve`. Its work is in `serving`, which `--help` does not import."""

from pathlib import Path
from typing import Any

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.parameters import API_KEY, BASE_URL, FILE, ISOLATION, KEY

EXIT_CODES = """\b
exit codes: 0 drained after SIGTERM or Ctrl+C, 1 failed, 2 the command line or configuration is wrong, or the port is
in use, 4 the isolation cannot be had, 5 the model provider failed"""


@click.command("serve", epilog=EXIT_CODES)
@click.option("-m", "--model", metavar="NAME", help="The model that answers (default offline).")
@click.option("-s", "--sub-model", metavar="NAME", help="The model that code asks; default: the same.")
@BASE_URL
@API_KEY
@click.option("--host", metavar="HOST", help="Address to listen on (default 127.0.0.1).")
@click.option("--port", type=int, metavar="N", help="Port (default 8700); 0 takes a free one.")
@click.option(
    "--key", type=KEY, metavar="env:NAME", help="Variable that holds the key of clients; default: one is made."
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    metavar="NAME=PATH",
    help="Files that the model MODEL@NAME asks about. They are read once, at the start.",
)
@click.option("--config", type=FILE, metavar="FILE", help="Settings, in place of rlm-broker.toml of this folder.")
@click.option("--isolation", type=ISOLATION, help="Level of the sandbox (default auto); process is unprotected.")
@click.option("--max-runs", type=int, metavar="N", help="Runs at the same time (default 64).")
@click.option("--drain-s", type=float, metavar="S", help="Seconds that runs have to end after SIGTERM (default 30).")
@click.option("--certificate", type=FILE, metavar="FILE", help="Certificate for TLS, as PEM.")
@click.option("--private-key", type=FILE, metavar="FILE", help="Private key of the certificate, as PEM.")
@click.option("--behind-proxy", is_flag=True, default=None, help="A proxy in front speaks TLS: listen beyond loopback.")
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="A limit of runs: run_timeout_s=10m.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(*, debug: bool, config: str | None, contexts: tuple[str, ...], **options: Any) -> None:
    """Serve an RLM as a model over HTTP, and its sandbox: to OpenAI's clients, chat windows and agents.

    The address, the key and the link of the viewer go to stdout. SIGTERM lets runs end; a second one ends them.
    """
    with failures("serve", as_json=False, debug=debug):
        from rlm_broker.extras import require_extra

        with require_extra("serve", "`rlm-broker serve`"):
            from rlm_broker.cli import serving  # pydantic and starlette: half a second

        serving.serve(config=None if config is None else Path(config), contexts=contexts, **options)
