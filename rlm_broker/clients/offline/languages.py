"""Small words and stems of the larger European languages, and English words of equal meaning."""

import functools
import itertools
import re
import threading
from typing import Any

SMALL_WORDS = {
    "english": """
a about according all also am an and any anybody anyone anything are as at be been being both but by can could
count did do does doing each either else ever every find for from gave get give given gives had has have
having he her here hers him his how i if in into is it its itself just know let list many may me mention
mentioned mentions might more most much must my name named no not of off often on once one only or other our
out over own please said say says shall she should show so some such tell than that the their theirs them then
there these they this those through to too under until up upon us very was we were what what's when where
whether which while who who's whom whose why will with within would you your
""",
    "german": """
der die das den dem des ein eine einer eines einem einen und oder ist sind war waren wer wen wem wie wann wo
warum was welche welcher welches welchen wessen von vom zu zum zur im in mit für auf bei nach aus hat haben
hatte wird werden wurde es sich an am nicht viele viel gibt
""",
    "french": """
le la les l un une des du de d et ou est sont était qui que qu quel quelle quels quelles où quand comment
pourquoi dans pour sur avec au aux a ont il elle ils se ce cette son sa ses en par ne pas
""",
    "spanish": """
el la los las un una unos unas de del y o es son está están era quién quiénes qué cuál cuáles cuándo dónde
cómo por para en con al se su sus lo que ha han no
""",
    "italian": """
il lo la i gli le l un una uno di del della dei delle e o è sono era chi che cosa quale quali quando dove come
perché da in con su per nel nella al alla si ha hanno non
""",
    "portuguese": """
o a os as um uma de do da dos das e ou é são era quem que qual quais quando onde como por para em no na nos
nas com ao se seu sua tem não foi
""",
    "dutch": """
de het een en of is zijn was waren wie wat welke wanneer waar waarom hoe van voor in op met naar uit bij aan
te heeft hebben wordt niet er
""",
}
STOP = {language: frozenset(words.split()) for language, words in SMALL_WORDS.items()}

SYNONYMS = tuple(
    frozenset(group.split())
    for group in (
        "guarantee warranty",
        "firm company business enterprise",
        "start begin found establish launch",
        "end lapse expire finish terminate",
        "cost price fee expensive",
        "boss manager chief director head",
        "doctor physician",
        "car vehicle automobile",
        "buy purchase acquire",
        "employee worker",
        "repair fix mend",
        "quit resign",
        "illness disease sickness",
        "photo picture image",
        "film movie",
        "author writer",
        "phone telephone",
        "forbidden prohibited banned",
        "permit allow",
        "need require",
        "holiday vacation",
        "broken faulty defective",
        "lawyer attorney",
        "home house",
        "salary wage",
        "invent devise",
        "last final",
        "big large",
    )
)
"""Groups of English words. A text may have one word of a group where the question has another."""

VERB_FORMS_TEXT = """
begin began begun; break broke broken; bring brought; build built; buy bought; catch caught; choose chose
chosen; come came; draw drew drawn; drink drank drunk; drive drove driven; eat ate eaten; fall fell fallen; feed
fed; fly flew flown; forget forgot forgotten; freeze froze frozen; give gave given; go went gone; grow grew
grown; hide hid hidden; hold held; keep kept; know knew known; leave left; lend lent; lose lost; make made; meet
met; pay paid; ride rode ridden; run ran; sell sold; send sent; shoot shot; sing sang sung; sink sank sunk;
sleep slept; speak spoke spoken; spend spent; steal stole stolen; swim swam swum; take took taken; teach taught;
throw threw thrown; wear wore worn; win won; write wrote written
"""
VERB_FORMS = tuple(frozenset(group.split()) for group in VERB_FORMS_TEXT.split(";"))
"""Forms of irregular verbs, which have no common stem."""


def language_of(text: str) -> str:
    """Return the language of most of a text's small words; "english" if that is not clear."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    counts = {language: sum(word in small for word in words) for language, small in STOP.items()}
    best = max(counts, key=lambda language: counts[language])
    return best if counts[best] > counts["english"] else "english"


_STEMMING = threading.Lock()
"""Held while a word is stemmed: a stemmer keeps the word in its attributes, and plain completions run in threads."""


@functools.lru_cache(maxsize=8)
def _stemmer(language: str) -> Any:
    import snowballstemmer  # imported at the first question, so that start-up stays fast

    return snowballstemmer.stemmer(language)


@functools.lru_cache(maxsize=50_000)
def stem(word: str, language: str = "english") -> str:
    """Return the stem of a word in lower case. A word with a digit is its own stem."""
    lower = word.lower()
    if any(char.isdigit() for char in lower):
        return lower
    with _STEMMING:
        return str(_stemmer(language).stemWord(lower))


def beginning(word: str, language: str) -> str:
    """Return the letters with which all forms of a word begin: at least three, or the word if it is shorter."""
    lower = word.lower()
    pairs = zip(lower, stem(lower, language), strict=False)
    shared = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared if len(shared) >= 3 else lower


def verb_forms(word: str) -> frozenset[str]:
    """Return the stems of all forms of an irregular verb; for any other word, its own stem."""
    own = stem(word)
    return _irregular().get(own, frozenset((own,)))


@functools.cache
def _irregular() -> dict[str, frozenset[str]]:
    groups = [frozenset(map(stem, group)) for group in VERB_FORMS]
    return {each: group for group in groups for each in group}


@functools.cache
def _meanings() -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for group in (*SYNONYMS, *VERB_FORMS):
        for word in group:
            found[stem(word)] = found.get(stem(word), frozenset()) | group
    return found


def synonyms(word: str) -> tuple[str, ...]:
    """Return English words that may replace a word, with forms of it that have another stem, and without itself."""
    same = _meanings().get(stem(word), frozenset())
    return tuple(sorted(each for each in same if stem(each) != stem(word)))
