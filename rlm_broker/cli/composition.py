"""The composition of an `RLM` out of settings, for all commands that answer questions."""

from pathlib import Path
from typing import Any

from rlm_broker.models.models import Models
from rlm_broker.rlm import RLM
from rlm_broker.settings.settings import Settings
from rlm_broker.settings.user_files import tools_of


def models_of(settings: Settings, record: Path | None = None) -> Models:
    """Return the models of the settings, with their routes, their policy and the cache.

    Args:
        settings: All settings.
        record: New file for all calls of models, or None.
    """
    policy = settings["model_policy"]
    return Models(settings.models, settings.routes, policy, cache=settings.path("cache"), record=record)


def rlm_of(settings: Settings, **more: Any) -> RLM:
    """Return an `RLM`, not open yet, that has what the settings say.

    Args:
        settings: All settings. The setting `output_type` is that of a question, and not used here.
        more: Further arguments of `RLM`; they replace those of the settings. A recording in `models` brings its models.

    Raises:
        ConfigurationError: A setting cannot be used.
    """
    models: Models = more.pop("models", None) or models_of(settings)
    is_replay = models.replay is not None
    tools = settings.path("tools")
    given: dict[str, Any] = {
        "model": None if is_replay else settings.model("model"),
        "sub_model": None if is_replay else settings.model("sub_model"),
        "models": models,
        "limits": settings.limits,
        "tools": None if tools is None else tools_of(tools),
        "prompt_profile": settings["prompt_profile"],
        "recursion": settings["recursion"],
        "sandbox": settings["isolation"],
        "allow_exec": settings["allow_exec"],
        "python": settings["python"],
        "packages": settings.packages,
    }
    return RLM(**(given | more))
