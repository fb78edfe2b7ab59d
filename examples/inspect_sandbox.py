"""An eval of inspect_ai whose samples have a shell and a Python in a sandbox, on a scripted model.

pip install 'rlm-broker[inspect]'
inspect eval examples/inspect_sandbox.py --model openai/gpt-5-mini
"""

import tempfile
from typing import Any

from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import bash, python


@task
def sums() -> Task:
    """Numbers in a file of each sample, which a model has to add up."""
    samples = [
        Sample(input="What is the sum of numbers.txt?", target=str(total), files={"numbers.txt": text})
        for text, total in (("1 2 3", 6), ("10 20", 30))
    ]
    return Task(
        samples,
        solver=[system_message("Use the tools."), use_tools(bash(timeout=30), python(timeout=30)), generate()],
        scorer=includes(),
        sandbox="rlm_broker",  # this line is the change
    )


def scripted(messages: list[Any], *_: Any) -> ModelOutput:
    """Answer as a model would: look at the file, add up, and say it."""
    said = [message.text.strip() for message in messages if message.role == "tool"]
    if not said:
        output = ModelOutput.for_tool_call("scripted", "bash", {"command": "cat numbers.txt"})
    elif len(said) == 1:
        output = ModelOutput.for_tool_call("scripted", "python", {"code": f"print(sum(map(int, '{said[0]}'.split())))"})
    else:
        output = ModelOutput.from_content("scripted", f"The sum is {said[-1]}.")
    output.usage = ModelUsage()  # else inspect counts tokens by a table that it downloads
    return output


if __name__ == "__main__":
    model = get_model("mockllm/model", custom_outputs=scripted)
    (log,) = eval(sums(), model=model, display="none", log_dir=tempfile.mkdtemp())
    for sample in log.samples or ():
        print(sample.output.completion, sample.score.value)
