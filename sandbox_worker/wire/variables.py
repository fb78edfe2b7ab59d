"""What is told of a variable: its name, its type and its size, each within bounds."""

from typing import Annotated

import msgspec

MAX_VARIABLES = 40
"""Variables that are told of one block; the rest of more is left out."""
MAX_VARIABLE_CHARS = 60
"""Characters of the name of a variable, which is left out if it has more, and of that of its type, which is cut."""
MAX_DIMENSIONS = 8
"""Numbers of a shape. An array with more has no size."""
Length = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Size = Length | Annotated[tuple[Length, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
"""A length; or the shape of an array or a table."""
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_VARIABLE_CHARS)]


class VariableFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A variable of model code's, by its own word."""

    name: ShortText
    type: ShortText
    size: Size | None = None
