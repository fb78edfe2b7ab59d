"""The profiles for container engines: that they are valid, and name what "strict" needs and no more of that kind."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox_worker.isolation import zygote_layers
from sandbox_worker.isolation.layer import LayerFailed
from sandbox_worker.wire.level import STRICT
from scripts.hosts import seccomp_profile
from scripts.hosts.surroundings import PROFILES, follow_profile
from tests.support.forked_child import in_child
from tests.support.launcher import needs_strict
from tests.support.tables import table

SECCOMP, APPARMOR = PROFILES / "seccomp.json", PROFILES / "apparmor"


def test_seccomp_profile_equals_script_output() -> None:
    """After a change of the tables: python -m scripts.hosts.seccomp_profile > rlm_broker/profiles/seccomp.json."""
    assert json.loads(SECCOMP.read_text()) == seccomp_profile.profile()


def test_seccomp_profile_allows_each_call_once() -> None:
    """The profile allows no call twice, and none that engines deny."""
    rules = json.loads(SECCOMP.read_text())["syscalls"]
    names = [name for rule in rules for name in rule["names"]]
    assert len(names) == len(set(names)) > 300
    assert not {"bpf", "kexec_load", "init_module", "ptrace", "io_uring_setup", "sethostname"} & set(names)
    assert set(rules[-1]["names"]) == set(seccomp_profile.FOR_STRICT)


@needs_strict
@table("name", seccomp_profile.FOR_STRICT)
def test_strict_needs_each_added_call(name: str, tmp_path: Path) -> None:
    """`strict` fails without each call that the profile adds for it."""

    def enter() -> str:
        own = os.pidfd_open(os.getpid())
        follow_profile(without=[name])
        try:
            shared = zygote_layers.enter_zygote(STRICT, str(tmp_path), [], [], own)
            if zygote_layers.fork_worker(shared) == 0:
                os._exit(0)
        except LayerFailed as error:
            return error.reason
        return "nothing failed"

    assert re.match(rf"{name}\b", in_child(enter))


def test_apparmor_profile_allows_mounts_as_documented() -> None:
    text = APPARMOR.read_text()
    rules = {line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")}
    assert {"mount,", "umount,", "pivot_root,", "capability,", "network,", "file,"} <= rules
    assert "profile rlm-broker flags=(attach_disconnected,mediate_deleted) {" in rules
    assert "signal (send, receive) peer=rlm-broker," in rules


def test_apparmor_profile_is_accepted_by_the_parser() -> None:
    parser = shutil.which("apparmor_parser", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if parser is None or not Path("/etc/apparmor.d/abi/3.0").exists():
        pytest.skip("needs apparmor_parser of AppArmor 3.0 or later (Debian: apparmor)")
    command = [parser, "--skip-kernel-load", "--skip-cache", str(APPARMOR)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_documents_name_profiles_and_strict_calls() -> None:
    text = (PROFILES.parents[1] / "SECURITY.md").read_text()
    assert "rlm_broker/profiles/seccomp.json" in text
    assert "rlm_broker/profiles/apparmor" in text
    (sentence,) = re.findall(r"`strict` needs the system calls ([^:.]*)", text)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(seccomp_profile.FOR_STRICT)
