"""A zygote with only one worker and one REPL: applies the layers, evaluates, prints what it found.

    python -I isolated_worker.py JSON

It is run as a program because only a fresh process, root or not, can become a zygote.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def evaluate(probes: dict[str, str]) -> dict[str, Any]:
    """The value of each expression, or the exception's name and its error number."""
    found: dict[str, Any] = {}
    for name, expression in probes.items():
        try:
            found[name] = eval(expression, {"os": os, "sys": sys})
        except Exception as error:  # noqa: BLE001 - what a probe raises is its result
            found[name] = f"{type(error).__name__} {getattr(error, 'errno', None) or error}"
    return found


def main(spec: dict[str, Any]) -> None:
    """Apply the layers of `spec`, and print a JSON object of layers and findings."""
    sys.path.insert(0, spec["project"])
    from sandbox_worker.isolation import layer, syscalls, worker_layers, zygote_layers
    from sandbox_worker.wire.level import level_named

    if spec["masked_proc"]:  # as containers do; no own /proc can be mounted any more
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("tmpfs", "/proc/sys", "tmpfs", syscalls.MS_RDONLY)
    readable = [path for path in (sys.prefix, sys.base_prefix) if path != "/usr"]
    try:
        entered = zygote_layers.enter_zygote(
            level_named(spec["level"]),
            spec["new_root"],
            [*readable, f"{spec['project']}/sandbox_worker"],
            spec["hidden"],
            os.pidfd_open(os.getpid()),
        )
    except layer.LayerFailed as error:
        print(json.dumps({"failed": error.layer, "message": str(error)}))
        return
    report: dict[str, Any] = {"zygote": entered.layers, "proc_is_fresh": entered.proc_is_fresh}
    read_end, write_end = os.pipe()
    pid = zygote_layers.fork_worker(entered)
    if pid == 0:
        _be_a_worker(spec, entered, layer.WorkerBounds, worker_layers, write_end)
    os.close(write_end)
    with open(read_end) as pipe:
        for line in pipe:
            report.update(json.loads(line))
    report["init ended with"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(report))


def _be_a_worker(spec: dict[str, Any], entered: Any, bounds_of: Any, layers: Any, pipe: int) -> None:
    bounds = bounds_of(spec["allow_exec"], SimpleNamespace(**spec["bounds"]), 1 << 30, 1 << 20)
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    os.closerange(pipe + 1, 1 << 16)
    if not entered.level.has_own_root:
        os.chdir(spec["new_root"])
    raised, ruleset = layers.lock_down_init(entered, bounds)
    os.write(pipe, (json.dumps({"init": raised, "of init": evaluate(spec["init_probes"])}) + "\n").encode())
    repl = os.fork()
    if repl == 0:
        os.setsid()
        raised = layers.lock_down_repl(entered, bounds, ruleset, 0, 0)
        os.write(pipe, (json.dumps({"repl": raised, "of repl": evaluate(spec["probes"])}) + "\n").encode())
        os._exit(0)
    os.waitpid(repl, 0)
    os._exit(5)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
