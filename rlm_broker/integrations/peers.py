"""The packages that adapters are for: whether one is installed, and in a version that was tested."""

import importlib.metadata
import warnings

from rlm_broker.values.extras import ExtraMissing


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
    """Return the numbers of a version: (3, 4, 1) for "3.4.1rc2". Trailing zeros do not count."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
