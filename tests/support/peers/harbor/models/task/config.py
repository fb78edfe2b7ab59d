"""Configuration of a task."""

from dataclasses import dataclass
from enum import StrEnum


class NetworkMode(StrEnum):
    """Networks of a task."""

    PUBLIC = "public"
    NO_NETWORK = "no-network"


@dataclass
class NetworkPolicy:
    """The network that a task wants."""

    network_mode: NetworkMode = NetworkMode.PUBLIC
