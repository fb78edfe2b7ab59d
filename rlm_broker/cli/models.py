"""`rlm-broker models`: models, routes, keys and servers. With a NAME, the model that would serve a call, and why.

`rlm-broker models default NAME` writes the model that commands take when none is named into the user's file.
"""

import asyncio
import json
from typing import Any

from rlm_broker.broker.clients.base import BaseClient
from rlm_broker.broker.clients.litellm import LiteLLMClient
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.broker.clients.providers import providers_here
from rlm_broker.broker.models.model import Model
from rlm_broker.broker.models.models import Models
from rlm_broker.broker.models.registry import Registry
from rlm_broker.cli.settings.settings import DEFAULTS, Settings, assigned, set_default_model
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.run.lm_handler import LMHandler

MODELS = {"openai": "gpt-5-mini", "anthropic": "claude-sonnet-4-5"}
"""Provider → the model that is named as an example."""
MOST_NAMED = 5
"""Models of a server on this machine that are listed."""


def run(
    *,
    name: str | None,
    value: str | None,
    depth: int,
    assignments: tuple[str, ...],
    as_json: bool,
    **flags: str | None,
) -> None:
    """Print models, routes, servers and keys; or the model that would serve a call by `name`; or set the default."""
    if value is not None:
        if name != "default":
            raise ConfigurationError(f"give one name, or `models default {value}` to have that model by default")
        _set_default(value)
        return
    settings = Settings(assigned(assignments, **flags))
    if name == "default" and name not in settings.models:
        value, source = settings.all()["model"].value, settings.all()["model"].source
        say(json.dumps({"model": value, "source": source}) if as_json else f"{value}  ({source})")
        return
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
    here = asyncio.run(providers_here())
    if as_json:
        providers = LiteLLMClient.providers_with_keys()
        found = {"models": entries, "routes": routes, "server": server, "providers": providers}
        found["names"] = {each.name: {"missing": each.missing, "models": each.models} for each in here}
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
    say("names of models begin with:")
    for each in here:
        more = ", ..." if len(each.models) > MOST_NAMED else ""
        has = f"has {', '.join(each.models[:MOST_NAMED])}{more}" if each.models else f"{each.has} is set"
        say(f"  {each.name + '/':13}{each.missing or has}")
    litellm = ", which is installed" if LiteLLMClient.is_installed() else ": pip install 'rlm-broker[litellm]'"
    say(f"  {'others':13}anthropic/, azure/, bedrock/ and many more need litellm{litellm}")


def say_stand_in(command: str, settings: Settings) -> None:
    """Print that the model offline answers, if it does; and if no model was named, how a real one is named here."""
    if settings["model"] != DEFAULTS["model"]:
        return
    note = "a demonstration by the stand-in offline, which searches and counts, and does not reason"
    if not settings.names_model:
        note = f"no model is named, so this is {note}; {_advice()}"
    say(f"rlm-broker {command}: {note}", err=True)


def _advice() -> str:
    """Return how a real model is named here, by what is found: a server on this machine, or a key."""
    found = [each for each in asyncio.run(providers_here()) if each.missing is None]
    keys = LiteLLMClient.providers_with_keys()
    for name, has, models in (
        *((each.name, each.has, each.models) for each in found if each.models),
        *((name, keys[name], [model]) for name, model in MODELS.items() if name in keys),
        *((each.name, each.has, ["NAME"]) for each in found if not each.models),
    ):
        return f"found {has}: --model {name}/{models[0]}"
    return "found no key and no model server: `rlm-broker models` lists what --model takes"


def _set_default(name: str) -> None:
    """Write a model into the user's file, after a look at its name.

    Raises:
        ConfigurationError: It is not the name of a model.
    """
    if not name.strip():
        raise ConfigurationError("the name of the model is empty: name one, such as openai/gpt-5-mini")
    settings = Settings({}, is_looked_at=True)
    try:
        Registry(name, None, Models(settings.models, settings.routes, settings["model_policy"]), LMHandler)
    except UnknownModel:
        raise
    except ConfigurationError as error:
        say(f"warning: {error}", err=True)
    say(f"{set_default_model(name)}: model = {name}")


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
