"""A code interpreter: a file in, code over it, a table to look at, a program, a typed answer, a file out."""

from rlm_broker import Sandbox

SALES = "region,units\nnorth,30\nsouth,12\nnorth,5\n"

SUMMARISE = """
import collections, csv, json

units = collections.Counter()
for row in csv.DictReader(open("sales.csv")):
    units[row["region"]] += int(row["units"])
json.dump(units, open("units.json", "w"))


class Table:
    def _repr_html_(self):
        rows = "".join(f"<tr><td>{region}<td>{count}" for region, count in units.items())
        return f"<table>{rows}</table>"


Table()
"""

with Sandbox() as sandbox, sandbox.repl() as repl:
    repl.files.write("sales.csv", SALES.encode())
    for display in repl.execute(SUMMARISE).displays:
        print(display.data["text/html"])
    if sandbox.level == "strict":  # where all that a program starts can be found and ended
        print(repl.run(["sort", "-t,", "-k2n", "sales.csv"]).stdout.splitlines()[-1])
    answer = repl.execute("SUBMIT(region='north', units=units['north'])", submit={"region": str, "units": int})
    print(answer.final_value)
    print(repl.files.read("units.json").decode())
