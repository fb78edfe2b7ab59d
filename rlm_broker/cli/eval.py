"""`rlm-broker eval`: the line that asks `inspect_ai` whether an RLM is worth it for a model."""

import importlib.util
import shlex
from pathlib import Path

import click
from click.core import ParameterSource

from rlm_broker.cli.settings.settings import Settings, assigned
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.arms import arms_of
from rlm_broker.evaluation.questions import own
from rlm_broker.evaluation.tasks import TASKS, chars_of
from rlm_broker.values.validation import suggestion

OFFLINE = "offline"


def run(
    *,
    model: str | None,
    sub_model: str | None,
    tasks: str,
    length: str,
    samples: int | None,
    seed: int,
    data: str | None,
    arms: str,
) -> int:
    """Print the line, and what is missing to run it; return the exit code.

    Raises:
        ConfigurationError: No model is named, or an option or the file of questions cannot be used.
        click.UsageError: There are options of generated tasks beside the file of questions.
    """
    settings = Settings(assigned((), model=model, sub_model=sub_model))
    if settings["model"] == OFFLINE:
        raise ConfigurationError(f"{OFFLINE} is no model that inspect has: name one by --model, as openai/gpt-5-mini")
    given = [f"arm={','.join(arms_of(_listed(arms)))}"]
    if data is not None:
        _require_no_tasks()
        own(Path(data))
        named = ["own"]
        given.append(f"data={data}")
    else:
        named = _listed(tasks)
        if not named:
            raise ConfigurationError(f"there is no task: name some of {', '.join(TASKS)}")
        for name in (each for each in named if each not in TASKS):
            raise ConfigurationError(f"there is no task {name[:40]!r}{suggestion(name, TASKS)}")
        lengths = _listed(length)
        for each in lengths:
            chars_of(each)
        if not lengths:
            raise ConfigurationError("there is no length: give some, such as 8k,1m")
        given += [f"length={','.join(lengths)}", *([f"samples={samples}"] if samples else []), f"seed={seed}"]
    words = ["inspect", "eval", *(f"rlm_broker/{name}" for name in named)]
    words += [word for each in given for word in ("-T", each)]
    words += ["--model", settings["model"]]
    if settings["sub_model"] is not None:
        words += ["--model-role", f"sub={settings['sub_model']}"]
    say(shlex.join(words))
    if importlib.util.find_spec("inspect_ai") is None:
        say("rlm-broker eval: inspect_ai is not installed: pip install 'rlm-broker[eval]'", err=True)
    return 0


def _require_no_tasks() -> None:
    """Refuse options of generated tasks beside --data: they have no effect there.

    Raises:
        click.UsageError: There is one.
    """
    for name in ("tasks", "length", "samples", "seed"):
        if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} has no effect beside --data: leave it out.")


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]
