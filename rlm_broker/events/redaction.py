"""Removal of secrets from text that is shown or written down: known secrets, and text that looks like a secret.

Theory of operation. `RULES` is the one list of what looks like a secret. The search runs on the event loop, and model
code may have written the text to make it slow. So its time must be proportional to the length of the text:

- Each rule has a mark, literal text that is part of every match. `str.find` looks for it first, and a pattern is
  compiled and tried only if its mark occurs. Marks are grouped by a character they contain, so that text without
  any of `_-:=.` skips most rules.
- Repetitions that may be long are possessive (`++`), so a failed match never backtracks into them. Parts that may be
  read again, for example lookaheads, are bounded by a number. Otherwise a text of marks would take quadratic time.
- Only the first character of a possessive group can fail (`[^-]++|-{1,4}+[^-]`): CPython before 3.11.5 does not go back
  where more has failed.
- Half a megabyte of prose takes 5 ms, and 100 ms if code filled it with the beginnings of keys. Longer texts lose their
  middle (`LONGEST_CHARS`).

A rule errs towards too much: placeholders (`your_key`, `${KEY}`) and expressions of code are excluded, other text below
a name such as `password` is replaced.
"""

import functools
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from rlm_broker.values.text import shorten

REDACTED = "[redacted]"
_REMEMBERED_CHARS = 16_384
"""Maximum characters of a text with a remembered redaction: 256 of them take 8 MB at most."""
_WITHOUT_TEXT = (int, float, bool, type(None))
"""Classes of most values in an event. To ask for them first halves the cost of an event: a `Mapping` is abstract."""
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]{1,1024}@")
_NAME = re.compile(
    r"(_|\A|-)(KEY|TOKEN|SECRET|AUTHORIZATION|PWD)\Z|HEADER|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?\Z|API_?KEY\Z",
    re.IGNORECASE,
)
_NO_SECRET_NAMES = frozenset({"PWD", "OLDPWD"})
_MIN_SECRET_CHARS = 6
"""Minimum characters of a known secret; a shorter one is not replaced. Replacing every "1" would garble the text."""
LONGEST_CHARS = 1 << 19
"""Maximum characters of a text in an event; a longer one loses its middle, because the search holds the event loop."""


class Rule(NamedTuple):
    """Form of one kind of secret.

    Attributes:
        mark: Literal text in each secret of this kind. Without it in the text, the pattern is not tried.
        pattern: Regular expression beginning with the mark. It is compiled when the mark first occurs. The group that
            matched is the secret, or the whole match if there is no group.
        any_case: Whether case is ignored. The mark and the pattern are then lower case, and lower-case text is
            searched.
    """

    mark: str
    pattern: str
    any_case: bool = False


_TOKENS = {
    **dict.fromkeys(
        ("AKIA", "ASIA"), r"[A-Z0-9]{16}(?![A-Za-z0-9])(?:[^A-Za-z0-9/+=]{1,8}[A-Za-z0-9/+]{40}(?![\w/+=]))?"
    ),
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"[A-Za-z0-9]{20,}+"),
    "github_pat_": r"[A-Za-z0-9_]{22,}+",
    "glpat-": r"[A-Za-z0-9_.-]{20,}+",
    "AIza": r"[A-Za-z0-9_-]{35}",
    "ya29.": r"[A-Za-z0-9_-]{20,}+",
    "xox": r"[abeoprs]-[A-Za-z0-9-]{10,}+",
    "xapp-": r"[A-Za-z0-9-]{20,}+",
    "hooks.slack.com/services/": r"[A-Za-z0-9]{8,}+/[A-Za-z0-9]{8,}+/[A-Za-z0-9]{16,}+",
    "sk-": r"(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{16,}+",  # OpenAI, Anthropic, OpenRouter, DeepSeek
    **dict.fromkeys(("gsk_", "xai-", "pplx-", "nvapi-", "hf_"), r"[A-Za-z0-9_-]{30,}+"),
    "r8_": r"[A-Za-z0-9]{37}",
    "npm_": r"[A-Za-z0-9]{36}",
    "pypi-": r"Ag[A-Za-z0-9_-]{30,}+",
    **dict.fromkeys(("sk_live_", "sk_test_", "rk_live_", "rk_test_", "whsec_"), r"[A-Za-z0-9]{16,}+"),
    "hvs.": r"[A-Za-z0-9_-]{24,}+",
    **dict.fromkeys(("dop_v1_", "doo_v1_", "dor_v1_"), r"[a-f0-9]{64}"),
    "glsa_": r"[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}",
    **dict.fromkeys(("shpat_", "shpss_", "shpca_", "shppa_"), r"[A-Fa-f0-9]{32}"),
    "dckr_pat_": r"[A-Za-z0-9_-]{20,}+",
    "AGE-SECRET-KEY-1": r"[A-Z0-9]{58}",
    "SG.": r"[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}",
    "eyJ": r"[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*+){0,3}",  # JWT and JWE
}
"""Maps the first characters of large providers' tokens to the pattern of the rest."""

# Text between a name and its value: the closing quote of the name, a type annotation, and the sign.
_IS = r"""(?:\\*["'])?\]?\s{0,8}(?::\s?str\s{0,4})?(?:=>|:=|%3d|[:=])\s{0,8}"""
_ENDS = r"""(?![^\s"'`\\,;&)}\]>|])"""
_CHAR = r"""[^\s"'`\\,;&<>(){}\[\]|]"""
_PLACEHOLDER = (
    r"(?!\$[{(]|[{<\[]|%\(|\*{3}|x{4}|\.{3}|your[_ -]|\$[a-z_]++" + _ENDS + "|"
    r"(?:string|secretstr|required|optional|(?:[a-z]{1,32}_){0,8}(?:password|passwd|passphrase|secret|token|key))"
    + _ENDS
    + ")"
)
_CODE = r"(?![\w.]++[(\[])(?![a-z_]++(?:\.[a-z_][a-z_]*+)++" + _ENDS + ")(?!(?<== )[a-z_]++" + _ENDS + ")"
_QUOTED = "|".join(
    rf"[br]{{0,2}}\\*{quote}({_PLACEHOLDER}(?=(?:[^{quote}\\\n]|\\++(?![\"'nrt])){{6}})"
    rf"(?:[^{quote}\\\n]++|\\++[^\\\n\"'nrt])*+(?:\\++(?![\"'nrt]))?)"
    for quote in "\"'"
)
_BARE = f"{_PLACEHOLDER}{_CODE}(?={_CHAR}{{8}}|{_CHAR}{{0,7}}[0-9]){_CHAR}{{6,}}+"
_LISTED = rf"""\[\s{{0,8}}\\*["']({_PLACEHOLDER}(?={_CHAR}{{0,63}}[0-9]){_CHAR}{{6,}}+)(?=\\*["'])"""
_BELOW = rf"[>|][+-]?[ \t]{{0,8}}\r?\n[ \t]{{1,16}}({_BARE})(?=[ \t]{{0,8}}(?:[\r\n]|\Z))"  # YAML's block, of one word
_ANYTHING = rf"(?:{_QUOTED}|{_LISTED}|{_BELOW}|({_BARE}))"
"""Pattern of a value whose name says that it is secret: quoted, in a list, in a YAML block, or bare."""
_RUN_CHARS = 256
"""Characters of a random-looking value above which it is a secret even if code follows: no identifier is as long."""


def _mixed(chars: int) -> str:
    """Return the pattern of a random-looking value: at least `chars` characters, with letters and digits.

    It is for names, for example `token`, that may name other things than secrets. A run of more than `_RUN_CHARS`
    characters is matched without looking at its end. Otherwise each mark in it would read the rest again, in time
    proportional to the square of its length.
    """
    one = r"[a-z0-9+/._~=%-]"
    both = rf"(?={one}{{0,63}}[0-9])(?={one}{{0,63}}[a-z])"
    opened = r"""(?:\[\s{0,8}(?=\\*["']))?(?:[br]{0,2}\\*["'])?"""
    return rf"{opened}({_PLACEHOLDER}{_CODE}{both}{one}{{{chars},{_RUN_CHARS}}}+(?:{one}++|{_ENDS}))"


def _after(word: str, *before: str) -> str:
    """Return a pattern that requires one of `before` directly before `word`, which the pattern has just matched."""
    return "(?:" + "|".join(f"(?<={each}{word})" for each in before) + ")"


def _begun(mark: str) -> str:
    """Return a pattern that requires the mark, which was just matched, to begin a word.

    A word may also begin behind an escape sequence, a percent escape or a terminal's colour code, which end in a letter
    or digit.
    """
    mark = re.escape(mark)
    colours = "|".join(rf"(?<=[\[;][0-9]{{{digits}}}m{mark})" for digits in range(4))
    return rf"(?:(?<![A-Za-z0-9_-]{mark})|(?<=\\[nrtbf]{mark})|(?<=%[0-9A-Fa-f][0-9A-Fa-f]{mark})|{colours})"


_SPACED = ("api", "access", "secret", "private", "account", "shared", "signing", "encryption", "master", "auth")
_KEYS = [f"{name}{between}" for name in _SPACED for between in ("", "[_ -]")]
_TOKEN_NAMES = ("auth", "access", "refresh", "api", "bearer", "bot", "session", "security")
_TOKENS_OF = [f"{name}{between}" for name in _TOKEN_NAMES for between in ("", "[_ -]")]
_SCHEMES = r"(?:bearer|basic|token|apikey|negotiate)\s{1,4}"
_WORDS = {
    "passw": rf"(?:or)?d(?:{_IS}{_ANYTHING}|>({_PLACEHOLDER}[^\s<>&]{{6,256}}+)(?=</[\w:.-]{{0,64}}passw))",
    "machine": (  # a line of .netrc
        r"\s{1,8}\S{1,256}+\s{1,8}login\s{1,8}\S{1,256}+\s{1,8}password\s{1,8}"
        rf"({_PLACEHOLDER}{_CHAR}{{6,}}+)"
    ),
    "curl": (
        r"""\s(?:[^\r\n|;]{0,128}?\s)?(?:-u\s{0,4}|--user[\s=]\s{0,4})(?:\\*["'])?[^\s:"'\\]{1,128}+:"""
        rf"({_PLACEHOLDER}{_CHAR}{{6,}}+)"
    ),
    "passphrase": rf"{_IS}{_ANYTHING}",
    "pwd": rf"(?<=[_-]pwd){_IS}{_ANYTHING}",
    "key": rf"(?:{_after('key', *_KEYS)}{_IS}{_ANYTHING}|(?<=[_-]key){_IS}{_mixed(16)}|(?<=[?&]key)={_mixed(16)})",
    "token": rf"(?:{_after('token', *_TOKENS_OF)}{_IS}{_ANYTHING}|{_IS}{_mixed(12)})",
    "secret": rf"(?:{_after('secret', '[_-]', 'client')}{_IS}{_ANYTHING}|{_IS}{_mixed(8)})",
    "credential": rf"s?{_IS}{_mixed(12)}",
    "signature=": rf"(?<=[?&-]signature=){_mixed(16)}",
    "sig=": rf"(?<=[?&]sig=){_mixed(16)}",
    "bearer": r"\s{1,4}((?=[a-z0-9._~+/=-]{0,63}[0-9])[a-z0-9._~+/=-]{16,}+)",
    "authorization": (
        r"""(?:\\*["'])?\]?\s{0,8}[:=,]\s{0,8}(?:\\*["'])?(?:"""
        rf"{_SCHEMES}({_PLACEHOLDER}(?!auth|cred|requ){_CHAR}{{6,}}+)|{_mixed(12)}"
        r"|(?:digest|hawk|aws4-hmac-sha256)\s{1,4}([^\r\n]{6,}+))"
    ),
}
"""Maps lower-case words in front of a secret to the pattern of the rest."""

RULES = (
    *(Rule(mark, re.escape(mark) + _begun(mark) + rest) for mark, rest in _TOKENS.items()),
    Rule(
        "-----BEGIN ",
        r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,4}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:(?:[^-]++|-{1,4}+[^-])*+-----END [A-Z0-9 ]{1,64}-----"
        r"|(?>(?:(?:\s++|\\++[nr])*+[A-Za-z0-9+/=]{16,}+)*))",
    ),
    Rule(
        "://",
        r"""://(?:([^\s/@:"'<>?#\\{}]{0,256}+:[^\s/@"'<>?#\\{}]{0,256}+)@"""
        r"|((?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{20,256}+)@)",
    ),
    Rule(":AA", r":(?<=[0-9]{8}:)(AA[A-Za-z0-9_-]{33})(?![A-Za-z0-9_-])"),  # Telegram
    *(Rule(mark, mark + rest, any_case=True) for mark, rest in _WORDS.items()),
)
"""All kinds of text that look like a secret. Events, recordings, errors and notes use this one list."""
_SIGNS = "_-:=."
_BY_SIGN = {
    sign: [rule for rule in RULES if next((each for each in _SIGNS if each in rule.mark), "") == sign]
    for sign in ("", *_SIGNS)
}
"""Maps the first of `_SIGNS` that a mark contains to its rules, and "" to the rules without any."""
_compiled = functools.cache(re.compile)
"""Compiles a pattern once. All patterns together take 14 ms, which a process saves if it meets no mark."""


def is_secret_name(name: str) -> bool:
    """Whether a variable, option or header of this name holds a secret. A dict of headers counts as one."""
    return _NAME.search(name) is not None and name not in _NO_SECRET_NAMES


def secrets_in(value: Any, name: str = "") -> list[str]:
    """Return the secrets among options: texts under a secret name, at any depth.

    Each word of such a text is a secret, too: the value of a header may begin with a word such as "Bearer".

    Args:
        value: Options, or a part of them.
        name: Name of `value`.
    """
    if isinstance(value, Mapping):
        within = name if is_secret_name(name) else None
        return [secret for key, inner in value.items() for secret in secrets_in(inner, within or str(key))]
    return [value, *value.split()] if isinstance(value, str) and is_secret_name(name) else []


def secrets_of_environment() -> list[str]:
    """Return the values of all environment variables with a secret name."""
    return [value for name, value in os.environ.items() if is_secret_name(name)]


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace secrets by `[redacted]`: the given ones, and text that looks like one. In `name=value` the name stays.

    Args:
        text: Text to redact.
        secrets: Known secrets. Secrets of fewer than 6 characters are not replaced.
    """
    if len(text) < _MIN_SECRET_CHARS:
        return text
    for secret in sorted(set(secrets), key=len, reverse=True):  # longest first: a secret may contain another
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, REDACTED)
    return _without_patterns(text)


def in_words(error: BaseException) -> str:
    """Return the name and the message of an error, without secrets."""
    return redact(f"{type(error).__name__}: {error}", secrets_of_environment())


def without_credentials(text: str) -> str:
    """Replace user names and passwords in URLs, for example the URL of a private package index."""
    return _CREDENTIALS.sub(f"{REDACTED}@", text)


def redacted(value: Any, longest_chars: int | None = None) -> Any:
    """Return a value without text that looks like a secret; the same object if there is none.

    A text under a secret name of a mapping is replaced as a whole.

    Args:
        value: Plain values and dataclasses, nested at will.
        longest_chars: Maximum characters of a text; a longer one loses its middle. None keeps all of it.
    """
    if type(value) in _WITHOUT_TEXT:
        return value
    if isinstance(value, str):
        text = value if longest_chars is None else shorten(value, longest_chars, gap="")
        clean = _remembered(text) if len(text) <= _REMEMBERED_CHARS else redact(text)
        return value if clean == value else clean
    if isinstance(value, Mapping):
        return _changed(value, {key: _of_name(key, each, longest_chars) for key, each in value.items()})
    if isinstance(value, list | tuple):
        shown = [redacted(each, longest_chars) for each in value]
        same = all(new is old for new, old in zip(shown, value, strict=True))
        return value if same else type(value)(shown)
    if is_dataclass(value) and not isinstance(value, type):
        known = {field.name: getattr(value, field.name) for field in fields(value)}
        changes = {name: new for name, old in known.items() if (new := redacted(old, longest_chars)) is not old}
        return replace(value, **changes) if changes else value
    return value


def holds_no_secret(values: Iterable[Any]) -> bool:
    """Whether `redacted` would return each of these values as it is. Longer texts are not looked at: False.

    Nearly all values of events are so, and one loop says it at a fifth of what a call for each value costs.
    """
    for value in values:
        kind = type(value)
        if kind is str:
            size = len(value)
            if size >= _MIN_SECRET_CHARS and (size > _REMEMBERED_CHARS or _remembered(value) != value):
                return False
        elif kind in _WITHOUT_TEXT:
            continue
        elif kind is dict:
            if _names_a_secret(value) or not holds_no_secret(value.values()):
                return False
        elif kind is list or kind is tuple:
            if not holds_no_secret(value):
                return False
        elif not _is_harmless(value):
            return False
    return True


def _is_harmless(value: Any) -> bool:
    """Do the same for one value that is none of Python's own plain ones."""
    if not hasattr(value, "__dataclass_fields__"):
        return not isinstance(value, str | list | tuple | Mapping)
    kind: Any = type(value)
    return (fields := fields_of(kind)) is None or holds_no_secret(fields(value))


def _names_a_secret(value: dict[Any, Any]) -> bool:
    for name, each in value.items():
        if type(each) is str and len(each) >= _MIN_SECRET_CHARS and isinstance(name, str) and is_secret_name(name):
            return True
    return False


@functools.lru_cache(256)
def fields_of(kind: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    """Return a function that returns the values of all fields of a Struct or dataclass; None for other classes."""
    names: tuple[str, ...] = tuple(getattr(kind, "__struct_fields__", getattr(kind, "__dataclass_fields__", ())))
    if len(names) > 1:
        return operator.attrgetter(*names)
    return (lambda value: (getattr(value, names[0]),)) if names else None


def _of_name(name: Any, value: Any, longest_chars: int | None) -> Any:
    if isinstance(value, str) and len(value) >= _MIN_SECRET_CHARS and isinstance(name, str) and is_secret_name(name):
        return REDACTED
    return redacted(value, longest_chars)


def _changed(value: Mapping[Any, Any], shown: dict[Any, Any]) -> Mapping[Any, Any]:
    return value if all(shown[key] is each for key, each in value.items()) else shown


@functools.lru_cache(256)
def _remembered(text: str) -> str:
    """Return the same as `redact`. Most texts of events come again in each run: prompts, layers, names."""
    return redact(text)


def _without_patterns(text: str) -> str:
    pieces: list[str] = []
    done = 0
    for start, end in sorted(_found(text)):
        if start >= done:
            pieces += (text[done:start], REDACTED)
        done = max(done, end)
    return "".join([*pieces, text[done:]]) if pieces else text


def _found(text: str) -> Iterator[tuple[int, int]]:
    if len(text) < _MIN_SECRET_CHARS:
        return
    signs = [sign for sign in _SIGNS if sign in text]
    lowered = text.lower()
    if len(lowered) != len(text):  # "\u0130", I with a dot, becomes two characters: offsets would shift
        lowered = text.replace("\u0130", "i").lower()
    for sign in ("", *signs):  # finding one character is many times as fast as finding a mark
        for mark, pattern, any_case in _BY_SIGN[sign]:
            searched = lowered if any_case else text
            if mark in searched:
                for found in _compiled(pattern).finditer(searched):
                    yield found.span(found.lastindex or 0)
