"""Which hosts this machine can be: each is a command line that runs another command there."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.hosts.surroundings import ISOLATION_TESTS, PROFILES, PROJECT, SURROUNDINGS

PUBLIC = "public-python"
ORDINARY = "ordinary-user"
NEED_PUBLIC = ("cap-", "no-sys-admin", ORDINARY)
"""Beginnings of surroundings whose users may not read root's Python."""
ENVIRONMENTS = PROJECT / ".hosts"
"""Virtual environments of other Pythons, made once."""
OLDEST, NEWEST = 11, 15
"""Minor versions of Python 3 that are looked for."""
INSTALL_TIMEOUT_S = 900
READING_TESTS = (
    "tests/test_lint.py",
    "tests/rlm_broker/events/test_redaction.py",
    "tests/rlm_broker/values/test_parsing.py",
    "tests/rlm_broker/sandbox/test_packages.py",
)
"""Tests of what differs between patches of Python and releases of pip: regular expressions, and lists of packages."""
IMAGE = "rlm-broker-hosts:latest"
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
"""Shown to containers, whose own image is empty, so that no download is needed."""
PODMANS_LIMIT = 4096
"""Open files, and processes."""
CONTAINERS = (
    "",
    "--user 1000",
    f"--security-opt seccomp={PROFILES / 'seccomp.json'}",
    f"--security-opt seccomp={PROFILES / 'seccomp.json'} --user 1000 --cap-drop ALL",
    "--security-opt seccomp=unconfined",
    "--cap-drop ALL",
    "--cap-drop ALL --cap-add SETUID --cap-add SETGID",
    "--read-only",
    "--read-only --tmpfs /tmp",
    "--pids-limit 12",
    "--memory 256m",
    "--ulimit nofile=128",
)
WITH_APPARMOR = (
    f"--security-opt seccomp={PROFILES / 'seccomp.json'} --security-opt apparmor=rlm-broker",
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined",
)
FILTER = "@system-service landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp"
UNITS = (
    (),
    ("NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=yes", "PrivateTmp=yes", "PrivateDevices=yes"),
    ("ProtectProc=invisible", "ProcSubset=pid", "ProtectKernelTunables=yes", "ProtectControlGroups=yes"),
    ("MemoryDenyWriteExecute=yes", "LockPersonality=yes", "RestrictRealtime=yes", "PrivateUsers=yes"),
    ("RestrictNamespaces=yes",),
    ("SystemCallFilter=@system-service",),
    (f"SystemCallFilter={FILTER}",),
    (f"SystemCallFilter={FILTER} @mount",),
    ("RestrictAddressFamilies=AF_UNIX",),
    ("CapabilityBoundingSet=",),
    ("CapabilityBoundingSet=", "User=nobody"),
    ("DynamicUser=yes",),
    ("TasksMax=12",),
    ("LimitNPROC=3", "User=nobody"),
)


@dataclass(frozen=True)
class Host:
    """A host to be tried.

    Attributes:
        kind, name: What it is called in the matrix.
        prefix: Put before a command, it runs the command there.
        python: An interpreter there that has this package.
        why_not: Why it cannot be tried, or "".
        tests: Arguments of pytest for the tests that --tests runs there.
    """

    kind: str
    name: str
    prefix: tuple[str, ...] = ()
    python: str = sys.executable
    why_not: str = ""
    tests: tuple[str, ...] = ()


# -- surroundings ----------------------------------------------------------------------------------------------------


def surroundings() -> Iterator[Host]:
    """Each of `SURROUNDINGS`; those of other users and capabilities with a Python that other users can read."""
    for name, surrounding in SURROUNDINGS.items():
        if name == PUBLIC:
            continue
        names = f"{PUBLIC},{name}" if name.startswith(NEED_PUBLIC) else name
        needs_root = surrounding.needs_root or PUBLIC in names
        yield Host(
            "surrounding",
            f"{name} ({surrounding.stands_for})",
            _within(names),
            why_not="only root can make it" if needs_root and os.getuid() != 0 else "",
            tests=surrounding.tests,
        )


def _within(names: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "scripts.hosts.surroundings", names)


# -- containers ------------------------------------------------------------------------------------------------------


def containers() -> Iterator[Host]:
    """Docker and podman with options that matter to isolation, in an image that shows this machine's files."""
    for engine in ("docker", "podman"):
        why_not = _why_no_engine(engine)
        if why_not:
            yield Host("container", engine, why_not=why_not)
            continue
        has_apparmor = Path("/sys/module/apparmor/parameters/enabled").exists()
        for options in (*CONTAINERS, *(WITH_APPARMOR if has_apparmor else ())):
            shown = options.replace(f"{PROFILES}/", "")
            limits = _podmans_limits(options) if engine == "podman" else ()
            command = (engine, "run", *_mounted(), *limits, *options.split(), IMAGE)
            yield Host("container", f"{engine} run {shown}".strip(), command)
        if not has_apparmor:
            yield Host("container", f"{engine} with AppArmor", why_not="this kernel has no AppArmor")


def _why_no_engine(engine: str) -> str:
    if shutil.which(engine) is None:
        return "it is not installed"
    try:
        info = subprocess.run([engine, "info"], capture_output=True, text=True, timeout=60, check=False)
        if info.returncode != 0:
            return last_line(info.stderr) or "its daemon does not answer"
        made = subprocess.run([engine, "import", "-", IMAGE], input=_image(), capture_output=True, check=False)
        return "" if made.returncode == 0 else last_line(made.stderr.decode("utf-8", "replace"))
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def _podmans_limits(options: str) -> tuple[str, ...]:
    """Modest limits: podman asks for higher ones than ours, which a root without CAP_SYS_RESOURCE may not give."""
    names = ("nproc",) if "nofile" in options else ("nproc", "nofile")
    return tuple(each for name in names for each in ("--ulimit", f"{name}={PODMANS_LIMIT}:{PODMANS_LIMIT}"))


def _image() -> bytes:
    """An image that has only a temporary folder."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as archive:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(folder)
    return memory.getvalue()


def _mounted() -> list[str]:
    folders = [folder for folder in SYSTEM_FOLDERS if Path(folder).exists()]
    folders += [str(PROJECT), sys.prefix, sys.base_prefix]
    outer = [folder for folder in dict.fromkeys(folders) if not any(_is_below(folder, other) for other in folders)]
    shown = [option for folder in outer for option in ("-v", f"{Path(folder).resolve()}:{folder}:ro")]
    return ["--rm", "--network", "none", *shown, "-e", f"PYTHONPATH={PROJECT}", "-w", str(PROJECT)]


def _is_below(path: str, folder: str) -> bool:
    return path != folder and path.startswith(f"{folder}/")


# -- units of systemd ------------------------------------------------------------------------------------------------


def units() -> Iterator[Host]:
    """Transient services with the hardening settings that people use."""
    if not Path("/run/systemd/system").exists():
        yield Host("unit", "systemd-run", why_not="systemd does not run this machine")
        return
    if os.getuid() != 0:
        yield Host("unit", "systemd-run", why_not="only root can start units with these settings")
        return
    for settings in UNITS:
        options = [f"--property={setting}" for setting in settings]
        start = ("systemd-run", "--quiet", "--wait", "--pipe", "--collect", f"--working-directory={PROJECT}")
        yield Host("unit", " ".join(settings) or "no settings", (*start, f"--setenv=PYTHONPATH={PROJECT}", *options))


# -- other Pythons, and other roots ----------------------------------------------------------------------------------


def pythons() -> Iterator[Host]:
    """The oldest and the newest patch of each Python 3 that pyenv or the search path has, in an environment of its own.

    Each brings the pip that it was released with. The tests run there as root and as an ordinary user.
    """
    for name, python in _other_pythons().items():
        environment = ENVIRONMENTS / name
        why_not = "" if (environment / "bin/rlm-broker").exists() else _install(python, environment)
        inside = str(environment / "bin/python")
        yield Host("python", name, python=inside, why_not=why_not, tests=(*ISOLATION_TESTS, *READING_TESTS))
        if os.getuid() == 0 and Path(python).is_relative_to("/usr"):
            user = _within(f"{PUBLIC},{ORDINARY}")
            yield Host("python", f"{name} as an ordinary user", user, inside, why_not, READING_TESTS)


def _other_pythons() -> dict[str, str]:
    """Return the interpreters by their versions, without that of this process."""
    found: dict[str, str] = {}
    for minor in range(OLDEST, NEWEST + 1):
        on_path = shutil.which(f"python3.{minor}", path="/usr/local/bin:/usr/bin")
        pythons = [str(python) for python in Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        patches = {_patch(python): python for python in [*pythons, *filter(None, [on_path])]}
        for patch in {min(patches), max(patches)} if patches else ():
            if (minor, patch) != sys.version_info[1:3]:
                found[f"3.{minor}.{patch}"] = patches[patch]
    return found


def _patch(python: str) -> int:
    asked = [python, "-I", "-S", "-c", "import sys; print(sys.version_info.micro)"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def _install(python: str, environment: Path) -> str:
    """Why it is not possible, or ""."""
    for command in (
        [python, "-m", "venv", "--clear", str(environment)],
        [str(environment / "bin/python"), "-m", "pip", "install", "-q", "-e", f"{PROJECT}[dev]"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
        if done.returncode != 0:
            return f"it cannot be installed: {last_line(done.stderr)}"
    return ""


ENTER_ROOT = """
set -e
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root$PROJECT" "$root/mnt"
mount --bind "$PROJECT" "$root$PROJECT"
for file in /etc/hosts /etc/resolv.conf /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
  if [ -e "$file" ]; then
    mkdir -p "$root${file%/*}"
    [ -e "$root$file" ] || touch "$root$file"
    mount --bind "$file" "$root$file"
  fi
done
cd "$root"
pivot_root . mnt
umount -l /mnt
cd "$PROJECT"
export PATH=/usr/local/bin:/usr/bin:/bin HOME=/root PYTHONPATH=$PROJECT
exec "$@"
"""


def roots(folders: list[str]) -> Iterator[Host]:
    """Root folders of other distributions, entered by pivot_root(2): the kernel forbids namespaces after chroot(2).

    Args:
        folders: Each has a Python with the module venv.
    """
    if not folders:
        hint = "no --root DIR: `debootstrap --variant=minbase --include=python3-venv,tzdata trixie DIR` makes one"
        yield Host("root", "other distributions", why_not=hint)
    for folder in folders:
        name = Path(folder).name
        if os.getuid() != 0:
            yield Host("root", name, why_not="only root can enter it")
            continue
        prefix = ("env", f"PROJECT={PROJECT}", "unshare", "--mount", "sh", "-c", ENTER_ROOT, "sh", folder)
        environment, why_not = "/opt/rlm-broker", ""
        if not Path(f"{folder}{environment}/bin/rlm-broker").exists():
            setup = f"python3 -m venv {environment} && {environment}/bin/pip install -q -e '{PROJECT}[dev]'"
            done = subprocess.run(
                [*prefix, "sh", "-c", setup], capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
            why_not = "" if done.returncode == 0 else f"it cannot be installed: {last_line(done.stderr)}"
        yield Host("root", name, prefix, f"{environment}/bin/python", why_not, ISOLATION_TESTS)


def last_line(text: str) -> str:
    """Return the last line of a program's output, cut; empty without one."""
    return (text.strip().splitlines() or [""])[-1][:200]
