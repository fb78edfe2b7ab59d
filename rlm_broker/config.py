"""Settings of the command line: flags, then the environment, the project's file, the user's file, our defaults."""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlm_broker import trust
from rlm_broker.complaints import complaints
from rlm_broker.errors import ConfigurationError
from rlm_broker.handler.routing import Route
from rlm_broker.limits import Limits
from rlm_broker.models import FROM_ENVIRONMENT, Model

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
}
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

    Attributes:
        limits: What the limits among them come to.
        models, routes: Of the files; a model of the project's replaces the user's of that name, and its routes come
            first.

    Raises:
        ConfigurationError: A name that there is not, a value that it cannot have, a file that is no TOML, or one of the
            project's that does what needs its user's word.
    """

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self._found: dict[str, Setting] = {}
        self.models: dict[str, Model] = {}
        self.routes: list[Route] = []
        files = _files()
        for source, document in files:
            self.models |= _models(source, document.pop("models", {}))
            self.routes[:0] = _routes(source, document.pop("routes", []))
        for source, values in (*files, ("environment", _environment()), (FLAGS, flags)):
            for name, value in values.items():
                where = f"{PREFIX}{name.upper()}" if source == "environment" else source
                _require_known(name, where)
                self._found[name] = Setting(value, where)
        self.limits = self._limits()

    def __getitem__(self, name: str) -> Any:
        found = self._found.get(name)
        return DEFAULTS[name] if found is None else found.value

    def all(self) -> dict[str, Setting]:
        """Every setting by name: the value that holds, and where it came from."""
        shown = {name: self._found.get(name, Setting(value, BUILT_IN)) for name, value in DEFAULTS.items()}
        key = shown["api_key"]
        if key.value is not None and not str(key.value).startswith(FROM_ENVIRONMENT):
            shown["api_key"] = Setting("(set)", key.source)
        for name, value in self.limits.model_dump().items():
            shown[name] = Setting(value, self._found[name].source if name in self._found else BUILT_IN)
        return shown

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
        try:
            return Model(name=given, base_url=base_url, api_key=api_key)
        except ValidationError as error:
            raise ConfigurationError(f"{name}: {complaints(error, 'settings')}") from None

    def _limits(self) -> Limits:
        given = {name: _plain(found.value) for name, found in self._found.items() if name in Limits.model_fields}
        try:
            return Limits.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else ", ".join(given)
            source = self._found[name].source if name in self._found else BUILT_IN
            where = "" if source == FLAGS else f" ({source})"
            raise ConfigurationError(f"limit {name} = {first['input']}{where}: {first['msg'].lower()}") from None


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
            raise ConfigurationError(f"--limit {name}: there is no such limit{_suggestion(name, Limits.model_fields)}")
        if name in values:
            raise ConfigurationError(f"--limit {name}: it is given twice")
        values[name] = value
    return values


def _files() -> list[tuple[str, dict[str, Any]]]:
    """The user's file, then the project's."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = home / "rlm-broker" / "config.toml"
    users = _read(path)
    return [(str(path), users), (PROJECT_FILE, _read(Path(PROJECT_FILE), users))]


def _read(path: Path, users: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A file's settings, limits among them. With those of the user's it is the project's, and may need his word."""
    try:
        content = path.read_bytes()
        document = tomllib.loads(content.decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no TOML: {error}") from None
    if users is not None:
        trust.require(path, content, document, users)
    limits = document.pop("limits", {})
    if not isinstance(limits, dict):
        raise ConfigurationError(f"{path}: limits is a table: write [limits] and its names below")
    for name in limits:
        if name not in Limits.model_fields:
            raise ConfigurationError(f"{path}: limits.{name} is no limit{_suggestion(name, Limits.model_fields)}")
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
        where = f"{source}: models.{name}"
        _require_no_key(f"{where}.api_key", table.get("api_key"))
        headers = table.get("headers")
        for header, value in headers.items() if isinstance(headers, dict) else ():
            _require_no_key(f"{where}.headers.{header}", value)
        for field in table:
            if field not in Model.model_fields:
                raise ConfigurationError(f"{where}: there is no {field!r}{_suggestion(field, Model.model_fields)}")
        try:
            found[name] = Model.model_validate({"name": name, **table})
        except ValidationError as error:
            raise ConfigurationError(f"{where}: {complaints(error, 'it')}") from None
    return found


def _routes(source: str, tables: Any) -> list[Route]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{source}: routes are a list of tables: write [[routes]] and `to` below")
    found = []
    for number, table in enumerate(tables, 1):
        where = f"{source}: route {number}"
        for field, value in table.items():
            if field not in ROUTE_FIELDS:
                raise ConfigurationError(f"{where}: there is no {field!r}{_suggestion(field, ROUTE_FIELDS)}")
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
        raise ConfigurationError(f"{source}: there is no setting {name!r}{_suggestion(name, known)}")


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known := list(known), 1)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(known)}"


def _plain(value: Any) -> Any:
    """As a limit takes it: "none" is no bound, "20,5" a number for each depth."""
    if isinstance(value, str):
        if value.strip().lower() == "none":
            return None
        if "," in value:
            return [part.strip() for part in value.split(",")]
    return value
