"""Facts about a variable of model code: its name, its type and its size, each within bounds."""

from typing import Annotated

import msgspec

MAX_VARIABLES = 40
"""Maximum variables in the result of one block; the REPL leaves out further ones."""
MAX_VARIABLE_CHARS = 60
"""Maximum characters of a variable's name and of its type's name. A variable with a longer name is left out; a longer
type name is cut."""
MAX_DIMENSIONS = 8
"""Maximum dimensions of a shape. An array with more is reported without a size."""
Length = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Size = Length | Annotated[tuple[Length, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
"""Length of a value, or the shape of an array or a table."""
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_VARIABLE_CHARS)]


class VariableFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A variable of model code. The REPL reports it, so all fields are claims of model code, not facts."""

    name: ShortText
    type: ShortText
    size: Size | None = None
