"""Settings of the command line, strongest source first: flags, environment, project's file, user's file, defaults."""

import json
import os
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rlm_broker.broker.models.model import Model
from rlm_broker.broker.routing import ModelPolicy, Route
from rlm_broker.cli.parameters import FROM_ENVIRONMENT, MEANT
from rlm_broker.cli.settings import trust, user_files
from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits
from rlm_broker.run.prompts.instructions import Profile
from rlm_broker.values.host_files import refusal_told, replacement
from rlm_broker.values.text import printable
from rlm_broker.values.validation import suggestion
from sandbox_worker.wire.level import LevelName

PREFIX = "RLM_BROKER_"
"""Prefix of environment variables with settings, for example `RLM_BROKER_MODEL` and `RLM_BROKER_MAX_ITERATIONS`."""
NO_SETTINGS = ("RLM_BROKER_CONTROL", "RLM_BROKER_KEY")
"""Variables with that prefix that are no settings; see `watch.server`, and the option `--key env:RLM_BROKER_KEY`."""
PROJECT_FILE = "rlm-broker.toml"
"""Name of the project's file, in the current folder.

Limits are in its table `limits`, models in `models.NAME`, routes in `[[routes]]`, and all other settings at its top.
"""
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
    "cluster": None,
    "max_nodes": None,
    "resources": None,
    "tools": None,
    "output_type": None,
    "encoding": None,
    "strict_text": False,
    "model_policy": "allow",
    "recursion": "always",
    "prompt_profile": "both",
}
_VALUES: dict[str, tuple[str, ...]] = {
    "isolation": ("auto", *get_args(LevelName)),
    "model_policy": get_args(ModelPolicy),
    "recursion": ("always", "auto"),
    "prompt_profile": get_args(Profile),
}
"""Maps a setting with few allowed values to these values."""
YES_OR_NO = ("allow_exec", "strict_text")
"""Settings that are true or false."""
ROUTE_FIELDS = ("to", "match", "depths")
BUILT_IN = "default"
FLAGS = "command line"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and the name of its source for people."""

    value: Any
    source: str


class Settings:
    """All settings, each with the value in force.

    Args:
        flags: Name → value of the settings given on the command line.
        is_looked_at: Whether the settings are only shown. A project's file without trust is then accepted.
        file: File in place of the project's. It needs no trust, since the user has named it.

    Attributes:
        project: Content of the project's file, with a digest of the file of tools it names; None if there is no file.
        refusal: Reason why the project's file is not used, if the user has not trusted it, else None.
        limits: Limits that hold.
        risks: Settings of the project's file that need the user's trust; see `trust`.
        serve: Content of the tables `serve` of both files, for the server to check; the project's replaces the user's.
        models, routes: Models and routes of both files. A model of the project replaces the user's of the same name,
            and the project's routes come first.

    Raises:
        ConfigurationError: A setting does not exist or cannot have its value, a file is not valid TOML, or the
            project's file needs trust. The last is checked last, so that only a valid file is trusted.
    """

    def __init__(self, flags: Mapping[str, Any], *, is_looked_at: bool = False, file: Path | None = None) -> None:
        self._found: dict[str, Setting] = {}
        self.models: dict[str, Model] = {}
        self.routes: list[Route] = []
        self.serve: dict[str, Any] = {}
        self.project = _content(Path(PROJECT_FILE)) if file is None else user_files.content(file, "settings")
        own = PROJECT_FILE if file is None else str(file)
        files = _files(self.project, own)
        (_, users), (_, projects) = files
        self.risks = list(trust.risks(projects, users)) if file is None else []
        for source, document in files:
            self.serve |= _table(source, document.pop("serve", {}))
            self.models |= _models(source, document.pop("models", {}))
            self.routes[:0] = _routes(source, document.pop("routes", []))
        for source, values in (*files, ("environment", _environment()), (FLAGS, flags)):
            for name, value in values.items():
                where = printable(f"{PREFIX}{name.upper()}") if source == "environment" else source
                _require_known(name, where)
                _require_value(name, value, "" if source == FLAGS else f"{where}: ")
                if name == "tools" and source not in (FLAGS, own):
                    _require_own_place(value, where)
                self._found[name] = Setting(_is_true(value) if name in YES_OR_NO else value, where)
        self.limits = self._limits()
        if file is None and self.project is not None and (tools := projects.get("tools")):
            self.project = trust.with_tools(self.project, user_files.content(_path(tools), f"{PROJECT_FILE}: tools"))
        if file is None and self.project is not None:
            self.refusal = trust.refusal(Path(PROJECT_FILE), self.project, self.risks)
        else:
            self.refusal = None
        if self.refusal is not None and not is_looked_at:
            raise ConfigurationError(self.refusal)

    def __getitem__(self, name: str) -> Any:
        found = self._found.get(name)
        return DEFAULTS[name] if found is None else found.value

    def all(self) -> dict[str, Setting]:
        """Return every setting by name, with the value in force and its source. A key is not shown.

        The source of a value says so if it comes from a project's file that is not trusted.
        """
        told = {name: self._found.get(name, Setting(value, BUILT_IN)) for name, value in DEFAULTS.items()}
        key = told["api_key"]
        if key.value is not None and not str(key.value).startswith(FROM_ENVIRONMENT):
            told["api_key"] = Setting("(set)", key.source)
        for name, value in self.limits.to_dict().items():
            told[name] = Setting(value, self._found[name].source if name in self._found else BUILT_IN)
        if self.refusal is not None:
            unused = f"{PROJECT_FILE} (not trusted, not used)"
            projects = [name for name, found in told.items() if found.source == PROJECT_FILE]
            told |= {name: Setting(told[name].value, unused) for name in projects}
        return told

    def model(self, name: str) -> str | Model | None:
        """Return the model that the setting `model` or `sub_model` means.

        A name without an entry gets the settings `base_url` and `api_key`.

        Raises:
            ConfigurationError: There is an address or a key, and no name of a model.
        """
        given: str | None = self[name]
        base_url, api_key = self["base_url"], self["api_key"]
        if given is None or given in self.models or (base_url is None and api_key is None):
            return given
        if given == DEFAULTS["model"]:
            raise ConfigurationError(
                "name the model that the base_url or the api_key is for: the model offline calls no server"
            )
        return Model.from_dict({"name": given, "base_url": base_url, "api_key": api_key}, name)

    @property
    def names_model(self) -> bool:
        """Whether a model is named, by a flag, a variable or a file."""
        return "model" in self._found

    def path(self, name: str) -> Path | None:
        """Return the path in a setting, with `~` replaced by the user's home; None if it is not set."""
        return None if self[name] is None else _path(self[name])

    @property
    def packages(self) -> list[str] | None:
        """Packages that code can import, or None. The setting is text with spaces between packages."""
        given: str | None = self["packages"]
        return None if given is None else given.split()

    @property
    def max_nodes(self) -> int | None:
        """Nodes of the cluster at most, or None."""
        return None if self["max_nodes"] is None else int(self["max_nodes"])

    @property
    def resources(self) -> dict[str, float] | None:
        """Resources that each node of the cluster must have, or None. The setting is text, such as "rlm=1 gpu=0.5"."""
        given: str | None = self["resources"]
        return None if given is None else dict(_resource(each) for each in given.replace(",", " ").split())

    def _limits(self) -> Limits:
        given = {name: _plain(found.value) for name, found in self._found.items() if name in Limits.fields}
        sources = {name: self._found[name].source for name in given}
        told = {name: f" ({source})" for name, source in sources.items() if source != FLAGS}
        return Limits.from_dict(given, told)


def trust_project() -> list[str]:
    """Trust the project's file with its present content.

    Returns:
        The settings in it that needed trust.

    Raises:
        ConfigurationError: There is no such file, a setting in it is wrong, or the trust cannot be stored.
    """
    settings = Settings({}, is_looked_at=True)
    if settings.project is None:
        raise ConfigurationError(f"cannot trust {PROJECT_FILE}: there is no such file in this folder")
    trust.trust(Path(PROJECT_FILE), settings.project)
    return settings.risks


def set_default_model(name: str) -> Path:
    """Write `model = NAME` into the user's file of settings, and return its path. All else in the file stays.

    Raises:
        ConfigurationError: The file cannot be written, or has a form in which the line cannot be replaced.
    """
    path, content = _users_file()
    before = _parsed(path, content)
    line = f"model = {json.dumps(name, ensure_ascii=False)}"
    top, table, rest = re.match(r"(?s)(.*?)((?:^|\n)\s*\[|\Z)(.*)", (content or b"").decode()).groups()  # type: ignore[union-attr]
    replaced, number = re.subn(r"(?m)^model\s*=.*$", lambda _: line, top)
    written = f"{replaced}{table}{rest}" if number else f"{line}\n{top}{table}{rest}"
    if _parsed(path, written.encode()) != {**before, "model": name}:
        raise ConfigurationError(f"{path} cannot be changed safely: write {line} into it")
    with refusal_told(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path, 0o666) as file:
            file.write(written.encode())
    return path


def assigned(assignments: Iterable[str], **options: Any) -> dict[str, Any]:
    """Return the settings given on the command line: `NAME=VALUE` of `--limit` or `--set`, and options of their own.

    Args:
        assignments: Values of `--limit` and `--set`.
        options: Name → value of the other options; None if an option was not used.

    Raises:
        ConfigurationError: An assignment has another form, names no limit and no setting, or is given twice.
    """
    values = {name: value for name, value in options.items() if value is not None}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator or not name:
            raise ConfigurationError(f"--limit {assignment}: give NAME=VALUE, for example block_timeout_s=30")
        if name not in (*DEFAULTS, *Limits.fields):
            close = suggestion(name, [*Limits.fields, *DEFAULTS]) or "; `rlm-broker config show` lists all"
            if (meant := MEANT.get(name.replace("_", "-"))) is not None:
                close = f"; did you mean {meant}?"
            raise ConfigurationError(f"--limit {name}: there is no such limit or setting{close}")
        if name in values:
            raise ConfigurationError(f"--limit {name} is given twice: give it once")
        values[name] = value
    return values


def _files(project: bytes | None, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and the settings of the user's file and of the project's file, in this order."""
    path, content = _users_file()
    return [(str(path), _parsed(path, content)), (name, _parsed(Path(name), project))]


def _users_file() -> tuple[Path, bytes | None]:
    """Return the path of the user's file and its content, or None for a home that does not exist or cannot be entered.

    HOME may be another user's: after `su` without `-`, or in an image with `ENV HOME=/root` that runs as `--user 1000`.
    """
    if folder := os.environ.get("XDG_CONFIG_HOME"):
        path = Path(folder, "rlm-broker", "config.toml")
        return path, _content(path)
    path = Path("~/.config/rlm-broker/config.toml")
    try:
        path = path.expanduser()  # raises RuntimeError if HOME is not set and /etc/passwd lacks this user
        path.parent.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path, None
    except (RuntimeError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else "this user has no home"
        warnings.warn(f"no settings are read from {path}: {why}", stacklevel=2)
        return path, None
    return path, _content(path)


def _content(path: Path) -> bytes | None:
    with refusal_told(f"cannot read {path}"):
        try:
            path.stat()
        except FileNotFoundError:
            return None
    return user_files.content(path, "settings")


def _parsed(path: Path, content: bytes | None) -> dict[str, Any]:
    """Return a file's settings, with its limits among them."""
    try:
        document = tomllib.loads((content or b"").decode())
        repr(document)  # raises now for numbers and nesting that no error message could show
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path} is not valid: its lists or tables are nested too deeply") from None
    limits = document.pop("limits", {})
    if not isinstance(limits, dict):
        raise ConfigurationError(f"{path}: limits must be a table: write [limits], and names of limits below it")
    for name in limits:
        if name not in Limits.fields:
            raise ConfigurationError(
                f"{path}: limits.{printable(name)} is not a limit{suggestion(name, Limits.fields)}"
            )
    for name in document:
        if name in Limits.fields:
            raise ConfigurationError(f"{path}: {name} is a limit: write it below [limits]")
    _require_no_key(f"{path}: api_key", document.get("api_key"))
    return {**document, **limits}


def _table(source: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigurationError(f"{source}: serve must be a table: write [serve], and its settings below it")
    return table


def _models(source: str, tables: Any) -> dict[str, Model]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigurationError(f"{source}: models must be tables: write [models.NAME], and its fields below it")
    found = {}
    for name, table in tables.items():
        where = f"{source}: models.{printable(name)}"
        _require_no_key(f"{where}.api_key", table.get("api_key"))
        headers = table.get("headers")
        for header, value in headers.items() if isinstance(headers, dict) else ():
            _require_no_key(f"{where}.headers.{printable(header)}", value)
        found[name] = Model.from_dict({"name": name, **table}, where)
    return found


def _routes(source: str, tables: Any) -> list[Route]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{source}: routes must be a list of tables: write [[routes]], and `to` below it")
    found = []
    for number, table in enumerate(tables, 1):
        where = f"{source}: route {number}"
        for field, value in table.items():
            if field not in ROUTE_FIELDS:
                raise ConfigurationError(f"{where}: there is no {field!r}{suggestion(field, ROUTE_FIELDS)}")
            if not isinstance(value, str):
                raise ConfigurationError(f"{where}: {field} must be text, not {value!r}")
        if "to" not in table:
            raise ConfigurationError(f"{where}: `to` is missing: give the name of the model that it leads to")
        try:
            found.append(Route(**table))
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None
    return found


def _require_no_key(where: str, value: Any) -> None:
    if value is not None and not str(value).startswith(FROM_ENVIRONMENT):
        raise ConfigurationError(
            f"{where}: write 'env:NAME' with the variable that holds it: other people may read the file"
        )


def _environment() -> dict[str, str]:
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIX) and value and name not in NO_SETTINGS
    }


def _require_known(name: str, source: str) -> None:
    known = [*DEFAULTS, *Limits.fields]
    if name not in known:
        raise ConfigurationError(f"{source}: there is no setting {name!r}{suggestion(name, known)}")


def _require_value(name: str, value: Any, where: str) -> None:
    """Refuse the value of a setting other than a limit, if it is not text or not an allowed value."""
    if name in YES_OR_NO:
        if str(value).lower() not in ("true", "false"):
            raise ConfigurationError(f"{where}{name} = {value!r}: give true or false")
    elif name == "max_nodes":
        if not str(value).isdecimal() or not int(value):
            raise ConfigurationError(f"{where}{name} = {value!r}: give a number of nodes")
    elif name in DEFAULTS and not isinstance(value, str):
        raise ConfigurationError(f"{where}{name} = {value!r}: give text")
    if name in _VALUES and value not in _VALUES[name]:
        raise ConfigurationError(f"{where}no {name} {value!r}; choose one of: {', '.join(_VALUES[name])}")


def _resource(text: str) -> tuple[str, float]:
    """Return the name and the amount of a resource of Ray."""
    name, _, amount = text.partition("=")
    try:
        if name and float(amount) > 0:
            return name, float(amount)
    except ValueError:
        pass
    raise ConfigurationError(f"resources: {text}: give NAME=AMOUNT, for example rlm=1")


def _require_own_place(tools: str, where: str) -> None:
    """Refuse a relative path of a file of tools, since the command line runs that file.

    In each folder the path names another file, which another user may have written.
    """
    if not _path(tools).is_absolute():
        raise ConfigurationError(
            f"{where}: tools = {tools!r} names another file in each folder, and is run: give an absolute path"
        )


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{text}: {error}") from None


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _plain(value: Any) -> Any:
    """Return a value in the form of a limit: "none" becomes None, and "20,5" a list with a number for each depth."""
    if isinstance(value, str):
        if value.strip().lower() == "none":
            return None
        if "," in value:
            return [part.strip() for part in value.split(",")]
    return value
