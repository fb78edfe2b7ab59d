"""Settings of the command line: flags, then the environment, the project's file, the user's file, our defaults."""

import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rlm_broker.errors import ConfigurationError
from rlm_broker.handler.routing import ModelPolicy, Route
from rlm_broker.limits import Limits
from rlm_broker.models.model import FROM_ENVIRONMENT, Model
from rlm_broker.prompts.instructions import Profile
from rlm_broker.sandbox.levels.level import CHOICES, no_such_level
from rlm_broker.settings import trust, user_files
from rlm_broker.validation import shown, suggestion

PREFIX = "RLM_BROKER_"
"""Of variables: `RLM_BROKER_MODEL`, `RLM_BROKER_MAX_ITERATIONS`."""
PROJECT_FILE = "rlm-broker.toml"
"""In the current folder. Limits are in its table `limits`, models in `models.NAME`, all else at its top."""
DEFAULTS: dict[str, Any] = {
    "model": "offline",
    "sub_model": None,
    "base_url": None,
    "api_key": None,
    "cache": None,
    "isolation": "auto",
    "python": None,
    "packages": None,
    "allow_exec": None,
    "tools": None,
    "output_type": None,
    "model_policy": "allow",
    "recursion": "always",
    "prompt_profile": "both",
}
_VALUES: dict[str, tuple[str, ...]] = {
    "model_policy": get_args(ModelPolicy),
    "recursion": ("always", "auto"),
    "prompt_profile": get_args(Profile),
}
"""Setting: the values that it may have, where these are few."""
ROUTE_FIELDS = ("to", "match", "depths")
BUILT_IN = "default"
FLAGS = "command line"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and where it came from."""

    value: Any
    source: str


class Settings:
    """Every setting, with the value that holds.

    Args:
        flags: Name → value of those that the command line gave.
        is_looked_at: Nothing is done with them: a project's file that its user has not trusted is not refused.

    Attributes:
        project: The content of the project's file, and what tells the file of tools that it names; None without one.
        refusal: Why the project's file is not used, if its user has not trusted it.
        limits: What the limits among them come to.
        risks: What in the project's file needs the user's word; see `trust`.
        models, routes: Of the files; a model of the project's replaces the user's of that name, and its routes come
            first.

    Raises:
        ConfigurationError: A name that there is not, a value that it cannot have, a file that is no TOML, or one of the
            project's that does what needs its user's word. That comes last: what is trusted should be right.
    """

    def __init__(self, flags: Mapping[str, Any], *, is_looked_at: bool = False) -> None:
        self._found: dict[str, Setting] = {}
        self.models: dict[str, Model] = {}
        self.routes: list[Route] = []
        self.project = _content(Path(PROJECT_FILE))
        files = _files(self.project)
        (_, users), (_, projects) = files
        self.risks = list(trust.risks(projects, users))
        for source, document in files:
            self.models |= _models(source, document.pop("models", {}))
            self.routes[:0] = _routes(source, document.pop("routes", []))
        for source, values in (*files, ("environment", _environment()), (FLAGS, flags)):
            for name, value in values.items():
                where = shown(f"{PREFIX}{name.upper()}") if source == "environment" else source
                _require_known(name, where)
                _require_value(name, value, "" if source == FLAGS else f"{where}: ")
                if name == "tools" and source not in (FLAGS, PROJECT_FILE):
                    _require_own_place(value, where)
                self._found[name] = Setting(_is_true(value) if name == "allow_exec" else value, where)
        self.limits = self._limits()
        if self.project is not None and (tools := projects.get("tools")):
            self.project = trust.with_tools(self.project, user_files.content(_path(tools), f"{PROJECT_FILE}: tools"))
        self.refusal = None if self.project is None else trust.refusal(Path(PROJECT_FILE), self.project, self.risks)
        if self.refusal is not None and not is_looked_at:
            raise ConfigurationError(self.refusal)

    def __getitem__(self, name: str) -> Any:
        found = self._found.get(name)
        return DEFAULTS[name] if found is None else found.value

    def all(self) -> dict[str, Setting]:
        """Every setting by name: the value that holds, and where it came from. What is not trusted says so there."""
        told = {name: self._found.get(name, Setting(value, BUILT_IN)) for name, value in DEFAULTS.items()}
        key = told["api_key"]
        if key.value is not None and not str(key.value).startswith(FROM_ENVIRONMENT):
            told["api_key"] = Setting("(set)", key.source)
        for name, value in self.limits.model_dump().items():
            told[name] = Setting(value, self._found[name].source if name in self._found else BUILT_IN)
        if self.refusal is not None:
            unused = f"{PROJECT_FILE} (not trusted, not used)"
            projects = [name for name, found in told.items() if found.source == PROJECT_FILE]
            told |= {name: Setting(told[name].value, unused) for name in projects}
        return told

    def model(self, name: str) -> str | Model | None:
        """What `model` or `sub_model` comes to, with the settings `base_url` and `api_key` for a name of no entry.

        Raises:
            ConfigurationError: There is an address, and no name of a model there.
        """
        given: str | None = self[name]
        base_url, api_key = self["base_url"], self["api_key"]
        if given is None or given in self.models or (base_url is None and api_key is None):
            return given
        if given == DEFAULTS["model"]:
            raise ConfigurationError(
                "name the model that the base_url or the api_key is for: the model offline calls no server"
            )
        return Model.model_validate({"name": given, "base_url": base_url, "api_key": api_key}, context=name)

    def path(self, name: str) -> Path | None:
        """Return the file or folder that a setting names, with `~` as the user's home; None if it names none."""
        return None if self[name] is None else _path(self[name])

    @property
    def packages(self) -> list[str] | None:
        """What code is to have, as a list: the setting is text, with spaces between packages."""
        given: str | None = self["packages"]
        return None if given is None else given.split()

    def _limits(self) -> Limits:
        given = {name: _plain(found.value) for name, found in self._found.items() if name in Limits.model_fields}
        sources = {name: self._found[name].source for name in given}
        told = {name: f" ({source})" for name, source in sources.items() if source != FLAGS}
        return Limits.model_validate(given, context=told)


def trust_project() -> list[str]:
    """Take the project's file, as it is now, for the user's own.

    Returns:
        What in it needed that.

    Raises:
        ConfigurationError: There is no such file, something in it is wrong, or that cannot be noted.
    """
    settings = Settings({}, is_looked_at=True)
    if settings.project is None:
        raise ConfigurationError(f"cannot trust {PROJECT_FILE}: there is no such file in this folder")
    trust.trust(Path(PROJECT_FILE), settings.project)
    return settings.risks


def assigned(assignments: Iterable[str], **options: Any) -> dict[str, Any]:
    """What the command line gave: `NAME=VALUE`s of `--limit`, and options of their own that were used.

    Raises:
        ConfigurationError: One is of another form, or given twice.
    """
    values = {name: value for name, value in options.items() if value is not None}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigurationError(f"--limit {assignment}: give NAME=VALUE, for example block_timeout_s=30")
        if name not in Limits.model_fields:
            raise ConfigurationError(f"--limit {name}: there is no such limit{suggestion(name, Limits.model_fields)}")
        if name in values:
            raise ConfigurationError(f"--limit {name}: it is given twice")
        values[name] = value
    return values


def _files(project: bytes | None) -> list[tuple[str, dict[str, Any]]]:
    """The user's file, then the project's."""
    path, content = _users_file()
    return [(str(path), _parsed(path, content)), (PROJECT_FILE, _parsed(Path(PROJECT_FILE), project))]


def _users_file() -> tuple[Path, bytes | None]:
    """The user's file, and what it holds. A home that does not exist or may not be entered has none.

    HOME is another user's after `su` without `-`, and in an image with `ENV HOME=/root` that runs as `--user 1000`.
    """
    if folder := os.environ.get("XDG_CONFIG_HOME"):
        path = Path(folder, "rlm-broker", "config.toml")
        return path, _content(path)
    path = Path("~/.config/rlm-broker/config.toml")
    try:
        path = path.expanduser()  # RuntimeError: no HOME, and no entry for this user in /etc/passwd
        path.parent.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path, None
    except (RuntimeError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else "this user has no home"
        warnings.warn(f"no settings are read from {path}: {why}", stacklevel=2)
        return path, None
    return path, _content(path)


def _content(path: Path) -> bytes | None:
    try:
        path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    return user_files.content(path, "settings")


def _parsed(path: Path, content: bytes | None) -> dict[str, Any]:
    """A file's settings, limits among them."""
    try:
        document = tomllib.loads((content or b"").decode())
        repr(document)  # what has too many digits or levels for a sentence is refused here
    except ValueError as error:
        raise ConfigurationError(f"{path} is no TOML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path} is no TOML of settings: its lists or tables are nested too deeply") from None
    limits = document.pop("limits", {})
    if not isinstance(limits, dict):
        raise ConfigurationError(f"{path}: limits is a table: write [limits] and its names below")
    for name in limits:
        if name not in Limits.model_fields:
            raise ConfigurationError(f"{path}: limits.{shown(name)} is no limit{suggestion(name, Limits.model_fields)}")
    for name in document:
        if name in Limits.model_fields:
            raise ConfigurationError(f"{path}: {name} is a limit: write it below [limits]")
    _require_no_key(f"{path}: api_key", document.get("api_key"))
    return {**document, **limits}


def _models(source: str, tables: Any) -> dict[str, Model]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigurationError(f"{source}: models are tables: write [models.NAME] and what it is below")
    found = {}
    for name, table in tables.items():
        where = f"{source}: models.{shown(name)}"
        _require_no_key(f"{where}.api_key", table.get("api_key"))
        headers = table.get("headers")
        for header, value in headers.items() if isinstance(headers, dict) else ():
            _require_no_key(f"{where}.headers.{shown(header)}", value)
        found[name] = Model.model_validate({"name": name, **table}, context=where)
    return found


def _routes(source: str, tables: Any) -> list[Route]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{source}: routes are a list of tables: write [[routes]] and `to` below")
    found = []
    for number, table in enumerate(tables, 1):
        where = f"{source}: route {number}"
        for field, value in table.items():
            if field not in ROUTE_FIELDS:
                raise ConfigurationError(f"{where}: there is no {field!r}{suggestion(field, ROUTE_FIELDS)}")
            if not isinstance(value, str):
                raise ConfigurationError(f"{where}: {field} is text, and not {value!r}")
        if "to" not in table:
            raise ConfigurationError(f"{where}: it needs `to`, the model that it leads to")
        try:
            found.append(Route(**table))
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None
    return found


def _require_no_key(where: str, value: Any) -> None:
    if value is not None and not str(value).startswith(FROM_ENVIRONMENT):
        raise ConfigurationError(f"{where}: write 'env:NAME' of the variable that has it: files are read by many")


def _environment() -> dict[str, str]:
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIX) and value
    }


def _require_known(name: str, source: str) -> None:
    known = [*DEFAULTS, *Limits.model_fields]
    if name not in known:
        raise ConfigurationError(f"{source}: there is no setting {name!r}{suggestion(name, known)}")


def _require_value(name: str, value: Any, where: str) -> None:
    """Refuse a setting, one that is no limit, if it is not text or not one of its few values."""
    if name == "allow_exec":
        if str(value).lower() not in ("true", "false"):
            raise ConfigurationError(f"{where}{name} = {value!r}: give true or false")
    elif name in DEFAULTS and not isinstance(value, str):
        raise ConfigurationError(f"{where}{name} = {value!r}: give text")
    if name == "isolation" and value not in CHOICES:
        raise ConfigurationError(where + no_such_level(value))
    if name in _VALUES and value not in _VALUES[name]:
        raise ConfigurationError(f"{where}no {name} {value!r}; choose one of: {', '.join(_VALUES[name])}")


def _require_own_place(tools: str, where: str) -> None:
    """Refuse a file of tools that would be another one in each folder: it is run, and may be somebody else's there."""
    if not _path(tools).is_absolute():
        raise ConfigurationError(
            f"{where}: tools = {tools!r} names another file in each folder, and runs it: give a whole path"
        )


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{text}: {error}") from None


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _plain(value: Any) -> Any:
    """As a limit takes it: "none" is no bound, "20,5" a number for each depth."""
    if isinstance(value, str):
        if value.strip().lower() == "none":
            return None
        if "," in value:
            return [part.strip() for part in value.split(",")]
    return value
