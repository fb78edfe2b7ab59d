"""What would give a layer that this machine refuses: one command or setting, found by looking at the machine."""

from pathlib import Path

SWITCHES = (
    # file below /proc/sys, the value that forbids namespaces, and the one that allows them
    ("kernel/unprivileged_userns_clone", "0", "1"),  # Debian's and others'
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu from 23.10 on
    ("user/max_user_namespaces", "0", "15000"),
)
FILTERED = "2"
"""`Seccomp:` in /proc/self/status: there is a filter, which is a container's, since we have none yet."""


def remedy(layer: str, proc: Path = Path("/proc")) -> str:
    """One sentence.

    Args:
        layer: Name of the layer that failed, as in `LayerFailed`.
        proc: Where the kernel tells of itself and of us.
    """
    if "namespace" in layer or "map" in layer or layer in ("mounts", "private root", "own proc", "host name"):
        return _for_namespaces(proc) or (
            "The installation of Python must lie where other users can read it: not below /root, for example."
            if layer == "private root"
            else "Start as root, or allow namespaces to ordinary users: `sysctl user.max_user_namespaces=15000`."
        )
    if "landlock" in layer:
        return "It needs Linux 5.13 or later with Landlock among its security modules: boot with `lsm=landlock,...`."
    if "seccomp" in layer:
        return "A kernel with seccomp filters, on x86_64 or aarch64, is needed."
    return "It needs Linux 5.13 or later."


def _for_namespaces(proc: Path) -> str | None:
    for switch, forbids, allows in SWITCHES:
        if _read(proc / "sys" / switch) == forbids:
            return f"As root: `sysctl {switch.replace('/', '.')}={allows}`."
    options = []
    if _status(proc, "Seccomp") == FILTERED:
        options.append("--security-opt seccomp=unconfined")
    if "(enforce)" in _read(proc / "self/attr/current"):
        options.append("--security-opt apparmor=unconfined")
    if options:
        return (
            f"This container's profile forbids it: start it with `docker run {' '.join(options)}`, or with a profile "
            "as SECURITY.md describes (Kubernetes: securityContext.seccompProfile)."
        )
    return None


def _status(proc: Path, field: str) -> str:
    for line in _read(proc / "self/status").splitlines():
        if line.startswith(f"{field}:"):
            return line.split()[1]
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
