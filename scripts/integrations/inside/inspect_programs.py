"""An eval of inspect's on a scripted model, with our sandbox; and how long a sample and a command take."""

import asyncio
import contextlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash, python
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

from rlm_broker.errors import ConfigurationError
from rlm_broker.integrations.inspect import NAME, SampleSandbox

SAMPLES, TURNS, COMMANDS = 10, 200, 400


def _scripted(input: list[Any], *_: Any) -> ModelOutput:
    """Have the shell write a file, then Python read it, then answer what it printed."""
    output = _next(input)
    output.usage = ModelUsage()  # else inspect counts tokens, by a table that it downloads
    return output


def _next(input: list[Any]) -> ModelOutput:
    number = next(message for message in input if message.role == "user").text
    said = [message.text.strip() for message in input if message.role == "tool"]
    if not said:
        return ModelOutput.for_tool_call("mock", "bash", {"command": f"ls | wc -l; echo {number} > mine; pwd; id -u"})
    if len(said) == 1:
        return ModelOutput.for_tool_call("mock", "python", {"code": "print(int(open('mine').read()) * 7)"})
    return ModelOutput.from_content("mock", " ".join(said).replace("\n", " "))


def ten_samples() -> None:
    """Run an eval of ten samples, each with a shell and a Python of its own."""
    samples = [Sample(input=str(number), target=f" {number * 7}") for number in range(SAMPLES)]
    task = Task(samples, solver=[use_tools(bash(), python()), generate()], scorer=includes(), sandbox=NAME)
    model = get_model("mockllm/model", custom_outputs=_scripted)
    (log,) = eval(task, model=model, display="none", log_dir=tempfile.mkdtemp())
    assert log.status == "success", log.error.traceback[-1500:]
    assert log.results.scores[0].metrics["accuracy"].value == 1, [each.output.completion for each in log.samples]
    for each in log.samples:
        found, folder, uid = each.output.completion.split()[:3]
        assert (found, folder) == ("0", "/w"), each.output.completion
        assert uid != "0"


def refusals() -> None:
    """Refuse what is beyond the walls, by the name of the option, before a sample begins."""
    for config in ("compose.yaml", "Dockerfile"):
        task = Task([Sample("1")], sandbox=(NAME, config))
        try:
            eval(task, model="mockllm/model", display="none", log_dir=tempfile.mkdtemp())
        except ConfigurationError as error:
            assert config in str(error), error  # noqa: PT017 - this is no test of pytest's
        else:
            raise AssertionError(config)


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """A sample's machine that has run a command."""
    with asyncio.Runner() as runner:
        made = runner.run(SampleSandbox.sample_init("opened", None, {}))
        assert runner.run(made["default"].exec(["echo", "1"])).stdout == "1\n"
        yield
        runner.run(SampleSandbox.sample_cleanup("opened", None, made, False))


def figures() -> None:
    """Print the time of a sample, and of one command, by turns with inspect's local sandbox and a bare subprocess."""
    asyncio.run(_figures())


async def _figures() -> None:
    for is_used in (False, True):
        times: dict[type[Any], list[float]] = {SampleSandbox: [], LocalSandboxEnvironment: []}
        for _ in range(TURNS):
            for kind, taken in times.items():
                begun = time.perf_counter()
                made = await kind.sample_init("figures", None, {})
                if is_used:
                    await made["default"].exec(["true"])
                await kind.sample_cleanup("figures", None, made, False)
                taken.append(time.perf_counter() - begun)
        _print("sample with one command" if is_used else "sample made and gone", *times.values())
    made = await SampleSandbox.sample_init("figures", None, {})
    local = await LocalSandboxEnvironment.sample_init("figures", None, {})
    ours: list[float] = []
    theirs: list[float] = []
    bare: list[float] = []
    for _ in range(COMMANDS):
        begun = time.perf_counter()
        await made["default"].exec(["true"])
        between = time.perf_counter()
        subprocess.run(["true"], check=True, capture_output=True)
        bare.append(time.perf_counter() - between)
        ours.append(between - begun)
        begun = time.perf_counter()
        await local["default"].exec(["true"])
        theirs.append(time.perf_counter() - begun)
    _print("exec against subprocess.run", ours, bare)
    _print("exec against the local sandbox's", ours, theirs)
    await SampleSandbox.sample_cleanup("figures", None, made, False)
    await LocalSandboxEnvironment.sample_cleanup("figures", None, local, False)


def _print(what: str, ours: list[float], theirs: list[float]) -> None:
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(f"{what}: {mine * 1e3:.2f} ms, {other * 1e3:.2f} ms: {mine / other:.2f} x")
