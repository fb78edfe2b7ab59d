"""Resource limits of one process: the coarse bounds. What a worker may use as a whole is for cgroups and watchdogs."""

import resource


def forbid_core_dumps() -> bool:
    """Set RLIMIT_CORE to 1 byte, soft and hard.

    Not 0: core(5), a `core_pattern` that is a pipe ignores every other value, and its handler runs as root on the
    host for each crash.

    Returns:
        False where the hard limit is already 0, which only a privileged process can raise to 1.
    """
    if resource.getrlimit(resource.RLIMIT_CORE) != (1, 1):
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        except ValueError:  # how the module says EPERM
            return False
    return True


def set_hard(limit: int, value: int, reserved: int = 0) -> None:
    """Bound `limit` (RLIMIT_*) for good: hard at `value` or at the present hard limit if that is lower.

    Args:
        reserved: How much lower the soft limit is.
    """
    hard = resource.getrlimit(limit)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(limit, (max(0, value - reserved), value))
