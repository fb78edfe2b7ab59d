"""Find the cause of a failure in a log that is too long for any model to read.

You learn to ask about a file, to bound what the run may spend, to keep a trace, and to use what a failed run had. The
example makes the log: 60,000 lines, of which one tells the cause, three follow from it, and the rest is noise.

It prints the answer, what it cost, and the level of isolation that the model's code ran behind:

    python examples/find_the_cause.py
    python examples/find_the_cause.py --model openai/gpt-5-mini --log app.log --question "When did the disk fail?"

Without `--model` the model is "offline": it needs no key and no network, and quotes the line that says most of the
question. A provider's model needs its key in the usual variable; `rlm-broker models` shows which can be used here.
"""

import argparse
import tempfile
from pathlib import Path

from rlm_broker import RLM, Limits, RunFailed, TraceWriter

EVENTS = {
    31_000: "ERROR payments: stopped, because the certificate of the ledger database expired at midnight",
    31_004: "WARN gateway: upstream timed out after 30 s",
    31_090: "WARN orders: 14 carts could not be paid",
    31_200: "ERROR gateway: 502 for POST /pay",
}
QUESTION = "Why were the payments stopped?"


def write_log(path: Path) -> None:
    with path.open("w") as log:
        for number in range(60_000):
            noise = f"INFO worker-{number % 7}: request {number * 7919 % 100_003} done in {number % 90 + 5} ms"
            log.write(f"2026-03-01T00:{number // 1000:02}:{number % 60:02} {EVENTS.get(number, noise)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="offline")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--question", default=QUESTION)
    given = parser.parse_args()
    bounds = Limits(max_iterations=12, max_llm_calls=60, run_timeout_s=300)
    with tempfile.TemporaryDirectory() as folder, TraceWriter(Path(folder, "run.jsonl")) as trace:
        log = given.log or Path(folder, "server.log")
        if given.log is None:
            write_log(log)
        try:
            done = RLM(given.model, limits=bounds, on_event=trace).completion(log, given.question)
        except RunFailed as failed:  # a limit, the provider, Ctrl+C: it carries what the run had by then
            print(f"{failed}\nbest answer so far: {failed.partial_answer}")
            raise SystemExit(1) from None
        print(done.response)
        used = done.usage_summary.total
        level = done.isolation.level if done.isolation else "none"
        print(f"{done.iterations} turns, {used.total_calls} calls, cost {used.total_cost}, isolation {level}")
        print(f"the trace has {len(Path(folder, 'run.jsonl').read_text().splitlines())} events")


if __name__ == "__main__":
    main()
