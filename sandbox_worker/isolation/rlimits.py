"""Resource limits of one process. They are coarse: control groups and the watch bound a worker as a whole."""

import resource


def forbid_core_dumps() -> bool:
    """Set RLIMIT_CORE to 1 byte, soft and hard.

    1 and not 0: if `core_pattern` is a pipe, the kernel ignores all other values (core(5)), and runs the handler as
    root on the host for each crash.

    Returns:
        False if the hard limit is 0 already. Only a privileged process can raise it to 1.
    """
    if resource.getrlimit(resource.RLIMIT_CORE) != (1, 1):
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        except ValueError:  # `resource` turns EPERM into it
            return False
    return True


def set_hard(limit: int, value: int, reserved: int = 0) -> None:
    """Set a limit for good: the hard limit becomes `value`, or stays as it is if it is lower.

    Args:
        limit: An RLIMIT_* number.
        value: The hard limit.
        reserved: Difference between the hard and the soft limit.
    """
    hard = resource.getrlimit(limit)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(limit, (max(0, value - reserved), value))
