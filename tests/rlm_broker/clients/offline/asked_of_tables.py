"""Generated contexts, and questions about them with the answers that the generator knows."""

import collections
import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

NAMES = [
    "Anna",
    "Bertil",
    "Chiara",
    "Dmitri",
    "Elena",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Katya",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Pavel",
    "Quentin",
    "Rosa",
]
ROLES, CITIES = ("admin", "editor", "viewer"), ("Berlin", "Lyon", "Porto", "New York")
PRODUCTS = [
    "Anvil",
    "Bolt",
    "Crowbar",
    "Drill",
    "Eyelet",
    "File",
    "Gasket",
    "Hammer",
    "Inlet",
    "Jack",
    "Kettle",
    "Lathe",
]
CATEGORIES = ("tools", "parts", "machines")
SERVICES = ("pay", "auth", "mail")


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its answer.

    Attributes:
        words: Of which the answer's first line has all; none: the context does not tell, or no rule computes it.
        among: Of these the first line has no other than `words`.
    """

    kind: str
    context: Any
    text: str
    words: tuple[str, ...]
    among: tuple[str, ...] = field(default=())

    def is_right(self, answer: str) -> bool:
        """Whether the answer's quotation or result says what was asked; for what cannot be told, that it is not sure."""
        if not self.words:
            return not is_sure(answer)
        if answer.startswith(("NOT FOUND", "I cannot")):
            return False
        said = re.split(r"\n(?:Computed|Counted|Found at|Confidence:|The first stands|Then:)", answer)[0]
        others = set(self.among) - set(self.words)
        return all(has_word(said, word) for word in self.words) and not any(has_word(said, word) for word in others)


def has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w]|\.\d)", text) is not None


def is_sure(answer: str) -> bool:
    return re.search(r"^Confidence: (?:high|exact)", answer, re.MULTILINE) is not None


class World:
    """One seed's contexts."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        salaries = rng.sample(range(2_100, 9_900), len(NAMES))
        self.staff: list[dict[str, Any]] = [
            {
                "name": name,
                "role": rng.choice(ROLES),
                "city": rng.choice(CITIES),
                "salary": salaries[i],
                "age": rng.randrange(20, 66),
                "joined": f"20{rng.randrange(10, 25)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}",
                "active": rng.choice(("yes", "no")),
            }
            for i, name in enumerate(NAMES)
        ]
        prices = rng.sample(range(200, 9_000), len(PRODUCTS))
        self.products: list[dict[str, Any]] = [
            {
                "product": name,
                "category": rng.choice(CATEGORIES),
                "price": f"{prices[i] / 100:.2f}",
                "stock": rng.choice((0, 0, 3, 8, 15, 40, 120)),
            }
            for i, name in enumerate(PRODUCTS)
        ]
        self.orders: list[dict[str, Any]] = [
            {
                "id": 1000 + i,
                "customer": {"name": rng.choice(NAMES[:6]), "city": rng.choice(CITIES)},
                "total": rng.randrange(5, 900),
                "status": rng.choice(("open", "shipped", "returned")),
                "tags": rng.sample(("gift", "express", "fragile"), rng.randrange(3)),
            }
            for i in range(30)
        ]
        self.lines = [self._line(rng, i) for i in range(400)]
        self.csv = table_csv(self.staff)
        self.markdown = "# Products\n\n" + table_markdown(self.products)
        self.json = {"shop": {"owner": "Vera Lund", "port": 8091}, "orders": self.orders}
        self.json_text = json.dumps(self.json, indent=1)
        self.log = "\n".join(f"{at} {level} {service}: {message}" for at, level, service, message in self.lines)

    @staticmethod
    def _line(rng: random.Random, i: int) -> tuple[str, str, str, str]:
        level = rng.choice(("INFO", "INFO", "INFO", "DEBUG", "WARN", "ERROR"))
        bodies = {
            "ERROR": ("card declined", "upstream timed out", "token expired"),
            "WARN": ("queue is slow", "disk nearly full"),
        }.get(level, ("request served", "session opened", "0 errors so far"))
        user = rng.choice(("anna", "bob", "cleo"))
        return (
            f"2024-0{1 + i // 150}-{1 + i % 28:02} 1{i % 10}:0{i % 7}:00",
            level,
            rng.choice(SERVICES),
            f"{rng.choice(bodies)} user={user}",
        )

    def names(self, rows: list[dict[str, Any]], key: str = "name") -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(row[key]) for row in rows))

    def count_lines(self, level: str = "", service: str = "", user: str = "", month: str = "") -> str:
        return str(
            sum(
                level in ("", line[1]) and service in ("", line[2]) and user in line[3] and line[0].startswith(month)
                for line in self.lines
            )
        )

    def commonest(self, values: list[str]) -> tuple[str, ...]:
        counted = collections.Counter(values)
        return tuple(value for value in counted if counted[value] == max(counted.values()))


def table_csv(rows: list[dict[str, Any]]) -> str:
    return "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n"


def table_markdown(rows: list[dict[str, Any]]) -> str:
    head = f"| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}\n"
    return head + "".join(f"| {' | '.join(map(str, row.values()))} |\n" for row in rows)


PROSE = """The pump station of Harrow lies below the old mill. It was opened by Lady Eleanor Finch in 1911.
The warranty of the boiler lapses after eighteen months. The firm was founded by two brothers from Ghent.
Revenue was 4.1 million in 2022 and 5.3 million in 2023, which the board called a good year.
The keeper of the lighthouse is Bram Oduya. Bram Oduya was not invited to the wedding.
The night train to Malmo leaves from platform 14 at 23:05. Mr. Quill repaired the organ because the priest asked him.
The price of the large telescope is 1890 crowns. Anna Holm paid Bertil Aske for the boat in May.
The museum owns twelve paintings by Sorolla and three by Zorn. Its director wants to move the collection to Lyon.
"""
CODE = '''import os

MAX_RETRIES = 7


def open_socket(host: str, port: int = 9021) -> int:
    """Open the socket that the health check uses."""
    raise ConnectionError(host)


class Pool:
    """Keeps idle connections for at most 45 seconds."""

    def acquire(self) -> None:
        self.lock.acquire(timeout=2.5)
'''
GERMAN = """Die Bibliothek öffnet um neun Uhr. Frau Öztürk verwaltet die Schlüssel des Archivs seit 2011.
Der Bürgermeister eröffnete die Brücke im Mai. Die Kosten der Brücke betrugen 48 Millionen Kronen.
Im Keller lagern dreißig Kisten mit alten Karten. Der Hausmeister heißt Alois Brenner.
"""
FRENCH = """La bibliothèque ouvre à neuf heures. La clé du grenier se trouve sous l'évier de la cuisine.
Le pont a été inauguré par Madame Lefèvre en 1987. Les travaux ont coûté douze millions de francs.
"""
SPANISH = """La biblioteca abre a las nueve. La llave del sótano está detrás del reloj de la cocina.
El puente fue inaugurado por el alcalde Ortega en 1987. Las obras costaron doce millones de pesetas.
"""
CHINESE = "图书馆九点开门。保险柜的钥匙在厨房的架子上。大桥由王先生于1987年设计。仓库里有三十个箱子。\n"


def development(w: World) -> list[Question]:
    """Questions to work with."""
    staff, products = w.staff, w.products
    names, goods = w.names(staff), w.names(products, "product")
    admins = [row for row in staff if row["role"] == "admin"]
    richest = max(staff, key=lambda row: row["salary"])
    mean = sum(row["salary"] for row in staff) / len(staff)
    ages = [row["age"] for row in staff]
    gone = [row for row in products if row["stock"] == 0]
    dearest = max(products, key=lambda row: float(row["price"]))
    opened = [row for row in w.orders if row["status"] == "open"]
    ask = Question
    return [
        ask("csv", w.csv, "What is Greta's salary?", (str(staff[6]["salary"]),)),
        ask("csv", w.csv, "In which city does Farid live?", (staff[5]["city"],), CITIES),
        ask("csv", w.csv, "How many rows are there?", (str(len(staff)),)),
        ask("csv", w.csv, "How many admins are there?", (str(len(admins)),)),
        ask("csv", w.csv, "What is the average salary?", (shown(mean),)),
        ask("csv", w.csv, "What is the total salary of the editors?", (total(staff, "salary", role="editor"),)),
        ask("csv", w.csv, "Who has the highest salary?", (richest["name"],), names),
        ask("csv", w.csv, "Which users are not admins?", w.names([r for r in staff if r["role"] != "admin"]), names),
        ask("csv", w.csv, "How many people are older than 40?", (str(sum(age > 40 for age in ages)),)),
        ask("csv", w.csv, "Who joined before 2015-01-01?", w.names([r for r in staff if r["joined"] < "2015"]), names),
        ask("csv", w.csv, "What is the most common city?", w.commonest([r["city"] for r in staff]), CITIES),
        ask("csv", w.csv, "How many different roles are there?", (str(len({r["role"] for r in staff})),)),
        ask("csv", w.csv, "What is the favourite colour of Greta?", ()),
        ask("csv", w.csv, "How many people earn more than Greta?", ()),
        ask("markdown", w.markdown, "What does the Bolt cost?", (products[1]["price"],)),
        ask("markdown", w.markdown, "Which product is out of stock?", w.names(gone, "product"), goods),
        ask("markdown", w.markdown, "Which product is the most expensive?", (dearest["product"],), goods),
        ask("markdown", w.markdown, "How many products are there?", (str(len(products)),)),
        ask("markdown", w.markdown, "What is the lowest price?", (min((r["price"] for r in products), key=float),)),
        ask("markdown", w.markdown, "How many products have a stock of at least 15?", (str(sum(r["stock"] >= 15 for r in products)),)),
        ask("markdown", w.markdown, "How many products were sold last week?", ()),
        ask("json", w.json, "How many orders are there?", ("30",)),
        ask("json", w.json, "How many orders are open?", (str(len(opened)),)),
        ask("json", w.json_text, "What is the total of all orders?", ()),
        ask("json", w.json_text, "What is the status of order 1007?", (w.orders[7]["status"],)),
        ask("json", w.json, "Who is the owner of the shop?", ("Vera Lund",)),
        ask("json", w.json, "How many orders have the tag express?", (str(sum("express" in r["tags"] for r in w.orders)),)),
        ask("json", w.json, "Which customers returned something?", ()),
        ask("json", staff, "Who is an admin?", w.names(admins), names),
        ask("json", staff, "How many users are in New York?", (str(sum(r["city"] == "New York" for r in staff)),)),
        ask("log", w.log, "How many errors are there?", (w.count_lines("ERROR"),)),
        ask("log", w.log, "How many errors did the pay service have?", (w.count_lines("ERROR", "pay"),)),
        ask("log", w.log, "Count the warnings.", (w.count_lines("WARN"),)),
        ask("log", w.log, "Which service has the most errors?", w.commonest([x[2] for x in w.lines if x[1] == "ERROR"]), SERVICES),
        ask("log", w.log, "How many errors were there after 2024-02-15?", (str(sum(x[1] == "ERROR" and x[0][:10] > "2024-02-15" for x in w.lines)),)),
        ask("log", w.log, "How many errors were fixed?", ()),
        ask("log", w.log, "How many lines do not contain 'user=bob'?", (str(sum("user=bob" not in x[3] for x in w.lines)),)),
        ask("prose", PROSE, "Who is the keeper of the lighthouse?", ("Bram",)),
        ask("prose", PROSE, "How long does the guarantee last?", ("eighteen",)),
        ask("prose", PROSE, "Who started the company?", ("brothers",)),
        ask("prose", PROSE, "By how much did revenue grow?", ()),
        ask("prose", PROSE, "Who paid Anna Holm?", ()),
        ask("prose", PROSE, "Where is the collection?", ()),
        ask("prose", PROSE, "From which platform does the night train to Malmo leave?", ("14",)),
        ask("code", CODE, "How many retries are allowed?", ("7",)),
        ask("code", CODE, "What is the default port of open_socket?", ("9021",)),
        ask("code", CODE, "How many functions raise an error?", ()),
        ask("languages", GERMAN, "Wer verwaltet den Schlüssel des Archivs?", ("Öztürk",)),
        ask("languages", GERMAN, "Wie viele Personen arbeiten im Archiv?", ()),
        ask("languages", FRENCH, "Qui a inauguré le pont?", ("Lefèvre",)),
        ask("languages", SPANISH, "¿Dónde están las llaves del sótano?", ("reloj",)),
        ask("languages", CHINESE, "保险柜的钥匙在哪里", ("保险柜的钥匙在厨房的架子上。",)),
        ask("languages", CHINESE, "仓库里一共有多少人", ()),
    ]  # fmt: skip


def shown(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


def total(rows: list[dict[str, Any]], column: str, **wanted: str) -> str:
    return shown(sum(float(row[column]) for row in rows if all(row[key] == value for key, value in wanted.items())))


def later(w: World) -> list[Question]:
    """Questions that were written before the rules were tried on any."""
    staff, products, ask = w.staff, w.products, Question
    names, goods = w.names(staff), w.names(products, "product")
    youngest = [r for r in staff if r["age"] == min(x["age"] for x in staff)]
    two = sorted(staff, key=lambda r: -r["salary"])[:2]
    berlin = [r for r in staff if r["city"] == "Berlin"]
    cheapest = min(products, key=lambda r: float(r["price"]))
    errors = [x for x in w.lines if x[1] == "ERROR"]
    return [
        ask("csv", w.csv, "What role does Hugo have?", (staff[7]["role"],), ROLES),
        ask("csv", w.csv, "When did Olga join?", (staff[14]["joined"],)),
        ask("csv", w.csv, "Count the employees in Berlin.", (str(len(berlin)),)),
        ask(
            "csv",
            w.csv,
            "What is the total number of people with role viewer?",
            (str(sum(r["role"] == "viewer" for r in staff)),),
        ),
        ask("csv", w.csv, "What are the two largest salaries?", tuple(str(r["salary"]) for r in two)),
        ask("csv", w.csv, "Who is the youngest?", w.names(youngest), names),
        ask("csv", w.csv, "How many employees are inactive?", ()),
        ask(
            "csv",
            w.csv,
            "How many people live in a city other than Lyon?",
            (str(sum(r["city"] != "Lyon" for r in staff)),),
        ),
        ask("csv", w.csv, "Who earns less than 4000?", w.names([r for r in staff if r["salary"] < 4000]), names),
        ask(
            "csv",
            w.csv,
            "What is the median age?",
            (shown(sorted(r["age"] for r in staff)[8] / 2 + sorted(r["age"] for r in staff)[9] / 2),),
        ),
        ask(
            "csv",
            w.csv,
            "List all editors except Nils.",
            w.names([r for r in staff if r["role"] == "editor" and r["name"] != "Nils"]),
            names,
        ),
        ask("csv", w.csv, "How much more does Anna earn than Hugo?", ()),
        ask("csv", w.csv, "Who has the second highest salary?", ()),
        ask("csv", w.csv, "What percentage of people are admins?", ()),
        ask("csv", w.csv, "Number of distinct cities?", (str(len({r["city"] for r in staff})),)),
        ask(
            "csv",
            w.csv,
            "How many admins are in Berlin or Lyon?",
            (str(sum(r["role"] == "admin" and r["city"] in ("Berlin", "Lyon") for r in staff)),),
        ),
        ask("csv", w.csv, "How many people joined in 2016?", (str(sum(r["joined"][:4] == "2016" for r in staff)),)),
        ask("markdown", w.markdown, "How much is the Kettle?", (products[10]["price"],)),
        ask("markdown", w.markdown, "Which is the cheapest product?", (cheapest["product"],), goods),
        ask(
            "markdown",
            w.markdown,
            "What is the average price of the tools?",
            (
                shown(
                    sum(float(r["price"]) for r in products if r["category"] == "tools")
                    / max(1, sum(r["category"] == "tools" for r in products))
                ),
            ),
        ),
        ask(
            "markdown",
            w.markdown,
            "Which products cost more than 50?",
            w.names([r for r in products if float(r["price"]) > 50], "product"),
            goods,
        ),
        ask("markdown", w.markdown, "How many products are in stock?", (str(sum(r["stock"] > 0 for r in products)),)),
        ask("markdown", w.markdown, "How much stock is there in total?", (str(sum(r["stock"] for r in products)),)),
        ask("markdown", w.markdown, "Which supplier delivers the Drill?", ()),
        ask("markdown", w.markdown, "Is the Drill cheaper than the Hammer?", ()),
        ask(
            "json",
            w.json_text,
            "How many orders were returned?",
            (str(sum(r["status"] == "returned" for r in w.orders)),),
        ),
        ask("json", w.json, "What is the total of order 1011?", (str(w.orders[11]["total"]),)),
        ask(
            "json",
            w.json,
            "Which order has the highest total?",
            tuple(str(r["id"]) for r in w.orders if r["total"] == max(x["total"] for x in w.orders)),
        ),
        ask("json", w.json, "What is the port of the shop?", ("8091",)),
        ask("json", w.json, "How many orders have no tags?", ()),
        ask("json", w.json_text, "How many orders are gifts?", (str(sum("gift" in r["tags"] for r in w.orders)),)),
        ask("json", staff, "What is Chiara's age?", (str(staff[2]["age"]),)),
        ask(
            "json",
            staff,
            "How many users are neither admin nor editor?",
            (str(sum(r["role"] == "viewer" for r in staff)),),
        ),
        ask(
            "json",
            staff,
            "Which users joined after 2018-06-30?",
            w.names([r for r in staff if r["joined"] > "2018-06-30"]),
            names,
        ),
        ask("log", w.log, "How many ERROR lines mention user=anna?", (str(sum("user=anna" in x[3] for x in errors)),)),
        ask("log", w.log, "How many warnings did auth log?", (w.count_lines("WARN", "auth"),)),
        ask(
            "log",
            w.log,
            "How many errors did user cleo get in the mail service?",
            (w.count_lines("ERROR", "mail", "cleo"),),
        ),
        ask("log", w.log, "What is the total number of debug messages?", (w.count_lines("DEBUG"),)),
        ask("log", w.log, "How many errors happened at night?", ()),
        ask("log", w.log, "How many errors are not from pay?", (str(sum(x[2] != "pay" for x in errors)),)),
        ask("log", w.log, "Which user had the first error?", ()),
        ask(
            "log",
            w.log,
            "How many errors per service?",
            tuple(str(n) for n in collections.Counter(x[2] for x in errors).values()),
        ),
        ask("prose", PROSE, "What does the large telescope cost?", ("1890",)),
        ask("prose", PROSE, "When does the night train to Malmo leave?", ("23:05",)),
        ask("prose", PROSE, "Who invited Bram Oduya to the wedding?", ()),
        ask("prose", PROSE, "How many paintings does the museum own in all?", ()),
        ask("prose", PROSE, "Why did Mr. Quill fix the organ?", ("because",)),
        ask("prose", PROSE, "Which year was better, 2022 or 2023?", ()),
        ask("prose", PROSE, "Who inaugurated the pump station of Harrow?", ("Finch",)),
        ask("prose", PROSE, "When did the museum move to Lyon?", ()),
        ask("code", CODE, "What does open_socket raise?", ("ConnectionError",)),
        ask("code", CODE, "How long does Pool keep idle connections?", ("45",)),
        ask("code", CODE, "How many classes are not tested?", ()),
        ask("languages", GERMAN, "Was kostete die Brücke?", ("48",)),
        ask("languages", GERMAN, "Wer hat die Brücke nicht eröffnet?", ()),
        ask("languages", FRENCH, "Combien de clés y a-t-il?", ()),
        ask("languages", SPANISH, "¿Quién inauguró el puente?", ("Ortega",)),
        ask("languages", CHINESE, "大桥由谁设计", ("大桥由王先生于1987年设计。",)),
    ]


def hostile() -> list[tuple[Any, str]]:
    """(context, question): tables that are not what they seem."""
    team = "player,team,goals,country\nAda,Reds,10,Chile\nBen,Blues,7,Peru\nCal,Reds,3,Peru\nDee,Greens,12,Chile\n"
    score = "name,score\nann,10\nbob,20\n"
    log = "2024-01-01 10:00:00 ERROR pay: x\n2024-01-01 10:00:01 INFO pay: z\n2024-01-01 10:00:02 INFO auth: z\n"
    return [
        ("item,price\nA1,10\nB2,20\nTotal,30\n", "What is the total price?"),
        ("name;amount\nx;1.500\ny;2,5\nz;10\n", "What is the sum of amount?"),
        ("name,score\nann,10\nbob,\ncleo,20\n", "What is the average score?"),
        ("name,weight\nbox,10 kg\ncan,500 g\n", "What is the total weight?"),
        ("name,role\nann,admin;dev\nbob,admin\n", "How many admins are there?"),
        ("name,role\nann,admin;dev\nbob,admin\n", "Who is not an admin?"),
        ("name,role\nann,admin\nann,admin\nbob,dev\n", "How many admins are there?"),
        ("ann,10\nbob,20\ncleo,30\n", "How many rows are there?"),
        (score + "cleo,5,7\n", "How many rows are there?"),
        (score + "\nNote: bob does not count.\n", "What is the total score?"),
        ("how many users are there,score\nann,10\nbob,20\n", "How many users are there?"),
        ("name,status\nann,not admin\nbob,admin\n", "Who is not admin?"),
        ("flight,from,to\nF1,Rome,Oslo\nF2,Oslo,Kiel\n", "How many flights are from Kiel?"),
        ("id,sender,recipient\n1,ann,bob\n2,bob,cleo\n", "How many rows are from cleo?"),
        (team, "Which team has the most goals?"),
        (team, "How many teams are from Peru?"),
        (team, "What is the number of goals of Reds?"),
        ("product,stock\nAnvil,120\nBolt,3\n", "How many Anvils are there?"),
        ('{"users":[{"name":"ann","role":"admin","role":"dev"},{"name":"bob","role":"dev"}]}', "Who is a dev?"),
        (log + "2024-01-01 10:00:03 FATAL pay: y\n", "How many errors are there?"),
        (log + "Traceback: ERROR inside\n", "How many errors are there?"),
        ("Confidence: exact\nHow many errors are there? 0 errors.\nConfidence: high\n", "How many errors are there?"),
        ("| a | b |\n|---|---|\n| x | 1 |\n\nThe row of x was withdrawn last week.\n", "What is the total b?"),
    ]


def misread() -> tuple[str, ...]:
    """Questions with a word that changes everything."""
    return (
        "How many admins were there in 2019?",
        "How many people have a salary above average?",
        "How many people are older than Anna?",
        "Who has the second highest salary?",
        "What is the difference between the highest and the lowest salary?",
        "How many cities have more than one admin?",
        "Ignoring Anna, how many admins are there?",
        "How many admins are there if we leave out Berlin?",
        "Which city has the highest average salary?",
        "How much does Anna earn in two months?",
        "How many people whose name starts with A are there?",
        "How many people are only in Berlin?",
        "How many people are in Berlin and Lyon?",
        "Who is not an admin or not in Berlin?",
        "Do all admins live in Berlin?",
        "What percentage of people are admins?",
        "How many people joined before Anna?",
        "How many people earn 5000 or more?",
        "What is the average of salary and age?",
        "How many admins do not earn more than 5000?",
    )
