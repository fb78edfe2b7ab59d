"""Rules for high confidence: a quotation must have the question's words in one phrase, and must not deny them.

Retrieval knows no meaning: "Anna paid Bob" has every word of "Who paid Anna?". So a share of words gives no high
confidence; the words must stand one after the other, and the text around them must have the kind of thing that is asked
for.
"""

import re

from rlm_broker.clients.offline.languages import stem, verb_forms

MAX_WORDS = 25
"""Maximum words of a question; answers to longer ones have low confidence."""
LONGEST_GAP = 8
"""Maximum words in the one gap that the phrase may have."""
_WORD = re.compile(r"'s\b|[^\W_]+(?:[-.:/@][^\W_]+)*")
_LOOKUP = re.compile(
    r"(?:(?:in|on|at|from|for|by|to|with) )?(who|when|where|what|which|why) (.+?)\s*\??", re.IGNORECASE | re.DOTALL
)
_PASSED_OVER_TEXT = """
is are was were be been do does did the a an has have had 's
"""
_PASSED_OVER = frozenset(_PASSED_OVER_TEXT.split())
_NO_NAMES_TEXT = """
the a an it its he his she her they their this that these those we i you my our your who one
"""
_NO_NAMES = frozenset(_NO_NAMES_TEXT.split())
_LINKS_TEXT = """
of to in on at by for from with without under over before after behind near
"""
_LINKS = frozenset(_LINKS_TEXT.split())
_DENIES_TEXT = """
not no never nor neither nobody nothing none cannot without false wrong untrue incorrect rumour rumor rumoured
denied deny denies former formerly previous previously ex once until unless if whether would could should may
might will shall perhaps maybe probably possibly allegedly supposedly reportedly almost nearly hardly except but
although though however instead planned plans wants wanted hoped hopes tried tries failed refused refuses
pretended pretends imagine imagined dream dreamed dreamt joke joked fiction fictional example said says say
claims claimed claim believes believed believe thinks thought think suspects suspected asked asks wondered
wonders told longer another other also or cancelled hypothetical likely unlikely stopped used only sometimes
instructions ignore answer confidence
"""
_DENIES = frozenset(_DENIES_TEXT.split())
_ANOTHER_TEXT = """
old new earlier original first second third next future past temporary proposed deputy vice acting assistant fake late
small big little other left right upper lower north south east west main side front back inner outer red blue green
black white
"""
_ANOTHER = frozenset(_ANOTHER_TEXT.split())
_TIME = (
    r"\b(?:1\d{3}|20\d\d)\b|\b\d{1,2}[:.]\d\d\b|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b|\b(?:january|february|march|"
    r"april|may|june|july|august|september|october|november|december)\b|\b(?:spring|summer|autumn|winter|midnight|noon)\b"
    r"|\b(?:after|before|during) the\b"
)
_KINDS = {
    "day": _TIME, "date": _TIME, "year": r"\b(?:1\d{3}|20\d\d)\b", "month": _TIME, "time": r"\b\d{1,2}[:.]\d\d\b",
}  # fmt: skip
_PLACE = re.compile(
    r" (?:at|behind|near|next to|beside|below|above|under|inside|between|on|in) (?:(?:the|an?|its|his|her|their) )?"
    rf"(?!(?:\d|(?:the|an?|its|his|her|their)\b|\w+day\b|(?:{_TIME})|morning|evening|year|month|week|time))[\w-]+",
    re.IGNORECASE,
)
_REASON = re.compile(r"\b(?:because|due to|owing to)\b", re.IGNORECASE)
_CAPITAL = r"[A-Z\u00c0-\u00de][\w'-]+"

_COMPUTING = (
    (
        "count",
        r"how many|how often|number of|count|tally|wie viele?|wie oft|anzahl|combien|nombre de|cu[aá]nt[oa]s"
        r"|n[uú]mero de|quant[ie]|quant[oa]s|hoeveel|aantal|сколько",
    ),
    ("average", r"average|mean value|the mean|median|durchschnitt\w*|moyenne|promedio|media"),
    ("add up", r"total|sum|altogether|combined|in all|insgesamt|gesamt\w*|summe|somme|suma"),
    (
        "compare",
        r"than|difference|compared?|how much (?:more|less)|(?:how much|by what) .*(?:grow|grew|increase\w*|decrease\w*)"
        r"|both|same|how much .*(?:rise|rose|fall|fell)",
    ),
    (
        "rank",
        r"most|least|highest|lowest|largest|smallest|biggest|greatest|fewest|cheapest|oldest|youngest|newest|longest"
        r"|shortest|top|rank\w*|höchste\w*|meisten?|plus grande?|el mayor|la mayor",
    ),
    (
        "list",
        r"list|all|every|each|who are|which of|what are|name the|enumerate|except|other than|welche sind|alle|tous"
        r"|toutes|todos|todas",
    ),
)
_COMPUTING_WITHOUT_SPACES = (
    ("count", r"多少|几[个人]|幾|いくつ|何人"),
    ("average", r"平均"),
    ("add up", r"总共|合计"),
    ("rank", r"最多|最高"),
)


def computing(question: str) -> str:
    """Return the operation over the whole context that a question wants, such as "count"; empty for a single fact."""
    for kind, words in _COMPUTING:
        if re.search(rf"(?<!\w)(?:{words})(?!\w)", question, re.IGNORECASE):
            return kind
    return next((kind for kind, words in _COMPUTING_WITHOUT_SPACES if re.search(words, question)), "")


def is_sure(question: str, quote: str) -> bool:
    """Whether `quote`, one sentence or line, answers an English question for one fact in the question's own words."""
    question = re.sub(r"(?i)\b(what|who|when|where)['\u2019]s\b", r"\1 is", " ".join(question.split())).replace(
        "\u2019", "'"
    )
    quote = " ".join(quote.split()).replace("\u2019", "'").replace(" and nothing else", "")
    asked = _LOOKUP.fullmatch(question)
    if not asked or computing(question) or len(question.split()) > MAX_WORDS or re.search(r"[.?!;\"]\s", question[:-1]):
        return False
    said = _words(quote)
    if {stem(word) for word in _DENIES & set(said)} - set(map(stem, _words(question))) or re.search(
        r"n't\b|\?\W*$|[\"\u201c\u201d]", quote
    ):
        return False
    kind, rest = asked[1].lower(), asked[2]
    if kind in ("what", "which") and (
        noun := re.match(r"([\w-]+) (?=(?:is|are|was|were|do|does|did|has|have|had|\w+s|\w+ed)\b)", rest)
    ):
        word = noun[1].lower()
        if word not in _PASSED_OVER:
            known = word in _KINDS and re.search(_KINDS[word], quote, re.IGNORECASE)
            if not known and stem(word) not in map(stem, said):
                return False
            kind, rest = "which", rest[noun.end() :]
    now = re.match(r"(?:is|are)\b", rest)
    if now and not re.search(r"\b(?:is|are)\b", quote) and re.search(r"\b(?:was|were|had)\b", quote):
        return False
    wanted = [word for word in _words(rest) if word not in _PASSED_OVER]
    end = _end_of_phrase(wanted, said, quote)
    return end >= 0 and _has_kind(kind, rest, quote, end, set(_words(question))) and not _is_another(wanted, said, rest)


def _is_another(wanted: list[str], said: list[str], rest: str) -> bool:
    """Whether an adjective before the phrase makes it another thing, as in "the deputy director"."""
    at = next((i for i, word in enumerate(said) if stem(word) in verb_forms(wanted[0])), 0)
    is_thing = re.search(rf"\b(?:the|an?) {re.escape(wanted[0])}\b", rest, re.IGNORECASE) is not None
    return is_thing and at > 0 and said[at - 1] in _ANOTHER


def _words(text: str) -> list[str]:
    return [match.lower() for match in _WORD.findall(text)]


def _end_of_phrase(wanted: list[str], said: list[str], quote: str) -> int:
    """Return the offset in `quote` behind the wanted words, which stand in order with at most one gap; else -1."""
    places = [match.end() for match in _WORD.finditer(quote)]
    if not wanted:
        return -1
    forms = [verb_forms(word) for word in wanted]
    for start, word in enumerate(said):
        if stem(word) not in forms[0]:
            continue
        at, gaps, i = start, 0, 1
        while i < len(wanted):
            step = at + 1
            while step < len(said) and said[step] in _PASSED_OVER and said[step] != "'s":
                step += 1
            if step < len(said) and said[step] == "'s" and "'s" in said:
                step += 1
            if step < len(said) and stem(said[step]) in forms[i]:
                at, i = step, i + 1
                continue
            later = next((k for k in range(step, min(len(said), step + LONGEST_GAP)) if stem(said[k]) in forms[i]), -1)
            if gaps or later < 0 or wanted[i - 1] in _LINKS:
                break
            gaps, at, i = 1, later, i + 1
        else:
            if at + 1 < len(said) and said[at + 1] == "'s":
                return -1
            return places[at]
    turned = _turned(wanted, said)
    return places[turned] if turned >= 0 else -1


def _turned(wanted: list[str], said: list[str]) -> int:
    """Return the index of the last word of "Y X" in a text for the question's "X of Y"; else -1."""
    if wanted.count("of") != 1:
        return -1
    middle = wanted.index("of")
    phrase = [stem(word) for word in wanted[middle + 1 :] + wanted[:middle]]
    kept = [(k, stem(word)) for k, word in enumerate(said) if word != "'s"]
    for i in range(len(kept) - len(phrase) + 1):
        if [word for _, word in kept[i : i + len(phrase)]] == phrase:
            return kept[i + len(phrase) - 1][0]
    return -1


def _has_kind(kind: str, rest: str, quote: str, end: int, asked: set[str]) -> bool:
    """Whether the quotation has what the question word asks for: a name, a time, a place or a reason."""
    after = quote[end:]
    if kind == "when":
        return re.search(_TIME, quote, re.IGNORECASE) is not None
    if kind == "where":
        return _PLACE.match(after) is not None
    if kind == "why":
        return _REASON.search(after) is not None
    copula = re.match(r"(?:is|are|was|were) ", rest) and not re.search(
        r"(?:ed|en|kept|known|built|made)$", rest.rstrip("? ")
    )
    if copula:
        return re.match(rf"(?: (?:is|are|was|were)|:| =) (?:\d|{_CAPITAL})", after) is not None and kind != "which"
    if kind == "who":
        names = re.findall(_CAPITAL, quote if re.match(r"(?:did|does|do) ", rest) else quote[:end])
        return any(name.lower() not in asked | _NO_NAMES for name in names)
    return len({word for word in _words(quote) if len(word) > 2} - asked - _PASSED_OVER) > 0
