"""The end of init, or of a child of it, that cannot go on: it reports the reason to the orchestrator."""

import contextlib
import os
from typing import NoReturn

from sandbox_worker.isolation.layer import LayerFailed
from sandbox_worker.wire.control import Failed, InitStep, pack
from sandbox_worker.wire.descriptors import CONTROL_FD


def fail(step: InitStep, error: BaseException) -> NoReturn:
    """Report the step that failed on the control socket, and end the process."""
    layer, code = (error.layer, error.code) if isinstance(error, LayerFailed) else (None, 0)
    with contextlib.suppress(OSError):
        os.write(CONTROL_FD, pack(Failed(step=step, reason=str(error) or repr(error), layer=layer, code=code)))
    os._exit(1)
