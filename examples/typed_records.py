"""Get typed values out of free text: a table of invoices, each as a mail, as a list of validated records.

You learn `output_type`: the answer is a value of the type that you name, and what does not fit goes back to the model
with the reason. You also learn to replay: a recorded run needs neither a model nor a key.

It prints the records, and what was summed up from them in Python:

    python examples/typed_records.py
    python examples/typed_records.py --model openai/gpt-5-mini
    python examples/typed_records.py --model openai/gpt-5-mini --record /tmp/invoices.jsonl

Without `--model` the run is replayed from `recorded/invoices.jsonl`, whose replies were written by hand
(`recorded/make.py`). The code of these replies is executed, and the second reply is refused by the type once.
"""

import argparse
import datetime
from decimal import Decimal
from pathlib import Path

from pydantic import BaseModel, PositiveInt

from rlm_broker import RLM, Models

RECORDING = Path(__file__).parent / "recorded" / "invoices.jsonl"
MAILS = [
    "Dear Sirs, please find our bill no. 1041 of 3 March 2026 over EUR 1,204.50, payable by Lindqvist AB. Kind regards",
    "Hi! Invoice 1042, issued 2026-03-05, comes to 89 euros and 90 cents. It is for Orto Verde. Ciao, Paola",
    "REMINDER: Haddad & Sons has not paid invoice 1039 (dated 17/02/2026). The amount is 2.310,00 EUR.",
    "Lunch on Friday? The new place at the harbour has opened.",
]
QUESTION = "List each invoice that the mails name: its number, date, customer and amount in euros."


class Invoice(BaseModel):
    number: PositiveInt
    issued: datetime.date
    customer: str
    euros: Decimal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    models = Models(replay=RECORDING) if given.model is None else Models(record=given.record)
    done = RLM(given.model, models=models).completion(MAILS, QUESTION, output_type=list[Invoice])
    invoices: list[Invoice] = done.parsed
    for invoice in sorted(invoices, key=lambda each: each.number):
        print(f"{invoice.number}  {invoice.issued}  {invoice.customer:14}  {invoice.euros:>8}")
    print(f"total {sum(invoice.euros for invoice in invoices)} euros after {done.iterations} turns")


if __name__ == "__main__":
    main()
