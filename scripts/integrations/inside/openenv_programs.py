"""A server of OpenEnv's with our executors, and its client, for an episode of each."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

from rlm_broker.integrations.openenv import PyExecutor, PythonExecutor


class Code(Action):
    """A step of a policy."""

    code: str


class Seen(Observation):
    """Observation of a step."""

    stdout: str = ""
    stderr: str = ""
    ok: bool = True
    new: dict[str, str] = Field(default_factory=dict)


class Coding(Environment[Code, Seen, State]):
    """Code by steps, as in `coding_env`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.executor = PyExecutor()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:  # noqa: ARG002
        """Begin an episode."""
        self.executor, self._state = PyExecutor(), State(episode_id=episode_id)
        return Seen()

    def step(self, action: Code, timeout_s: float | None = None, **_: Any) -> Seen:  # noqa: ARG002
        """Run a step."""
        self._state.step_count += 1
        result = self.executor.run(action.code)
        return Seen(stdout=result.stdout, stderr=result.stderr, ok=result.exit_code == 0)

    @property
    def state(self) -> State:
        """Number of the step."""
        return self._state


class Recursive(Coding):
    """Code with a context, a model and a final answer, as in `repl_env`."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:  # noqa: ARG002
        """Begin an episode."""
        repl = self.repl = PythonExecutor()
        repl.set_context("the number is 42")
        repl.set_variable("answer", {"content": "", "ready": False})
        repl.inject_function("llm_query", lambda prompt: prompt.upper())
        repl.inject_function("FINAL_VAR", lambda name: f"FINAL({repl.get_variable(name)})")
        repl.inject_function("SHOW_VARS", lambda: sorted(repl.list_variables()))
        return Seen()

    def step(self, action: Code, timeout_s: float | None = None, **_: Any) -> Seen:  # noqa: ARG002
        """Run a block."""
        result = self.repl.execute(action.code)
        done = "FINAL(" in result["stdout"] or self.repl.get_variable("answer")["ready"]
        return Seen(
            stdout=result["stdout"],
            stderr=result["stderr"],
            ok=result["success"],
            new=result["locals_snapshot"],
            done=done,
        )


@contextlib.contextmanager
def client(environment: Callable[[], Coding]) -> Iterator[Any]:
    """Serve an environment on a port of this machine, and yield a client of it."""
    app = create_fastapi_app(environment, Code, Seen)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    bound = server.config.bind_socket()
    bound.listen()  # a client may be there before the server's thread
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        with GenericEnvClient(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}").sync() as made:
            yield made
    finally:
        server.should_exit = True
        thread.join()


def coding() -> None:
    """Two episodes of a server for code."""
    with client(Coding) as env:
        env.reset()
        seen = env.step({"code": "def f(x):\n    return x * 2\nprint('made')"}).observation
        assert seen["stdout"] == "made\n", seen
        seen = env.step({"code": "y = f(21)"}).observation
        assert seen["stdout"] == "42", seen
        seen = env.step({"code": "print('so far')\nopen('/etc/shadow')"}).observation
        assert seen["stdout"] == "so far\n", seen
        assert "PermissionError" in seen["stderr"] or "FileNotFoundError" in seen["stderr"], seen
        assert not seen["ok"], seen
        env.reset()
        seen = env.step({"code": "f(1)"}).observation
        assert "NameError" in seen["stderr"], seen


def recursive() -> None:
    """An episode of a server whose functions read variables while a block runs."""
    with client(Recursive) as env:
        env.reset()
        seen = env.step({"code": "import re\nfound = re.findall(r'\\d+', context)\ntold = llm_query('hi')"}).observation
        assert seen["new"] == {"found": "['42']", "told": "'HI'", "re": seen["new"]["re"]}, seen
        seen = env.step({"code": "own = 5\nprint(SHOW_VARS())"}).observation
        assert "'own'" in seen["stdout"], seen
        result = env.step({"code": "print(FINAL_VAR('found'))"})
        assert result.done, result
        assert "FINAL(['42'])" in result.observation["stdout"], result


@contextlib.contextmanager
def opened() -> Iterator[PythonExecutor]:
    """An executor that has had its first result."""
    executor = PythonExecutor()
    executor.inject_function("double", lambda number: 2 * number)
    assert executor.execute("double(21)")["stdout"] == "42"
    try:
        yield executor
    finally:
        executor.close()
