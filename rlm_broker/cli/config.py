"""`rlm-broker config show`: every setting, its value, and where that came from."""

import json
from pathlib import Path

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.terminal import say


@click.group("config")
def command() -> None:
    """Settings: flags, then RLM_BROKER_*, ./rlm-broker.toml, and ~/.config/rlm-broker/config.toml."""


@command.command("trust", epilog="exit codes: 0 trusted, 2 there is no such file, or it is wrong")
def trust_project() -> None:
    """Take ./rlm-broker.toml, as it is now, for your own: it may then name servers, tools.py files that run
    in this process, and isolation 'process'."""
    with failures("config", as_json=False):
        from rlm_broker.settings.settings import PROJECT_FILE, trust_project  # what --help need not pay for

        risks = trust_project()
        needed = f"which sets {', '.join(risks)}" if risks else "which sets nothing that needs it"
        say(f"trusted {Path(PROJECT_FILE).resolve()}, {needed}")


@command.command("show", epilog="exit codes: 0 shown, 2 a setting is wrong")
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="As it would be given to ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(assignments: tuple[str, ...], as_json: bool) -> None:
    """Print each setting with the value that holds, and where it came from."""
    with failures("config", as_json=as_json):
        from rlm_broker.settings.settings import Settings, assigned  # what --help need not pay for

        found = Settings(assigned(assignments), is_looked_at=True)
        settings = found.all()
        if found.refusal is not None:
            say(f"warning: {found.refusal}", err=True)
        if as_json:
            shown = {name: {"value": each.value, "source": each.source} for name, each in settings.items()}
            say(json.dumps(shown, ensure_ascii=False))
            return
        width = max(map(len, settings))
        for name, setting in settings.items():
            say(f"{name:{width}}  {setting.value!s:>12}  {setting.source}")
