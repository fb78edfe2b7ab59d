"""`rlm-broker doctor`: start a real worker, let it try what is forbidden, and report."""

import dataclasses
import json
import sys

import click

from rlm_broker.cli.failing import failures
from rlm_broker.errors import RlmBrokerError
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.types import Isolation

ATTEMPTS = {
    "read the host's /etc/passwd": "open('/etc/passwd').read()",
    "list the host's /home": "import os; os.listdir('/home')",
    "write to the installation": "open('/usr/rlm-broker-canary', 'w')",
    "open a socket": "import socket; socket.socket()",
    "re-aim its own connection": "import socket; socket.socket(fileno=os.dup(4)).connect(('127.0.0.1', 1))",
    "listen on its own connection": "import socket; socket.socket(fileno=os.dup(4)).listen()",
    "see another process": "assert len([p for p in os.listdir('/proc') if p.isdigit()]) > 2",
    "read its init's memory": "open('/proc/1/mem', 'rb').read(1)",
    "stop its init": "os.kill(1, 9)",
    "make a namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "trace a process": "import ctypes; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "be root": "assert os.getuid() == 0 or os.geteuid() == 0",
}
"""What must fail inside. Each succeeds where there is no protection, or at least for some user."""


@click.command("doctor", epilog="exit codes: 0 isolation 'auto' works here, 4 it does not")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show what isolation this machine offers, tried out in a real worker."""
    with failures("doctor", as_json=as_json):
        try:
            isolation, refused = _try_out()
            problem = None
        except RlmBrokerError as error:
            isolation, refused, problem = None, {}, str(error)
    works = isolation is not None and all(refused.values())
    if as_json:
        report = {
            "level": isolation.level if isolation and works else None,
            "isolation": dataclasses.asdict(isolation) if isolation else None,
            "refused": refused,
            "problem": problem,
        }
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        _print(isolation, refused, problem, works=works)
    sys.exit(0 if works else 4)


def _try_out() -> tuple[Isolation, dict[str, bool]]:
    with Sandbox(isolation="strict") as sandbox, sandbox.repl() as repl:
        refused = {}
        for attempt, code in ATTEMPTS.items():
            block = repl.execute(f"import os\n{code}")
            refused[attempt] = block.status == "error"
        return repl.isolation, refused


def _print(isolation: Isolation | None, refused: dict[str, bool], problem: str | None, *, works: bool) -> None:
    for layer in isolation.layers if isolation else ():
        click.echo(f"ok    {layer}")
    for attempt, held in refused.items():
        click.echo(f"{'ok   ' if held else 'FAIL '} a worker cannot {attempt}")
    if problem:
        click.echo(f"FAIL  {problem}")
    click.echo("isolation 'auto' is 'strict' here" if works else "isolation 'auto' cannot be had here")
