"""The command line of `rlm-broker node`. Its work is in `joining`, which `--help` does not import."""

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.parameters import FILE

EXIT_CODES = """\b
exit codes: 0 the cluster has ended, 1 the broker was not reached or was lost, 2 the command line is wrong, or the
broker refused this node or is another one, 4 the sandbox cannot be had, 130, 143, 129 stopped by a signal"""


@click.command("node", epilog=EXIT_CODES)
@click.option("--connect", "address", required=True, metavar="HOST:PORT", help="Address of the orchestrator's broker.")
@click.option("--fingerprint", metavar="sha256:HEX", help="Fingerprint of the broker's certificate.")
@click.option(
    "--token-file", type=FILE, metavar="FILE", help="File with the join token; default: RLM_BROKER_NODE_TOKEN has it."
)
@click.option("--name", metavar="NAME", help="Name of this node (default: its host name).")
@click.option("--max-runs", type=click.IntRange(1, 65_536), metavar="N", help="Runs at a time (default 16 per CPU).")
@click.option(
    "--wait-s",
    type=click.FloatRange(0),
    default=60.0,
    metavar="S",
    help="Seconds to look for the broker, at the start and after a loss (default 60).",
)
@click.option("--once", is_flag=True, help="End when the broker is lost, and do not look for it again.")
@click.option("--plain", is_flag=True, help="Connect in plain text: the network is yours alone.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(
    *,
    address: str,
    fingerprint: str | None,
    token_file: str | None,
    name: str | None,
    max_runs: int | None,
    wait_s: float,
    once: bool,
    plain: bool,
    debug: bool,
) -> None:
    """Offer this machine to an orchestrator: its runs and their sandboxes are here, its models and keys are there.

    The join command, with the address and the fingerprint, comes from the orchestrator. What happens goes to stderr.
    """
    with failures("node", as_json=False, debug=debug):
        from rlm_broker.cli import joining  # asyncio and the sandbox: a quarter of a second

        joining.offer(
            address=address,
            fingerprint=fingerprint,
            token_file=token_file,
            name=name,
            max_runs=max_runs,
            wait_s=wait_s,
            once=once,
            plain=plain,
        )
