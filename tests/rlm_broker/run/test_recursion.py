"""Judgement whether a child gets a REPL under `recursion="auto"`: by size and form, in any language."""

import json

from rlm_broker.run.children import LOOKED_AT_CHARS, divided, looks_like_data, needs_repl
from tests.support.tables import table

# ruff: noqa: RUF001 - punctuation of Chinese is meant

WINDOW = 128_000
ENGLISH = [
    "On 14 March 1879 the harbour office wrote to the council, and asked for a new crane.",
    "The old one, which had been bought in 1851 for 1,200 pounds, could lift no more than two tons; it was loud, too.",
    "Nothing was decided in that year.",
    "The clerk noted that the council was tired, that it had started to rain, and that the candles were short.",
    "When the members met again they had forgotten what the letter said",
]
GERMAN = [
    "Am 14. März 1879 schrieb das Hafenamt an den Rat, der seit Wochen nicht getagt hatte, und bat um einen Kran.",
    "Der alte, den man 1851 für 1.200 Pfund gekauft hatte, hob nicht mehr als zwei Tonnen; außerdem war er laut.",
    "Beschlossen wurde nichts.",
    "Der Schreiber vermerkte, dass der Rat müde gewesen sei und dass es zu regnen begonnen habe.",
    "Als man sich wieder traf, wusste niemand mehr, was in dem Brief stand, den alle gelesen hatten.",
]
CHINESE = [
    "一八七九年三月十四日，港务处致函市议会，请求购置一台新的起重机，并附上了详细的说明和一份费用的估算。",
    "旧的那台是1851年花了1200英镑买来的，最多只能吊起两吨重的货物；而且声音很大，附近的居民常常抱怨。",
    "那一年什么也没有决定。",
    "书记员记下了议会的疲倦，也记下了窗外开始下雨，蜡烛已经快要烧完，大家都想早一点回家去休息。",
    "等他们再次开会的时候，已经没有人记得信里写了什么。",
]


def prose(sentences: list[str], between: str, paragraphs: int) -> str:
    """Paragraphs of one to five sentences each."""
    chosen = ([sentences[(n * 3 + place) % 5] for place in range(1 + n * 7 % 5)] for n in range(paragraphs))
    return between.join(" ".join(each) for each in chosen)


PROSE = {
    "English": prose(ENGLISH, "\n\n", 45),
    "English, a line each": prose(ENGLISH, "\n", 45),
    "German": prose(GERMAN, "\n\n", 45),
    "Chinese": prose(CHINESE, "\n\n", 100),
    "one line": prose(ENGLISH, " ", 45),
}
DATA = {
    "numbers": " ".join(str(number * 7919 % 1000) for number in range(300)),
    "numbers in lines": "\n".join(f"{number * 0.37:.2f}" for number in range(300)),
    "CSV": "name,city,amount\n" + "\n".join(f"Person {n},Town {n % 7},{n * 3}" for n in range(50)),
    "CSV with quotes": "\n".join(f'"Last, First {n}",some words here and there,{n},yes' for n in range(50)),
    "semicolons": "\n".join(f"a longer name of something {n};and a remark;{n}" for n in range(50)),
    "tabs": "\n".join(f"a longer name of something {n}\tand a remark\t{n}" for n in range(50)),
    "Markdown table": "| name | what | sum |\n|---|---|---|\n"
    + "\n".join(f"| some name {n} | what it is about | {n} |" for n in range(50)),
    "JSON object": json.dumps({"rows": [{"name": "a", "text": ENGLISH[0]}] * 5}),
    "JSON array": json.dumps([{"a": n} for n in range(50)], indent=2),
    "JSON numbers": "[1, 2, 3]",
    "JSON lines": "\n".join(json.dumps({"event": "login", "user": n}) for n in range(50)),
    "list": "\n".join(f"- item {n}" for n in range(20)),
    "Chinese list": "\n".join(f"{n}. 第{n}项的名称" for n in range(20)),
    "German list": "\n".join(["Äpfel", "Birnen", "Kürbisse", "Möhren"] * 5),
}


def test_prose_that_a_model_can_read_needs_no_repl() -> None:
    for name, text in PROSE.items():
        assert len(text.encode()) > 10_000, name
        assert not needs_repl("Summarise this.", text, len(text), WINDOW), name
        assert not needs_repl(*divided(f"Summarise this.\n\n{text}"), len(text), WINDOW), name
        assert not needs_repl(*divided(f"{text}\n\n这里说了什么？"), len(text), WINDOW), name
        assert needs_repl("Summarise this.", text, WINDOW * 2 + 1, WINDOW), name  # too long for the model
        assert not needs_repl("Summarise this.", text, WINDOW * 2, WINDOW), name


def test_data_is_for_code() -> None:
    for name, text in DATA.items():
        assert needs_repl("What is this about?", text, len(text), WINDOW), name
        assert looks_like_data(text), name
    for name in ("numbers", "CSV", "Markdown table", "JSON array", "list"):
        text = DATA[name] * 4
        assert needs_repl(*divided(f"Was ist die Summe?\n{text}\nAntworte kurz."), len(text), WINDOW), name


def test_code_in_the_task_asks_for_code() -> None:
    assert needs_repl("Run this:\n```python\nprint(1)\n```", "", 40, WINDOW)


def test_short_text_without_signs_is_no_data() -> None:
    texts = ["", " ", "\n\n", "A short question?", "1, 2, 3", "a\nb\nc", "[see above] he said"]
    assert not [text for text in texts if looks_like_data(text)]


def test_no_more_is_looked_at_than_a_beginning() -> None:
    assert not needs_repl("?", PROSE["one line"] * 10 + DATA["CSV"] * 100, LOOKED_AT_CHARS, WINDOW)


# -- boundaries ------------------------------------------------------------------------------------------------------


def lines(count: int, chars: int) -> str:
    return "\n".join(["x" * chars] * count)


def test_list_has_eight_short_lines_or_more() -> None:
    """A list has eight lines or more, of at most 40 characters each on average. Empty lines do not count."""
    spaced = "\n\n \n"
    lists = [lines(8, 10), lines(8, 40), spaced.join(["x" * 40] * 8)]
    others = [lines(7, 10), lines(8, 41), lines(7, 40) + "\n" + "x" * 41, spaced.join(["x" * 40] * 7)]
    assert [looks_like_data(text) for text in (*lists, *others)] == [True] * 3 + [False] * 4


@table("separator", [",", ";", "\t", "|"])
def test_table_lines_share_two_separators(separator: str) -> None:
    """Four of five lines of a table have the same two separators or more."""
    cases = {(8, 0, 2): True, (8, 0, 1): False, (7, 0, 2): False, (8, 2, 2): True, (7, 2, 2): False, (8, 2, 3): True}
    found = {
        (rows, others, separators): looks_like_data(
            "\n".join([*[f"some words{separator}" * separators + "x" * 60] * rows, *["words " * 20] * others])
        )
        for rows, others, separators in cases
    }
    assert found == cases


def test_text_with_a_quarter_of_digits_is_data() -> None:
    """Text is data if more than a quarter of its 300 characters other than spaces are digits."""
    cases = {(76, 224): True, (75, 225): False, (76, 223): False, (300, 0): True}
    assert {(n, m): looks_like_data(f"{'7' * n} {'x' * m} ") for n, m in cases} == cases


def test_twenty_thousand_characters_are_looked_at() -> None:
    for at, is_seen in ((19_999, True), (20_000, False)):
        text = ("a\n" * 7).ljust(at, "\n") + "the eighth line"
        assert needs_repl("?", text, len(text), WINDOW) is is_seen


def test_task_is_first_and_last_line() -> None:
    a, b, c = "a" * 300, "b" * 600, "c" * 300
    assert divided("x" * 600) == ("x" * 600, "")
    assert divided(f"{a}b{c}") == (f"{a}\n{c}", "b")
    assert divided(f"first\n{b}\nmiddle\nlast") == ("first\nlast", f"\n{b}\nmiddle\n")
    assert divided(f"first\nsecond\n{b}\nlast") == ("first\nlast", f"\nsecond\n{b}\n")
    assert divided(f"{a}\nbbb\n{c}") == (f"{a}\n{c}", "\nbbb\n")


def test_half_of_the_models_size_is_not_too_long() -> None:
    assert not needs_repl("?", "", 80, 40)
    assert needs_repl("?", "", 81, 40)
