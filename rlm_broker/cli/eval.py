"""`rlm-broker eval`: the line that asks `inspect_ai` whether an RLM is worth it for a model."""

import importlib.util
import shlex
from pathlib import Path

from rlm_broker.cli.settings.settings import Settings, assigned
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.arms import arms_of
from rlm_broker.evaluation.questions import own
from rlm_broker.evaluation.tasks import TASKS, chars_of
from rlm_broker.values.validation import did_you_mean

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
    """
    settings = Settings(assigned((), model=model, sub_model=sub_model))
    if settings["model"] == OFFLINE:
        raise ConfigurationError(f"{OFFLINE} is no model that inspect has: name one by --model, as openai/gpt-5-mini")
    given = [f"arm={','.join(arms_of(_listed(arms)))}"]
    if data is not None:
        own(Path(data))
        named = ["own"]
        given.append(f"data={data}")
    else:
        named = _listed(tasks)
        for name in (each for each in named if each not in TASKS):
            raise ConfigurationError(f"there is no task {name[:40]!r}{did_you_mean(name, TASKS)}")
        lengths = _listed(length)
        for each in lengths:
            chars_of(each)
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


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]
