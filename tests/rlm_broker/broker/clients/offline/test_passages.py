"""Passages and counts: what is found in contexts of all kinds, where, and what is not."""

import random
from typing import Any

import pytest

from rlm_broker.broker.clients.offline.passages import BLOCK, LONG, find, look

FACTS = {
    "harbour": "The harbour of Port Llewyn froze over in the winter of 1893 for eleven weeks.",
    "lens": "Doctor Amara Venn grinds the telescope lenses by hand in a cellar below the bakery.",
    "ferry": "The last ferry to Skarholm departs at 21:40 from the eastern pier.",
    "budget": "The renovation of the theatre cost 48213 crowns, twice what the council approved.",
    "cat": "The library's cat is called Pepper and sleeps on the atlas shelf.",
    "bees": "Beekeepers on the island wear yellow because their hives are painted blue.",
    "bridge": "The rope bridge carries at most six travellers or one loaded mule.",
}
FILLER = (
    "The market opens early and the vendors arrange their baskets along the wall.",
    "Rain fell on the hills and the shepherds waited below the trees.",
    "A carpenter mended the door of the school before the holidays.",
    "Several letters arrived late because the road was closed for repairs.",
    "Children counted the swallows that returned to the roof of the mill.",
)


LINES = [*(" ".join(random.Random(seed).choices(FILLER, k=4)) for seed in range(1_000)), *FACTS.values()]
TEXT = "\n".join(random.Random(5).sample(LINES, len(LINES)))


def test_passage_is_quoted_with_its_place_and_its_words() -> None:
    cases = [
        ("When did the harbour of Port Llewyn freeze over?", "harbour", "harbour, Port, Llewyn; without: freeze"),
        ("Who grinds the telescope lenses by hand?", "lens", "grinds, telescope, lenses, hand"),
        ("Which person is grinding lenses?", "lens", "grinding, lenses; without: person"),
        ("When does the ferry for Skarholm leave?", "ferry", "ferry, Skarholm; without: leave"),
        ("What did renovating the theatre cost?", "budget", "theatre, cost; without: renovating"),
        ("Why do beekeepers wear yellow?", "bees", "beekeepers, wear, yellow"),
        ("How many travellers does the rope bridge carry?", "bridge", "travellers, rope, bridge, carry"),
        ("Which sentence has 'eekeeper'?", "bees", "eekeeper; without: sentence"),
    ]
    for question, fact, words in cases:
        offset = TEXT.index(FACTS[fact])
        place = f"line {TEXT.count(chr(10), 0, offset) + 1}, character {offset}"
        assert find(TEXT, question) == f"{FACTS[fact]}\nFound at {place}, by: {words}."


def test_absent_fact_is_not_found() -> None:
    for question in (
        "When did the harbour of Port Corbin freeze over?",  # another name
        "What did the renovation of the theatre cost in 1911?",  # another number
        "When did Doctor Amara Llewyn move?",  # names that stand apart
        "Who is the custodian of the backup passphrase?",
        "Does the word 'zeppelin' stand anywhere?",
        "What is it?",
    ):
        assert find(TEXT, question).startswith("NOT FOUND\n")
    contexts: tuple[object, ...] = ("", " \n\n ", {}, [], {"a.txt": ""}, [""], None, 7)
    for context in contexts:
        assert find(context, "Who keeps the keys?").startswith("NOT FOUND\n")
        assert find(context, "How many keys?") == "0 lines have key(s)."


def test_names_and_numbers_match_as_whole_words() -> None:
    text = (
        "The professor spoke at the festival.\nInvoice 13.5 was paid.\nInvoice 3.51 was paid.\nInvoice 482130 was paid."
    )
    for question in ("What did the professor say in Fes?", "Was invoice 3.5 paid?", "Was invoice 48213 paid?"):
        assert find(text, question).startswith("NOT FOUND\n")
    assert find(f"{text}\nIn Fes the professor ate figs.", "Where did the professor eat in Fes?").startswith("In Fes ")


def test_name_in_the_line_before_is_enough() -> None:
    text = "Bram Oduya lives here.\n{}The badge of the keeper is green."
    found = find(text.format(""), "Which badge has the keeper Oduya?")
    assert found.startswith("The badge of the keeper is green.\n")
    assert ", by: badge, keeper; without: Oduya." in found
    assert find(text.format("It rains.\n" * 50), "Which badge has the keeper Oduya?").startswith("Bram Oduya lives")


def test_up_to_three_alike_passages_are_quoted_and_each_line_once() -> None:
    text = (
        "ERROR disk 7 is full\nERROR disk 7 is full\nERROR disk 8 is full, too\nINFO disk\nERROR disk 9 is full, too\n"
    )
    lines = find(text * 3, "Which disk is full?").splitlines()
    assert lines[::2] == ["ERROR disk 7 is full", "Also: ERROR disk 8 is full, too", "Also: ERROR disk 9 is full, too"]
    assert lines[5] == "Found at line 5, character 78, by: disk, full."


def test_line_that_repeats_the_question_is_no_answer() -> None:
    question = "Where is the orchid kept?"
    text = f"{question}\nQ: {question}\n{TEXT}\nIs the orchid kept where it rains?\nThe orchid is kept behind glass.\n"
    assert find(text, question).startswith("The orchid is kept behind glass.\n")
    assert find(f"{question}\n{question}", question).startswith("NOT FOUND\n")


def test_instructions_beside_a_question_are_not_searched() -> None:
    question = "Why do beekeepers wear yellow? Give the reason alone. If the text does not say it, write UNKNOWN."
    assert find(TEXT, question).startswith(f"{FACTS['bees']}\n")
    assert find(TEXT, f"{TEXT}\n\n{question}").startswith(f"{FACTS['bees']}\n")


def test_file_item_and_row_are_named() -> None:
    files = {"db.toml": "timeout = 30\nretries = 2", "web.toml": "[http]\ntimeout = 90", "empty.toml": ""}
    assert find(files, "What is the timeout in web.toml?").startswith(
        "timeout = 90\nFound at web.toml, line 2, character 7"
    )
    items = [*FILLER * 1000, FACTS["bees"], *FILLER]
    assert find(items, "Why do beekeepers wear yellow?").splitlines()[1].startswith("Found at context[5000], line 1, ")
    rows: list[Any] = [{"name": f"Person {i}", "desk": {"floor": i % 7, "tags": ["a", None]}} for i in range(3000)]
    rows[2222]["desk"] = {"note": "beside the aquarium"}
    assert find(rows, "Who sits beside the aquarium?").startswith(
        "name: Person 2222; desk.note: beside the aquarium\nFound at context[2222], line 1"
    )
    chat = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "The printer is on floor 9."}]
    assert find(chat, "On which floor is the printer?").startswith(
        "role: assistant; content: The printer is on floor 9."
    )


def test_table_is_read_by_rows() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"name": [f"p{i}" for i in range(500)], "role": ["admin", "editor"] * 250})
    assert find(table, "What is the role of p401?").startswith("name: p401; role: editor\nFound at context[401]")
    assert find(table, "How many admins are there?").startswith(
        "250 lines have admin(s).\nFirst: name: p0; role: admin\n"
    )


def test_other_languages_are_found_by_their_words() -> None:
    filler = "Der Markt öffnet früh.\n今日は雨です。今天下雨。\n" * 400
    facts = {
        "Wer verwaltet den Schlüssel des Archivs?": "Frau Öztürk verwaltet den Schlüssel des Archivs seit 2011.",
        "Кто хранит ключ от архива?": "Ключ от архива хранит Мария Петрова.",
        "金庫の鍵はどこにありますか": "金庫の鍵は台所の棚にあります。",
        "保险柜的钥匙在哪里": "保险柜的钥匙在厨房的架子上。",
    }
    for question, fact in facts.items():
        assert find(f"{filler}{fact}\n{filler}", question).startswith(fact)


def test_long_line_is_quoted_by_a_sentence() -> None:
    text = " ".join(TEXT.splitlines())
    assert find(text, "When does the last ferry to Skarholm depart?").startswith(f"{FACTS['ferry']}\n")
    quote = find("word " * 50_000 + "keeper of bees " + "word " * 50_000, "Who is the keeper of bees?").splitlines()[0]
    assert "keeper of bees" in quote
    assert len(quote) <= 2 * LONG


def test_fact_across_the_border_of_two_blocks_is_found() -> None:
    for shift in range(0, len(FACTS["cat"]), 7):
        text = f"{'x' * 30}\n" * (BLOCK // 31 - 1)
        text = f"{text}{'y' * (BLOCK - len(text) - shift - 1)}\n{FACTS['cat']}\n"
        assert find(text, "What is the library's cat called?").startswith(f"{FACTS['cat']}\n")
        assert find(text, "How many lines contain 'called Pepper'?").startswith("1 line has 'called Pepper'.\n")


LOG = "INFO up\nERROR auth: no ERROR page\nWARNING errors\nWARN mail: slow\nERROR mail: 'full'\nERRORS\n"


def test_count_says_what_was_counted() -> None:
    answers = {
        "How many errors are there?": "2 lines have ERROR, 3 times in all.",
        "how many ERROR lines": "2 lines have ERROR, 3 times in all.",
        "How many warnings does the log have?": "2 lines have WARN.",
        "How many mail errors are there?": "1 line has mail(s) and ERROR.",
        "How often does mail occur?": "2 lines have mail(s).",
        "Count the lines that contain 'ERROR'": "3 lines have 'ERROR', 4 times in all.",
        'How many lines contain both "ERROR" and "mail"?': "1 line has 'ERROR' and 'mail'.",
        "How many lines contain 'zebra'?": "0 lines have 'zebra'.",
        "How many debug messages?": "0 lines have debug(s).",
        "How many lines are there?": "6 lines",
    }
    assert {question: find(LOG, question).splitlines()[0] for question in answers} == answers
    for condition in (
        "How many lines do not contain 'mail'?",
        "How many lines contain 'ERROR' or 'WARN'?",
        "How many more errors than warnings are there?",
        "How many times?",
    ):
        answer = find(LOG, condition)
        assert answer.startswith("NOT FOUND\n") or " by: " in answer  # a condition is not dropped


def test_count_shows_the_first_line_and_its_file() -> None:
    assert find({"a": "INFO up\n", "b": LOG}, "How many errors?").splitlines()[1:] == [
        "First: ERROR auth: no ERROR page",
        "Found at b, line 2, character 8.",
    ]
    assert find({"a": "one\ntwo\n", "b": "three"}, "How many lines are there?") == "3 lines in 2 parts"


def test_look_shows_type_size_and_beginning() -> None:
    assert look("abc" * 1000) == f"str of length 3,000\n{'abc' * 1000:.500}"
    assert look({"a.txt": "one", "b.txt": "two"}) == "dict of length 2\na.txt: one\nb.txt: two"
    assert look([{"name": "Ann"}]) == "list of length 1\ncontext[0]: name: Ann"
    assert look(None) == "NoneType\n: None"
