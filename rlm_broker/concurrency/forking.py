"""The lock between forks of this process and the start of programs."""

import os
import threading
from typing import Final

FORKING: Final = threading.RLock()
"""Held by each fork of this process, and while a program is started.

`Popen` waits until the pipe on which its program reports a failed exec is closed. A process that is forked in between
inherits the write end of that pipe, so `Popen` would wait for as long as that process lives."""

os.register_at_fork(before=FORKING.acquire, after_in_parent=FORKING.release, after_in_child=FORKING.release)
