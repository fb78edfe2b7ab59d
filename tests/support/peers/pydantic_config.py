"""Stand-in for pydantic-config: models that refuse unknown fields."""

from pydantic import BaseModel


class BaseConfig(BaseModel, extra="forbid"):
    """A configuration."""
