"""Writes the recordings beside it. The replies were written by hand, in the style of a capable model; no provider was
asked. To be run again when a prompt of ours changes:

    python -m examples.recorded.make
"""

import importlib
import json
from pathlib import Path
from typing import Any

from rlm_broker import RLM, Limits, Models, ScriptedClient
from rlm_broker.broker.clients.base import LMRequest

FOLDER = Path(__file__).parent

REPORTS = "\n\n".join(
    f"Report {number}, {day}: {text}"
    for number, (day, text) in enumerate(
        [
            ("Monday", "The pump on deck 2 was noisy. We greased its bearing and it ran quietly."),
            ("Tuesday", "All systems normal. The crew had the afternoon off."),
            ("Wednesday", "The pump on deck 2 stopped at 14:10. The bearing had seized; we put in a new one."),
            ("Thursday", "A fuse of the galley light blew twice. Cause not found."),
            ("Friday", "Galley light: a chafed cable behind the oven was the cause. Replaced, and it has held since."),
        ],
        1,
    )
)
QUESTION = "Which faults were there, and was each of them solved?"

LOOK = """I first look at how the text is made up.
```repl
print(len(context))
print(context[:300])
```"""
READ = """It is a series of short reports, separated by empty lines. Each needs to be read: I ask about all at once.
```repl
reports = context.split('\\n\\n')
answers = llm_query_batched([
    'Name the fault that this report tells of, whether it was solved, and the day; '
    f'or say NONE if it tells of none.\\n\\n{report}' for report in reports
])
for number, answer in enumerate(answers, 1):
    print(number, answer)
```"""
CONCLUDE = """Two faults run through several reports, and the later ones say how they ended.
```repl
faults = [answer for answer in answers if answer != 'NONE']
lines = [
    'The pump on deck 2: noisy on Monday, seized on Wednesday; solved with a new bearing.',
    'The galley light: its fuse blew on Thursday; solved on Friday, a chafed cable was replaced.',
]
print(len(faults), 'reports tell of faults')
FINAL('\\n'.join(lines))
```"""
READINGS = {
    "Report 1": "Noisy pump on deck 2; solved for the time being (bearing greased); Monday",
    "Report 2": "NONE",
    "Report 3": "Pump on deck 2 stopped, bearing seized; solved (new bearing); Wednesday",
    "Report 4": "Fuse of the galley light blew twice; not solved; Thursday",
    "Report 5": "Galley light, chafed cable; solved (cable replaced); Friday",
}

SALES = {
    region: [{"month": month, "units": (month * factor) % 17 + 3} for month in range(1, 13)]
    for region, factor in (("north", 5), ("south", 7), ("west", 11))
}
SALES_QUESTION = "Which month was the best of each region, and which region sold most in all?"
DELEGATE = """The context is a dict of regions, each a list of months. Each is a task of its own, for a child.
```repl
print({region: len(months) for region, months in context.items()})
import json
tasks = [
    f'Compute with code the month with the most units and the sum of units of {region}. '
    'Answer as JSON with the keys region, month and total.'
    for region in context
]
found = rlm_query_batched(tasks, contexts=list(context.values()))
print(found)
```"""
COMBINE = """All three came back as JSON; now I compare them.
```repl
rows = [json.loads(text) for text in found]
best = max(rows, key=lambda row: row['total'])
months = ', '.join(f"{row['region']} {row['month']}" for row in rows)
FINAL(f"Best months: {months}. Most in all: {best['region']} with {best['total']}.")
```"""
CHILD = """The context is the list of months: I compute.
```repl
import json
top = max(context, key=lambda row: row['units'])
FINAL(json.dumps({'region': REGION, 'month': top['month'], 'total': sum(row['units'] for row in context)}))
```"""

ASK_EACH = """The dates and amounts are written in four ways, so I ask about each mail.
```repl
for mail in context:
    print(mail)
found = llm_query_batched([
    'Which invoice does this mail name? Answer as JSON with the keys number, issued, customer and euros, '
    f'or with null.\\n\\n{mail}' for mail in context
])
print(found)
```"""
SUBMIT_ALL = """I collect what is not null.
```repl
import json
invoices = [invoice for invoice in map(json.loads, found) if invoice]
FINAL(json.dumps(invoices))
```"""
SUBMIT_DATES = """The first date has to be written as ISO 8601 has it.
```repl
for invoice in invoices:
    invoice['issued'] = invoice['issued'].replace('3 March 2026', '2026-03-03')
FINAL(json.dumps(invoices))
```"""
INVOICES = {
    "1041": '{"number": 1041, "issued": "3 March 2026", "customer": "Lindqvist AB", "euros": "1204.50"}',
    "1042": '{"number": 1042, "issued": "2026-03-05", "customer": "Orto Verde", "euros": "89.90"}',
    "1039": '{"number": 1039, "issued": "2026-02-17", "customer": "Haddad & Sons", "euros": "2310.00"}',
    "Lunch": "null",
}


def _child(request: LMRequest) -> str:
    region = next(region for region in SALES if f"of {region}." in str(request.question))
    return CHILD.replace("REGION", repr(region))


def _reading(request: LMRequest) -> str:
    prompt = str(request.messages[-1].content)
    return next(answer for report, answer in READINGS.items() if report in prompt)


def _invoice(request: LMRequest) -> str:
    prompt = str(request.messages[-1].content)
    return next(answer for mark, answer in INVOICES.items() if mark in prompt)


def make(folder: Path) -> None:
    """Write all recordings into `folder`, in place of what is there."""
    records: Any = importlib.import_module("examples.typed_records")  # by name: type checkers take each example alone
    for name in ("invoices.jsonl", "reports.jsonl", "sales.jsonl"):
        (folder / name).unlink(missing_ok=True)
    root = ScriptedClient([LOOK, READ, CONCLUDE], "hand-written")
    RLM(
        root, ScriptedClient(_reading, "hand-written-reader"), models=Models(record=folder / "reports.jsonl")
    ).completion(REPORTS, QUESTION)
    replies = iter([DELEGATE, COMBINE])
    root = ScriptedClient(lambda request: _child(request) if request.depth else next(replies), "hand-written")
    RLM(root, limits=Limits(max_depth=2), models=Models(record=folder / "sales.jsonl")).completion(
        SALES, SALES_QUESTION
    )
    root = ScriptedClient([ASK_EACH, SUBMIT_ALL, SUBMIT_DATES], "hand-written")
    reader = ScriptedClient(_invoice, "hand-written-reader")
    RLM(root, reader, models=Models(record=folder / "invoices.jsonl")).completion(
        records.MAILS, records.QUESTION, output_type=list[records.Invoice]
    )


if __name__ == "__main__":
    make(FOLDER)
    for path in sorted(FOLDER.glob("*.jsonl")):
        print(path.name, sum(1 for _ in path.open()) - 1, "calls", json.loads(path.open().readline())["root"])
