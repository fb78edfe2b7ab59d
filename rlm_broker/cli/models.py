"""`rlm-broker models [NAME]`: models, routes and keys; with a NAME, the model that would serve a call, and why."""

import asyncio
import json
from typing import Any

from rlm_broker.broker.clients.base import BaseClient
from rlm_broker.broker.clients.litellm import LiteLLMClient
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.broker.models.model import Model
from rlm_broker.broker.models.models import Models
from rlm_broker.broker.models.registry import Registry
from rlm_broker.cli.settings.settings import DEFAULTS, Settings, assigned
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ModelFailed
from rlm_broker.run.lm_handler import LMHandler


def run(*, name: str | None, depth: int, as_json: bool, **flags: Any) -> None:
    """Print models, routes, a server's models and keys; or the model that would serve a call by `name`."""
    settings = Settings(assigned((), **flags))
    is_named = settings["model"] != DEFAULTS["model"]
    models = Registry(
        settings.model("model") if is_named else None,
        settings.model("sub_model"),
        Models(settings.models, settings.routes, settings["model_policy"]),
        LMHandler,
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
    server = None if settings["base_url"] is None else _server(settings)
    providers = LiteLLMClient.providers_with_keys()
    if as_json:
        found = {"models": entries, "routes": routes, "server": server, "providers": providers}
        say(json.dumps(found, ensure_ascii=False))
        return
    width = max(len(entry["name"]) for entry in entries)
    for entry in entries:
        say(f"{entry['name']:{width}}  {entry['model']}{_details(entry)}")
    for route in settings.routes:
        say(str(route))
    if server is not None:
        has = server.get("problem") or f"it has: {', '.join(server['models']) or 'no list of models'}"
        say(f"server {server['base_url']}: {has}")
    named = ", ".join(f"{provider} ({variable})" for provider, variable in providers.items())
    say(f"providers whose key is set: {named or 'none'}")


def _server(settings: Settings) -> dict[str, Any]:
    """Return the address of the server in the settings, and the models it lists or the problem with it."""
    base_url = settings["base_url"]
    client = Model.from_dict({"name": "any", "base_url": base_url, "api_key": settings["api_key"]}).client()
    assert isinstance(client, OpenAICompatibleClient)

    async def listed() -> list[str]:
        try:
            return await client.models()
        finally:
            await client.aclose()

    try:
        return {"base_url": base_url, "models": asyncio.run(listed())}
    except ModelFailed as failed:
        return {"base_url": base_url, "models": [], "problem": str(failed).removeprefix("any: ")}


def _entry(name: str, client: BaseClient, settings: Settings) -> dict[str, Any]:
    """Return what is worth knowing of a model. Its key and its headers are not among it: no dump has them."""
    model = settings.models.get(name)
    rows: dict[str, Any] = {"name": name, "model": client.model_name}
    if (why := client.why_unusable) is not None:
        rows["problem"] = str(why)
    if model is not None:
        rows |= {
            field: value for field, value in model.to_dict().items() if field != "name" and value != Model.fields[field]
        }
    elif settings["base_url"] is not None and client.model_name != "offline":
        rows["base_url"] = settings["base_url"]
    return rows


def _details(entry: dict[str, Any]) -> str:
    told = [f"{name} {value}" for name, value in entry.items() if name not in ("name", "model")]
    return f"  ({', '.join(told)})" if told else ""
