"""Inside real containers, as crun makes them: with what Docker's default profile denies, with the profile that this
package ships, and without any.

The profile here denies by name what moby's `profiles/seccomp/default.json` allows only to CAP_SYS_ADMIN; the
capabilities, masked and read-only paths are Docker's defaults, too.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox_worker.isolation.zygote_layers import _others_can_read
from tests.support.places import PROJECT
from tests.support.skips import NEEDS_CRUN, NEEDS_ROOT
from tests.support.tables import table

WAIT_S = 90
CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
        "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
    )
]  # fmt: skip
ONLY_WITH_SYS_ADMIN = [
    "bpf", "fanotify_init", "fsconfig", "fsmount", "fsopen", "fspick", "lookup_dcookie", "mount", "mount_setattr",
    "move_mount", "open_tree", "perf_event_open", "pivot_root", "quotactl", "setdomainname", "sethostname", "setns",
    "syslog", "umount", "umount2", "unshare",
]  # fmt: skip
PROFILE = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [
        {"names": ONLY_WITH_SYS_ADMIN, "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
    ],
}
MASKED = ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"]
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]


def container(profile: dict[str, Any] | None, root: str, command: list[str]) -> dict[str, Any]:
    """An OCI runtime specification: the host's files, read-only, in namespaces of their own."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/mnt", "TMPDIR": "/mnt", "PYTHONPATH": str(PROJECT)}
    return {
        "ociVersion": "1.0.0",
        "root": {"path": root, "readonly": True},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": command,
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/mnt", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"},
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
            "maskedPaths": MASKED,
            "readonlyPaths": READ_ONLY,
            **({"seccomp": profile} if profile else {}),
        },
    }


def run_in_container(folder: Path, profile: dict[str, Any] | None, command: list[str]) -> str:
    """Return what `command` printed."""
    if os.getuid() != 0:
        pytest.skip(NEEDS_ROOT)
    if not shutil.which("crun"):
        pytest.skip(NEEDS_CRUN)
    (folder / "root").mkdir()
    (folder / "config.json").write_text(json.dumps(container(profile, str(folder / "root"), command)))
    # crun knows no machine with both kinds of control groups; it is shown one, in a mount namespace of its own.
    prepare = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; mount --rbind / root"
    start = f"crun --cgroup-manager=disabled run --bundle . test-{os.getpid()}-{folder.name}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{prepare}; exec {start}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    if "rlm_broker" not in done.stderr and not done.stdout:
        pytest.skip(f"crun makes no container here: {done.stderr.strip()[:200]}")
    return done.stdout


SHIPPED = json.loads((PROJECT / "rlm_broker" / "profiles" / "seccomp.json").read_text())


@table(
    "profile, level",
    [(PROFILE, "standard"), (SHIPPED, "strict"), (None, "strict")],
)
def test_auto_level_follows_the_container_profile(tmp_path: Path, profile: dict[str, Any] | None, level: str) -> None:
    if not all(_others_can_read(path) for path in (sys.prefix, sys.base_prefix)):
        level = "standard"  # where root may not build a root of its own, it becomes another user first
    report = json.loads(run_in_container(tmp_path, profile, [sys.executable, "-m", "rlm_broker", "doctor", "--json"]))
    assert report["auto"] == level, report["levels"]["strict"]["problem"]
    for name, found in report["levels"].items():
        assert (found["problem"] is None) == (name == "standard" or level == "strict")
        assert all(found["refused"].values())
    if profile is PROFILE:
        assert "unshare: Operation not permitted" in report["levels"]["strict"]["problem"]
        assert "docker run --security-opt seccomp=seccomp.json" in report["levels"]["strict"]["remedy"]


HOG = """
import json
from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox
hog = '''
import os, time
for _ in range(6):
    if os.fork() == 0:
        if os.fork() == 0:
            block = bytearray(b"x") * (60 << 20)
            time.sleep(1000)
        os._exit(0)
time.sleep(1000)
'''
with Sandbox(Limits(memory_bytes=160 << 20), "strict") as sandbox, sandbox.repl() as repl:
    proc = repl.execute("import os\\nos.listdir('/proc')").stdout
    block = repl.execute(hog)
    print(json.dumps([proc, block.status, block.error, block.post_mortem.processes, repl.execute("1").stdout]))
"""


def test_masked_proc_keeps_the_memory_watch(tmp_path: Path) -> None:
    if not all(_others_can_read(path) for path in (sys.prefix, sys.base_prefix)):
        pytest.skip("root of this container becomes another user, who cannot read this Python")
    proc, status, error, processes, after = json.loads(run_in_container(tmp_path, None, [sys.executable, "-c", HOG]))
    assert (proc, status, after) == ("[]\n", "killed", "1\n")
    assert "memory_bytes = 160 MiB" in error
    assert processes >= 3
