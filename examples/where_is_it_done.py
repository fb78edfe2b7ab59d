"""Find where a code base does something: a folder as the context, with a question about each of its files.

You learn what a folder becomes (a dict from path to text, without files that `.gitignore` or their names exclude), to
store it once for several questions, and to follow which block a run is in. The code base is this package itself.

It prints an answer for each question:

    python examples/where_is_it_done.py
    python examples/where_is_it_done.py --model openai/gpt-5 --sub-model openai/gpt-5-mini src/ "Where is the retry?"

Without `--model` the model is "offline": it needs no key, and finds the lines that share words with the question. It
does not reason, so ask it in the words of the code. With a real model the first one writes code that searches, and the
second one judges the files that were found.
"""

import argparse
from pathlib import Path

import rlm_broker
from rlm_broker import RLM, BlockEnded, Event, Limits

PACKAGE = Path(rlm_broker.__file__).parent
QUESTIONS = [
    "Which file says that a certificate file is likely to hold secrets?",
    "Where is the soft limit of open files raised to the hard one?",
]


def follow(event: Event) -> None:
    """Print a line for each block that ended. `RLM(verbose=True)` tells more, on stderr."""
    if isinstance(event, BlockEnded):
        print(f"  block {event.block}: {event.outcome.status}, {event.outcome.execution_time:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="offline")
    parser.add_argument("--sub-model")
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    given = parser.parse_args()
    limits = Limits(max_depth=2, max_children_total=10)
    with (
        rlm_broker.store(given.folder) as code,  # read once, and mapped by the REPL of each question
        RLM(given.model, given.sub_model, limits=limits, on_event=follow) as rlm,
    ):
        print(f"{code.info.parts_total} files, {code.info.total_chars:,} characters")
        for question in given.questions:
            print(question)
            print(rlm.completion(code, question).response)


if __name__ == "__main__":
    main()
