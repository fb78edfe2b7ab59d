"""Two recorded runs of several turns, run again without any model: their code is executed, their replies are read.

The replies in `recorded/` were written by hand (`recorded/make.py`). A run of your own is recorded with
`RLM(..., models=Models(record="run.jsonl"))`, or `rlm-broker ask ... --record run.jsonl`. Change the question or the
data here, and the replay ends with the difference to what was recorded.
"""

from pathlib import Path

from recorded import make  # type: ignore[import-not-found, unused-ignore]  # beside this file

from rlm_broker import RLM, Limits, Models, ReplayDiverged

FOLDER = Path(__file__).parent / "recorded"

completion = RLM(models=Models(replay=FOLDER / "reports.jsonl")).completion(make.REPORTS, make.QUESTION)
print(completion.response)
print(completion.iterations, "turns,", completion.usage_summary.total.stored_calls, "replies from the recording")

sales = Models(replay=FOLDER / "sales.jsonl")
completion = RLM(models=sales, limits=Limits(max_depth=2)).completion(make.SALES, make.SALES_QUESTION)
print(completion.response)
print(len(completion.child_traces), "children")

try:
    RLM(models=Models(replay=FOLDER / "reports.jsonl")).completion(make.REPORTS, "What did the crew do?")
except ReplayDiverged as diverged:
    print(*str(diverged).splitlines()[-3:], sep="\n")
