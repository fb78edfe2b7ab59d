"""The composition of an `RLM` out of settings, for all commands that answer questions."""

import importlib
from pathlib import Path
from typing import Any, cast

from rlm_broker.broker.models.models import Models
from rlm_broker.cli.settings.settings import FLAGS, Settings
from rlm_broker.cli.settings.user_files import tools_of
from rlm_broker.errors import ConfigurationError
from rlm_broker.events.event import Emit
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers.levels import IsolationName
from rlm_broker.values.extras import require_extra


def models_of(settings: Settings, record: Path | None = None) -> Models:
    """Return the models of the settings, with their routes, their policy and the cache.

    Args:
        settings: All settings.
        record: New file for all calls of models, or None.
    """
    policy = settings["model_policy"]
    return Models(settings.models, settings.routes, policy, cache=settings.path("cache"), record=record)


def sandbox_of(settings: Settings) -> Sandbox | IsolationName:
    """Return the sandbox of the settings, not open yet; or the name of its level, where that says all of it.

    Raises:
        ConfigurationError: Packages for a cluster are missing, or an option is for a cluster, and none is named.
    """
    level: IsolationName = settings["isolation"]
    packages = settings.packages
    allow_exec, python = settings["allow_exec"], settings["python"]
    if settings["cluster"] is not None:
        with require_extra("ray", "the setting cluster"):
            cluster: Any = importlib.import_module("rlm_broker.nodes.ray_cluster").RayCluster
        of_ray = {"resources": settings.resources, "max_nodes": settings.max_nodes}
        kind = {"isolation": level, "allow_exec": allow_exec, "python": python, "packages": packages}
        return cast("Sandbox", cluster(settings["cluster"], **kind, **of_ray))
    given = settings.all()
    for name in ("max_nodes", "resources"):  # a file may have them for the calls that name a cluster
        if given[name].source == FLAGS:
            raise ConfigurationError(
                f"--set {name} has no effect without a cluster: give --set cluster=auto, too, or leave it out"
            )
    if allow_exec is None and python is None and packages is None:
        return level
    return Sandbox(isolation=level, allow_exec=allow_exec, python=python, packages=packages)


def rlm_of(
    settings: Settings,
    *,
    models: Models | None = None,
    system_prompt: str | None = None,
    limits: Limits | None = None,
    on_event: Emit | None = None,
) -> RLM:
    """Return an `RLM` made from the settings, not open yet.

    Args:
        settings: All settings. The setting `output_type` is a question's, and not used here.
        models: Models in place of the settings'. A recording among them brings its models.
        system_prompt: System prompt in place of the built-in one.
        limits: Limits in place of the settings'.
        on_event: Called with each event.

    Raises:
        ConfigurationError: A setting cannot be used.
    """
    models = models or models_of(settings)
    named = () if models.replay is not None else (settings.model("model"), settings.model("sub_model"))
    tools = settings.path("tools")
    return RLM(
        *named,
        models=models,
        limits=limits or settings.limits,
        tools=None if tools is None else tools_of(tools),
        instructions=Instructions(system_prompt, settings["prompt_profile"]),
        recursion=settings["recursion"],
        on_event=on_event,
        sandbox=sandbox_of(settings),
    )
