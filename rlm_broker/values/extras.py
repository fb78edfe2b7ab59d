"""Packages of extras: an installation may lack them."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlm_broker.errors import ConfigurationError


class ExtraMissing(ConfigurationError, ImportError):
    """A package is not installed that an extra of rlm-broker brings; the message says how to install it."""


@contextmanager
def require_extra(extra: str, user: str) -> Iterator[None]:
    """Turn a failed import of a package within the block into a sentence saying which extra `user`, for example
    "`rlm-broker serve`", needs. Raise ExtraMissing with it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("rlm_broker", "sandbox_worker"):
            raise
        raise ExtraMissing(f"{user} needs packages that are not installed: pip install 'rlm-broker[{extra}]'") from None
