"""`rlm-broker models [NAME]`: the models there are, and which of them would serve a call, and why."""

import json
from typing import TYPE_CHECKING, Any

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.terminal import say

if TYPE_CHECKING:
    from rlm_broker.clients.base import BaseClient
    from rlm_broker.settings.settings import Settings


@click.command("models", epilog="exit codes: 0 shown, 2 a setting is wrong, or code may not ask for that model")
@click.argument("name", required=False)
@click.option("--depth", type=click.IntRange(0), default=1, help="Of the call: 0 a root's own, 1 (default) its REPL's.")
@click.option("--model", metavar="NAME", help="As it would be given to ask.")
@click.option("--sub-model", metavar="NAME", help="As it would be given to ask.")
@click.option("--base-url", metavar="URL", help="As it would be given to ask.")
@click.option("--model-policy", metavar="NAME", help="As it would be given to ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(name: str | None, depth: int, as_json: bool, **flags: Any) -> None:
    """Show the models and routes that hold here. With a NAME, which model would serve code that asks for it."""
    with failures("models", as_json=as_json):
        from rlm_broker.models.models import Models
        from rlm_broker.models.registry import Registry
        from rlm_broker.settings.settings import Settings, assigned  # what --help need not pay for

        settings = Settings(assigned((), **flags))
        models = Registry(
            settings.model("model"),
            settings.model("sub_model"),
            Models(settings.models, settings.routes, settings["model_policy"]),
            lists=True,
        )
        routing = models.handler(settings.limits).routing
        if name is not None:
            client, why = routing.explain(name, depth)
            shown = {"model": client.model_name, "why": why}
            say(json.dumps(shown, ensure_ascii=False) if as_json else f"{client.model_name}: {why}")
            return
        entries = [_entry("root", models.root, settings), _entry("sub", models.sub or models.root, settings)]
        entries += [_entry(entry, client, settings) for entry, client in models.named.items()]
        routes = [{"match": each.match, "depths": each.depths, "to": each.to} for each in settings.routes]
        if as_json:
            say(json.dumps({"models": entries, "routes": routes}, ensure_ascii=False))
            return
        width = max(len(entry["name"]) for entry in entries)
        for entry in entries:
            say(f"{entry['name']:{width}}  {entry['model']}{_details(entry)}")
        for route in settings.routes:
            say(str(route))


def _entry(name: str, client: "BaseClient", settings: "Settings") -> dict[str, Any]:
    """What is worth knowing of a model. (Its key and its headers are in no dump.)"""
    model = settings.models.get(name)
    rows: dict[str, Any] = {"name": name, "model": client.model_name}
    if (why := client.why_unusable) is not None:
        rows["problem"] = str(why)
    if model is not None:
        rows |= model.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
    elif settings["base_url"] is not None:
        rows["base_url"] = settings["base_url"]
    return rows


def _details(entry: dict[str, Any]) -> str:
    told = [f"{name} {value}" for name, value in entry.items() if name not in ("name", "model")]
    return f"  ({', '.join(told)})" if told else ""
