"""Settings of the server: its bounds, its keys and the folders it answers about."""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import RunLimits
from rlm_broker.values.validation import first_complaint

Right = Literal["run", "execute", "watch", "stop", "metrics"]
"""A right of a key: ask questions, run code, watch runs, stop runs of other keys, read `/metrics`.

A key may always watch and stop what it started itself. `watch` and `stop` hold for the runs of all keys.
"""
RIGHTS: frozenset[Right] = frozenset(get_args(Right))
DEFAULT_RIGHTS: tuple[Right, ...] = ("run", "execute")


def _variable(text: str) -> str:
    if re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*", text) is None:
        raise PydanticCustomError("variable", "must be env:NAME, with the name of the variable that holds the key")
    return text


class KeySettings(BaseModel):
    """A key of the server.

    Example:
        ```python
        KeySettings(key="env:TEAM_KEY", rights=("run",), usd_a_day=5)
        ```

    Attributes:
        key: Variable holding the key, as "env:NAME".
        rights: What the key may do.
        models: Names of models for its requests; None allows all. The model policy decides which models code may name.
        limits: Limits of each of its runs. A request may tighten them.
        usd_a_day: US dollars for its runs in one day (UTC); None sets no bound.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: Annotated[str, AfterValidator(_variable)]
    rights: tuple[Right, ...] = DEFAULT_RIGHTS
    models: tuple[str, ...] | None = None
    limits: RunLimits | None = None
    usd_a_day: PositiveFloat | None = None


class ServeSettings(BaseModel):
    """Settings of the server, the table `serve` of a settings file.

    Example:
        ```python
        keys = {"team": KeySettings(key="env:TEAM_KEY")}
        Service(RLM("offline"), ServeSettings(port=8080, keys=keys, max_runs=16))
        ```

    Attributes:
        host, port: Address it listens on. Beyond loopback it needs TLS or `behind_proxy`.
        hosts: Further names under which clients reach it, as their `Host` header has them.
        behind_proxy: Whether a proxy in front of it speaks TLS, so that it may listen beyond loopback without.
        certificate, private_key: PEM files for TLS, both or neither.
        keys: Name → key. Without any, one is made and printed.
        contexts: Name → folder or file of the server, the context of the model `MODEL@NAME`. Relative paths begin in
            the folder in which the server is started.
        max_runs: Runs at the same time, of all keys.
        max_queue: Runs in the queue for a place.
        drain_s: Seconds for runs to end after SIGTERM, before they are stopped with their best answers.
        keep_s: Seconds an ended run, its events and its answer are kept.
        tool_wait_s: Seconds a run waits for the result of a tool of the client.
        inline_chars: Characters of a lone text beyond which it is a context, with its task in it.
        body_bytes: Bytes of a request's body, other than an upload.
        stall_s: Seconds without a byte until a body is given up.
        heartbeat_s: Seconds of silence before a sign of life is sent to a waiting client. The first one for a
            plain answer of a run comes after four times as many, to let an early failure have its own status.
        file_bytes: Bytes of one uploaded file.
        files_bytes: Bytes of all uploaded files of one key, and of their texts while these are kept.
        max_files_per_key: Uploaded files of one key.
        max_executions: Programs and blocks in REPLs of their own at the same time, of all keys. Further ones wait, up
            to `max_queue`.
        container_idle_s: Seconds without use until a container is closed.
        max_containers, max_containers_per_key: Containers of all keys, and of one key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_words(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Raise `ConfigurationError` in place of pydantic's error."""
        try:
            return validate(given)
        except ValidationError as error:
            _, said = first_complaint(error, "serve", "setting", within="serve", known=cls.model_fields)
            raise ConfigurationError(said) from None

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8_700
    hosts: tuple[str, ...] = ()
    behind_proxy: bool = False
    certificate: str | None = None
    private_key: str | None = None
    keys: dict[str, KeySettings] = {}
    contexts: dict[Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=100)], str] = {}
    max_runs: PositiveInt = 64
    max_queue: Annotated[int, Field(ge=0)] = 1_000
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    keep_s: PositiveFloat = 3_600.0
    tool_wait_s: PositiveFloat = 600.0
    inline_chars: PositiveInt = 16_000
    body_bytes: Annotated[int, Field(ge=1 << 12)] = 64 << 20
    stall_s: PositiveFloat = 30.0
    heartbeat_s: PositiveFloat = 10.0
    file_bytes: PositiveInt = 4 << 30
    files_bytes: PositiveInt = 16 << 30
    max_files_per_key: PositiveInt = 1_000
    max_executions: PositiveInt = 64
    container_idle_s: PositiveFloat = 1_200.0
    max_containers: PositiveInt = 1_000
    max_containers_per_key: PositiveInt = 50
