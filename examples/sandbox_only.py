"""A sandbox without any model: untrusted code, its outcome, its limits, and what survives."""

from rlm_broker import Limits, Sandbox

limits = Limits(memory_bytes=256 << 20, block_timeout_s=1, interrupt_grace_s=0.2)
with Sandbox(limits) as sandbox, sandbox.repl(context={"numbers": [1, 2, 3]}) as repl:
    print(repl.execute("total = sum(context['numbers'])\ntotal").stdout, end="")
    print(repl.execute("open('/etc/shadow')").status)
    print(repl.execute("while True: pass").status)
    print(repl.execute("total").stdout, end="")
    print(repl.execute("import os; os._exit(3)").error)
    print(repl.execute("len(context)").stdout, end="")
