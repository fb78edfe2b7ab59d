"""Sentences of all adapters: a package is missing or was not tested, an option is refused."""

import importlib.metadata
import re
import warnings
from typing import Final

from rlm_broker.values.extras import ExtraMissing

NO_IMAGE: Final = "a sandbox has no image, but the programs of this machine"
NO_NETWORK: Final = "a sandbox has no network"
ONE_USER: Final = "a sandbox has one user, who is not root"
OWN_USERS: Final = (None, "root", 0)
"""Users as which trainers prepare their folders. Any other one is a task's."""


def refusal(option: str, why: str) -> str:
    """Return the sentence on an option of a peer's that asks for more than a sandbox gives.

    Example:
        ```python
        raise ValueError(refusal("docker_image", NO_IMAGE))
        ```
    """
    return f"{option} is refused by rlm-broker: {why}"


def require(package: str, extra: str, tested: tuple[str, str]) -> None:
    """Look at the installed version of a peer, before its adapter imports it. This imports nothing of the peer.

    Example:
        ```python
        require("dspy", "dspy", tested=("3.3", "3.5"))
        import dspy
        ```

    Args:
        package: Name of its distribution.
        extra: The extra of rlm-broker that brings it, with dashes: pip before 23.3 finds no other form in a wheel.
        tested: First version that was tested, and the first one beyond: "3.3" and "3.5" are 3.3.x and 3.4.x. A later
            one is used with a warning, since most of them change nothing here.

    Raises:
        ExtraMissing: It is not installed, or older than what was tested. It is an ImportError, too.
    """
    first, beyond = tested
    install = f"pip install 'rlm-broker[{extra}]'"
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ExtraMissing(f"rlm_broker.integrations.{extra.replace('-', '_')} needs {package}: {install}") from None
    range_ = f"{package} >={first},<{beyond}"
    if _release(installed) < _release(first):
        raise ExtraMissing(f"{package} {installed} is too old: tested with {range_}; {install}")
    if _release(installed) >= _release(beyond):
        warnings.warn(f"{package} {installed} is newer than what was tested: {range_}", stacklevel=3)


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (3, 4, 1) for "3.4.1rc2"."""
    numbers = re.match(r"[0-9.]*", version)
    return tuple(int(number) for number in numbers[0].split(".") if number) if numbers else ()
