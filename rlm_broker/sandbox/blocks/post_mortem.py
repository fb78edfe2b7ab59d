"""The end of a REPL in words: the reason, and the line of code that it was on."""

import re
import signal

from rlm_broker.results import PostMortem
from sandbox_worker.wire.bounds import WATCHED
from sandbox_worker.wire.control import BROKEN, OUT_OF_MEMORY, Died, Exceeded, LastSeen

_FRAME = re.compile(r'^  File "<block (\d+)>", line (\d+) in (\S{1,100})$', re.MULTILINE | re.ASCII)
_BY_SIGNAL: dict[int, str] = {
    signal.SIGABRT: " (C code gave up, for example because it got no memory)",
    signal.SIGSEGV: " (a crash in C code, or too deep a recursion)",
    signal.SIGXFSZ: " (it wrote a larger file than scratch_bytes allows)",
    signal.SIGSYS: " (a system call of a wrong architecture)",
}
_BY_EXIT_CODE: dict[int | None, str] = {
    OUT_OF_MEMORY: "it used up its memory (memory_bytes) to the point that its REPL could not go on",
    BROKEN: "it broke the REPL that it runs in",
}
"""Reason → sentence for exit codes of the REPL's own. Model code can end its process with these codes as well, and then
misleads only the model that wrote it."""


def reason(died: Died | Exceeded) -> str:
    """Return the reason why a REPL has ended, as one clause."""
    match died:
        case Exceeded(limit="block_timeout_s", used=used):
            return (
                f"it and what it had left running used {used:.4g} s CPU time, more than all CPUs have within its limit"
            )
        case Exceeded(limit=limit, used=used, allowed=allowed):
            _, divisor, unit = WATCHED[limit]
            return f"its processes used {used / divisor:.4g} {unit} together, {limit} = {allowed / divisor:.4g} {unit}"
        case Died(signal=int(number)):
            return f"its process was ended by {_signal_name(number)}{_BY_SIGNAL.get(number, '')}"
    return _BY_EXIT_CODE.get(died.exit_code, f"its process ended by itself with exit code {died.exit_code} (os._exit)")


def located(seen: LastSeen | None, block: int) -> PostMortem:
    """Return what init saw, with the line that the model's code was on. The stack is the REPL's word, and so untrusted.

    Args:
        seen: State of the REPL that init reported; None if it reported none.
        block: Number of the block that was running, within its REPL.
    """
    seen = seen or LastSeen()
    lines = [line for line in seen.stack.splitlines() if "/sandbox_worker/" not in line]  # without the worker's frames
    stack = "\n".join(line[:200] for line in lines)
    frame = _FRAME.search(stack)
    where = ""
    if frame is not None:
        number, line, function = frame.groups()
        which = "the block" if int(number) == block else "an earlier block"
        where = f"It was at line {line} of {which}{'' if function == '<module>' else f', in {function}'}"
    return PostMortem(where, stack, seen.memory_bytes, seen.cpu_s, seen.processes, seen.threads)


def sentence(why: str, post_mortem: PostMortem) -> str:
    """Return the reason, the place and the resources in use, as sentences for the model."""
    parts = [why]
    if post_mortem.where:
        parts.append(post_mortem.where)
    if post_mortem.processes:
        mib = post_mortem.memory_bytes / (1 << 20)  # private memory alone, which is under 1 MiB for a small program
        memory = "less than 1 MiB" if mib < 1 else f"{mib:,.0f} MiB"
        parts.append(f"It used {memory} (processes: {post_mortem.processes:,}, threads: {post_mortem.threads:,})")
    return ". ".join(parts)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
