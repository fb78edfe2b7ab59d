"""The offline model in a loop: its code runs in a small stand-in for the REPL, its sub-calls go to itself."""

import asyncio
import contextlib
import io
import random
from typing import Any

import pytest

from rlm_broker.clients.base import LMRequest
from rlm_broker.clients.offline import OfflineClient
from rlm_broker.parsing import parse_reply
from rlm_broker.results import ChatMessage


class Ended(BaseException):
    """End of a block, as FINAL_VAR raises it."""


def turn(question: str | None, *messages: ChatMessage) -> str:
    request = LMRequest(messages or (ChatMessage("user", "go on"),), question=question, is_loop=True)
    return asyncio.run(OfflineClient().complete(request)).text


def ask(question: str, context: object, prompts: list[str] | None = None, failure: str | None = None) -> str:
    """The answer of a run of one turn. `prompts` collects the sub-calls; `failure` is what each of them returns."""

    def llm_query_batched(batch: list[str]) -> list[str]:
        if prompts is not None:
            prompts.extend(batch)
        client = OfflineClient()
        requests = [LMRequest((ChatMessage("user", text),), depth=1, question=question) for text in batch]
        return [failure or asyncio.run(client.complete(request)).text for request in requests]

    def final_var(name: str) -> None:
        raise Ended(names[name])

    names: dict[str, Any] = {"context": context, "llm_query_batched": llm_query_batched, "FINAL_VAR": final_var}
    blocks = parse_reply(turn(question)).code
    assert len(blocks) == 2
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks[0], names)
        with pytest.raises(Ended) as ended:
            exec(blocks[1], names)
    assert printed.getvalue().startswith("context: ")
    answer = ended.value.args[0]
    assert isinstance(answer, str)
    assert answer.splitlines()[-1].startswith("This is the offline model")
    assert "--model NAME" in answer
    return answer


FACTS = {
    "harbour": "The harbour of Port Llewyn froze over in the winter of 1893 for eleven weeks.",
    "lens": "Doctor Amara Venn grinds the telescope lenses by hand in a cellar below the bakery.",
    "ferry": "The last ferry to Skarholm departs at 21:40 from the eastern pier.",
    "orchid": "The greenhouse keeps its rarest orchid, a gift from Lisbon, behind green glass.",
    "budget": "The renovation of the theatre cost 48213 crowns, twice what the council approved.",
    "cat": "The library's cat is called Pepper and sleeps on the atlas shelf.",
    "recipe": "Old Tobias adds cardamom and burnt sugar to the winter punch.",
    "clock": "The tower clock runs four minutes fast because the pendulum was repaired badly.",
    "code": "The combination for the archive safe is 77-31-09.",
    "bees": "Beekeepers on the island wear yellow because their hives are painted blue.",
    "mayor": "Mayor Ottoline Brask resigned after the flood and now paints boats.",
    "bridge": "The rope bridge carries at most six travellers or one loaded mule.",
}
FILLER = (
    "The market opens early and the vendors arrange their baskets along the wall.",
    "Rain fell on the hills and the shepherds waited below the trees.",
    "A carpenter mended the door of the school before the holidays.",
    "Several letters arrived late because the road was closed for repairs.",
    "In the evening the musicians practised a slow dance in the square.",
    "Children counted the swallows that returned to the roof of the mill.",
    "The council met on a Thursday and talked about drains for three hours.",
)


def corpus(size: int = 300_000, seed: int = 5) -> str:
    """Prose of `size` characters, several sentences a line, with every fact somewhere in it."""
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(FILLER, k=rng.randrange(1, 5))) for _ in range(size // 180)]
    for fact in FACTS.values():
        lines.insert(rng.randrange(len(lines)), f"{rng.choice(FILLER)} {fact} {rng.choice(FILLER)}")
    return "\n".join(lines)


TEXT = corpus()

STATED_OTHERWISE = ("orchid", "bridge")
"""The place is not where the words end, and the number was not counted: no reason to be sure."""

SAME_WORDS = (
    ("When did the harbour of Port Llewyn freeze over?", "harbour"),
    ("Who grinds the telescope lenses by hand?", "lens"),
    ("When does the last ferry to Skarholm depart?", "ferry"),
    ("Where does the greenhouse keep its rarest orchid?", "orchid"),
    ("What did the renovation of the theatre cost?", "budget"),
    ("What is the library's cat called?", "cat"),
    ("What does Tobias add to the winter punch?", "recipe"),
    ("Why does the tower clock run four minutes fast?", "clock"),
    ("What is the combination for the archive safe?", "code"),
    ("Why do beekeepers on the island wear yellow?", "bees"),
    ("When did Mayor Ottoline Brask resign?", "mayor"),
    ("How many travellers does the rope bridge carry?", "bridge"),
)


@pytest.mark.parametrize(("question", "fact"), SAME_WORDS)
def test_fact_is_quoted_with_its_place(question: str, fact: str) -> None:
    """A fact that the question asks for in the context's own words is quoted with its place."""
    first, place, confidence, *_ = ask(question, TEXT).splitlines()
    assert first == FACTS[fact]
    offset = TEXT.index(FACTS[fact])
    assert place == f"Found at line {TEXT.count(chr(10), 0, offset) + 1}, character {offset}."
    assert confidence.startswith("Confidence: LOW" if fact in STATED_OTHERWISE else "Confidence: high")


@pytest.mark.parametrize(
    ("question", "fact"),
    [
        ("In which year did the Port Llewyn harbour ice up completely?", "harbour"),
        ("Which person is grinding lenses for the observatory?", "lens"),
        ("At what hour does the final ferry leave for Skarholm?", "ferry"),
        ("Who donated the orchid in the greenhouse?", "orchid"),
        ("How expensive was the theatre's renovation?", "budget"),
        ("On which shelf does the cat of the library nap?", "cat"),
        ("Which spices go into the punch in winter?", "recipe"),
        ("Who broke the pendulum of the clock?", "clock"),
        ("Which numbers open the safe in the archives?", "code"),
        ("What colour are the beehives' hives painted?", "bees"),
        ("What became of Ottoline Brask once the flooding was over?", "mayor"),
        ("What load can the rope bridge bear, in mules?", "bridge"),
    ],
)
def test_a_fact_asked_partly_in_other_words_is_quoted(question: str, fact: str) -> None:
    assert ask(question, TEXT).splitlines()[0] == FACTS[fact]


@pytest.mark.parametrize(
    "question",
    [
        "When did the harbour of Port Corbin freeze over?",
        "What did the renovation of the theatre cost in 1911?",
        "When does the last ferry to Malmö depart?",
        "What is the library's dog Biscuit called?",
        "Who is the custodian of the backup passphrase?",
        "Which volcano erupted near the observatory?",
        "What is the combination for safe 12?",
        "When did Doctor Amara Brask move to Lisbon?",
        "Does the word 'zeppelin' stand anywhere?",
    ],
)
def test_an_absent_fact_is_not_found(question: str) -> None:
    assert ask(question, TEXT).splitlines()[0] == "NOT FOUND"


@pytest.mark.parametrize(
    "question",
    ["Who fed the swallows on the mill?", "How tall is the tower?", "What happens on the pier at night?"],
)
def test_answer_with_few_words_is_never_sure(question: str) -> None:
    """An answer that holds few of the question's words is never called sure."""
    answer = ask(question, TEXT)
    assert answer.startswith("NOT FOUND\n") or "LOW CONFIDENCE" in answer


def test_a_name_does_not_match_inside_a_word() -> None:
    text = "The professor spoke at the festival about office chairs.\n" * 400
    assert ask("What did the professor say in Fes?", text).startswith("NOT FOUND\n")
    found = ask("Where did the professor eat in Fes?", text + "In Fes the professor ate figs.\n" + text)
    assert found.startswith("In Fes the professor ate figs.\n")


def test_a_number_does_not_match_inside_a_number() -> None:
    text = "Invoice 13.5 was paid. Invoice 3.51 was paid. Invoice 1482130 was paid."
    assert ask("Was invoice 3.5 paid?", text).startswith("NOT FOUND\n")
    assert ask("Was invoice 48213 paid?", text).startswith("NOT FOUND\n")


def test_most_common_of_a_phrase_is_a_sentence() -> None:
    """A question for the most common of something that is written out is answered by a sentence."""
    text = f"{TEXT}\nThe most common complaint of guests concerns the noisy shutters.\n{TEXT}"
    answer = ask("What is the most common complaint of guests?", text)
    assert answer.startswith("The most common complaint of guests concerns the noisy shutters.\n")


def test_files_are_named_in_the_answer() -> None:
    rng = random.Random(2)
    files = {f"docs/chapter{i}.md": "\n".join(rng.choices(FILLER, k=200)) for i in range(40)}
    files["docs/chapter23.md"] += "\n" + FACTS["ferry"] + "\nThe end."
    first, place, *_ = ask("When does the last ferry to Skarholm depart?", files).splitlines()
    assert first == FACTS["ferry"]
    offset = files["docs/chapter23.md"].index(FACTS["ferry"])
    assert place == f"Found at docs/chapter23.md, line 201, character {offset}."
    assert "3 in docs/chapter5.md" in ask(
        "How many times does 'zzz' occur?", files | {"docs/chapter5.md": "zzz zzz\nzzz"}
    )


def test_a_file_named_in_the_question_answers_before_others() -> None:
    files = {"db.toml": "timeout = 30\nretries = 2", "web.toml": "timeout = 90\nretries = 5", "empty.toml": ""}
    answer = ask("What is the timeout in web.toml?", files)
    assert answer.splitlines()[:2] == ["timeout = 90", "Found at web.toml, line 1, character 0."]


def test_list_is_searched_and_its_item_named() -> None:
    items = [*(FILLER * 900), FACTS["bees"], *(FILLER * 900)]
    answer = ask("Why do beekeepers on the island wear yellow?", items)
    assert answer.splitlines()[:2] == [FACTS["bees"], "Found at context[6300], line 1, character 0."]


def test_chat_messages_keep_roles_and_hide_no_answer() -> None:
    """Chat messages keep their roles, and a question in them is not taken for the answer."""
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is the wifi password?"},
        {"role": "assistant", "content": "It is marigold-7."},
        {"role": "user", "content": [{"type": "text", "text": "And the printer has which address?"}]},
        {"role": "assistant", "content": "The printer has the address 10.1.1.9."},
    ]
    answer = ask("What is the wifi password?", chat)
    assert "It is marigold-7." in answer.split("Found at")[0]
    assert "context[1] (user)" in answer
    assert "LOW CONFIDENCE" in answer
    answer = ask("Which address has the printer?", chat)
    assert answer.startswith("The printer has the address 10.1.1.9.\nFound at context[4] (assistant)")


def test_nested_values_are_found_with_their_path() -> None:
    people = [{"name": f"Person {i}", "desk": {"floor": i % 7, "tags": ["a", None]}} for i in range(3000)]
    people[2222]["desk"] = {"note": "sits beside the aquarium"}
    answer = ask("Who sits beside the aquarium?", people)
    assert "\nBeside it: name: Person 2222; desk.note: sits beside the aquarium\n" in answer
    assert answer.startswith("desk.note: sits beside the aquarium\nFound at context[2222]")
    deep: Any = "the bottom is velvet"
    for _ in range(5000):
        deep = [deep]
    assert "the bottom is velvet" in ask("What is at the bottom, velvet?", deep)


@pytest.mark.parametrize("context", ["", " \n\n ", {}, [], {"a.txt": ""}, [""], None])
def test_an_empty_context_is_not_found(context: object) -> None:
    assert ask("Who keeps the keys?", context).startswith("NOT FOUND\n")


@pytest.mark.parametrize(
    ("question", "fact"),
    [
        ("Wer verwaltet den Schlüssel des Archivs?", "Frau Öztürk verwaltet den Schlüssel des Archivs seit 2011."),
        ("Où se trouve la clé du grenier?", "La clé du grenier se trouve sous l'évier de la cuisine."),
        ("Кто хранит ключ от архива?", "Ключ от архива хранит Мария Петрова."),
        ("金庫の鍵はどこにありますか", "金庫の鍵は台所の棚にあります。"),
        ("保险柜的钥匙在哪里", "保险柜的钥匙在厨房的架子上。"),
    ],
)
@pytest.mark.parametrize("repeat", [1, 400])
def test_other_languages_are_found_by_their_words(question: str, fact: str, repeat: int) -> None:
    filler = (
        "Der Markt öffnet früh. Il pleut sur la ville. Дождь идёт весь день. 今日は雨です。今天下雨。\n" * 9 * repeat
    )
    assert ask(question, f"{filler}{fact}\n{filler}").startswith(fact)


@pytest.mark.parametrize(
    "question",
    ["When did the harbour of Port Llewyn freeze over?", "Did the market open early with rain on the hills?"],
)
def test_context_of_5_mb_takes_at_most_12_calls(question: str) -> None:
    """A context of 5 MB takes at most 12 sub-calls of 20 kB."""
    prompts: list[str] = []
    answer = ask(question, corpus(5_000_000), prompts)
    assert not answer.startswith("NOT FOUND")
    assert 1 <= len(prompts) <= 12
    assert max(map(len, prompts)) < 21_000


def test_a_fact_across_any_chunk_border_is_found_whole() -> None:
    for shift in range(17_960, 18_050, 10):
        text = "x" * 40 + ("\n" + FILLER[0]) * 1000
        text = f"{text[:shift]}\n{FACTS['cat']}\n{text[shift:]}" * 20
        assert ask("What is the library's cat called?", text).startswith(FACTS["cat"] + "\n")


def test_a_context_without_newlines_is_searched() -> None:
    text = TEXT.replace("\n", " ")
    assert ask("When does the last ferry to Skarholm depart?", text).startswith(FACTS["ferry"] + "\n")
    assert "xyz" not in ask("Who keeps the bees?", "xyz" * 200_000)
