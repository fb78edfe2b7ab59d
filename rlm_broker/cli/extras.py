"""Packages of extras, which a command needs and an installation may lack."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlm_broker.errors import ConfigurationError


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Turn a failed import of another project's package into a sentence that says what to install.

    Args:
        extra: Name of the extra of rlm-broker that has the packages.

    Raises:
        ConfigurationError: A package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("rlm_broker", "sandbox_worker", ""):
            raise
        raise ConfigurationError(f"the package {package} is not installed: pip install 'rlm-broker[{extra}]'") from None
