"""`--limit NAME=VALUE` and its like: from the command line to `Limits`."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits


def limits_from(assignments: Iterable[str], **named: Any) -> Limits:
    """The limits that the command line gives; what it does not name keeps its default.

    Raises:
        ConfigurationError: No such limit, or a value that it cannot have.
    """
    values: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigurationError(f"--limit {assignment}: give NAME=VALUE, for example block_timeout_s=30")
        if name not in Limits.model_fields:
            close = difflib.get_close_matches(name, Limits.model_fields, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(Limits.model_fields)}"
            raise ConfigurationError(f"--limit {name}: there is no such limit{hint}")
        values[name] = None if value.lower() == "none" else value
    try:
        return Limits.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigurationError(f"limit {first['loc'][0]} = {first['input']}: {first['msg'].lower()}") from None
