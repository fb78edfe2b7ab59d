"""A server of OpenEnv whose environment runs a policy's code in a sandbox, and a client that takes a few steps.

pip install 'rlm-broker[openenv]'
"""

import threading
from typing import Any

import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from rlm_broker import ReplLimits
from rlm_broker.integrations.openenv import PyExecutor

LIMITS = ReplLimits(memory_bytes=512 << 20, block_timeout_s=5)


class Code(Action):
    """A step of the policy."""

    code: str


class Shown(Observation):
    """Observation of a step."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class Coding(Environment[Code, Shown, State]):
    """One episode: the variables of a step are there in the next one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._executor = PyExecutor(limits=LIMITS)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Shown:  # noqa: ARG002
        """Begin an episode in a fresh sandbox."""
        self._executor.close()
        self._executor, self._state = PyExecutor(limits=LIMITS), State(episode_id=episode_id)
        return Shown()

    def step(self, action: Code, timeout_s: float | None = None, **_: Any) -> Shown:  # noqa: ARG002
        """Run a step; 42 is what the episode is after."""
        self._state.step_count += 1
        result = self._executor.run(action.code)
        return Shown(**result.model_dump(), done="42" in result.stdout, reward=float("42" in result.stdout))

    def close(self) -> None:
        """End the sandbox."""
        self._executor.close()

    @property
    def state(self) -> State:
        """Number of the step."""
        return self._state


server = uvicorn.Server(uvicorn.Config(create_fastapi_app(Coding, Code, Shown), port=0, log_level="warning"))
bound = server.config.bind_socket()
bound.listen()  # the client may be there before the server's thread
thread = threading.Thread(target=server.run, args=([bound],))
thread.start()
with GenericEnvClient(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}").sync() as env:
    env.reset()
    for code in ("def double(x):\n    return 2 * x", "open('/etc/passwd')", "while True: pass", "double(21)"):
        result = env.step({"code": code})
        shown = result.observation
        print(result.reward, result.done, shown["stdout"] or (shown["stderr"].splitlines() or [""])[0])
server.should_exit = True
thread.join()
