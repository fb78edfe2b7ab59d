"""Secrets, taken out of text that is shown or written down: those that are known, and what looks like one.

`RULES` is the one list of what looks like a secret. A rule is cheap where its mark does not occur, and takes time in
proportion to the text where it does: whatever may be long is read once, and what is looked at again is bounded.
"""

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

REDACTED = "[redacted]"
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]{1,1024}@")
_NAME = re.compile(
    r"(_|\A|-)(KEY|TOKEN|SECRET|AUTHORIZATION|PWD)\Z|HEADER|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?\Z|API_?KEY\Z",
    re.IGNORECASE,
)
_NO_SECRET_NAMES = frozenset({"PWD", "OLDPWD"})
_MIN_SECRET_CHARS = 6
"""Characters of the shortest known secret. A shorter value is not one, and hiding every "1" would garble the text."""
LONGEST_CHARS = 1 << 19
"""Characters of the longest text in an event: the search is on the event loop. Beyond, the middle is left out."""


class Rule(NamedTuple):
    """What one kind of secret looks like.

    Attributes:
        mark: Literal text that each such secret has: without it the pattern is not tried.
        pattern: Regular expression that begins with the mark, compiled when the mark is first met. The group that
            matched is the secret; without groups all of it is.
        any_case: The mark and the pattern are in small letters, and are looked for in the text in small letters.
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
"""What follows the words that tokens of the large providers begin with."""

# What stands between a name and its value: the end of the name's quotation, an annotation, the sign.
_IS = r"""(?:\\*["'])?\]?\s{0,8}(?::\s?str\s{0,4})?(?:=>|:=|%3d|[:=])\s{0,8}"""
_ENDS = r"""(?![^\s"'`\\,;&)}\]>|])"""
_CHAR = r"""[^\s"'`\\,;&<>(){}\[\]|]"""
_PLACEHOLDER = (
    r"(?!\$[{(]|[{<\[]|%\(|\*{3}|x{4}|\.{3}|your[_ -]|\$[a-z_]++" + _ENDS + "|"
    r"(?:string|secretstr|required|optional|(?:[a-z]{1,32}_){0,8}(?:password|passwd|passphrase|secret|token|key))"
    + _ENDS
    + ")"
)
_CODE = r"(?![\w.]++[(\[])(?![a-z_]++(?:\.[a-z_]++)++" + _ENDS + ")(?!(?<== )[a-z_]++" + _ENDS + ")"
_QUOTED = "|".join(
    rf"[br]{{0,2}}\\*{quote}({_PLACEHOLDER}(?:[^{quote}\\\n]|\\++(?![\"'nrt])){{6,}}+)" for quote in "\"'"
)
_BARE = f"{_PLACEHOLDER}{_CODE}(?={_CHAR}{{8}}|{_CHAR}{{0,7}}[0-9]){_CHAR}{{6,}}+"
_LISTED = rf"""\[\s{{0,8}}\\*["']({_PLACEHOLDER}(?={_CHAR}{{0,63}}[0-9]){_CHAR}{{6,}}+)(?=\\*["'])"""
_BELOW = rf"[>|][+-]?[ \t]{{0,8}}\r?\n[ \t]{{1,16}}({_BARE})(?=[ \t]{{0,8}}(?:[\r\n]|\Z))"  # YAML's block, of one word
_ANYTHING = rf"(?:{_QUOTED}|{_LISTED}|{_BELOW}|({_BARE}))"
"""A value below a name that says that it is secret."""
_RUN_CHARS = 256
"""Characters of a value beyond which it is no code, whatever ends it."""


def _mixed(chars: int) -> str:
    """What looks random below a name that may be that of something else: this many characters, letters and digits.

    A longer run than any code has is a secret whatever ends it: read again from each mark in it, it would take time in
    proportion to the square of its length.
    """
    one = r"[a-z0-9+/._~=%-]"
    both = rf"(?={one}{{0,63}}[0-9])(?={one}{{0,63}}[a-z])"
    opened = r"""(?:\[\s{0,8}(?=\\*["']))?(?:[br]{0,2}\\*["'])?"""
    return rf"{opened}({_PLACEHOLDER}{_CODE}{both}{one}{{{chars},{_RUN_CHARS}}}+(?:{one}++|{_ENDS}))"


def _after(word: str, *before: str) -> str:
    """That one of these stands before the word, which has just been read."""
    return "(?:" + "|".join(f"(?<={each}{word})" for each in before) + ")"


def _begun(mark: str) -> str:
    """That the mark, which has just been read, begins a word, also after an escape or a terminal's colour."""
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
    "machine": (  # of a netrc
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
"""What follows words that stand before a secret."""

RULES = (
    *(Rule(mark, re.escape(mark) + _begun(mark) + rest) for mark, rest in _TOKENS.items()),
    Rule(
        "-----BEGIN ",
        r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,4}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:(?:[^-]|-(?!----))*+-----END [A-Z0-9 ]{1,64}-----|(?:(?:\s|\\+[nr])*+[A-Za-z0-9+/=]{16,}+)*+)",
    ),
    Rule(
        "://",
        r"""://(?:([^\s/@:"'<>?#\\{}]{0,256}+:[^\s/@"'<>?#\\{}]{0,256}+)@"""
        r"|((?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{20,256}+)@)",
    ),
    Rule(":AA", r":(?<=[0-9]{8}:)(AA[A-Za-z0-9_-]{33})(?![A-Za-z0-9_-])"),  # Telegram
    *(Rule(mark, mark + rest, any_case=True) for mark, rest in _WORDS.items()),
)
"""All that looks like a secret, wherever it comes from."""
_SIGNS = "_-:=."
_BY_SIGN = {
    sign: [rule for rule in RULES if next((each for each in _SIGNS if each in rule.mark), "") == sign]
    for sign in ("", *_SIGNS)
}
"""The rules by the first of these signs that their mark has."""
_compiled = functools.cache(re.compile)
"""All together they take 14 ms to compile, which a process that meets none need not spend."""


def is_secret_name(name: str) -> bool:
    """Tell whether a variable, option or header of this name holds a secret; headers as a whole count as one."""
    return _NAME.search(name) is not None and name not in _NO_SECRET_NAMES


def secrets_in(value: Any, name: str = "") -> list[str]:
    """List the secrets among options: texts that are there under a secret name, at any depth.

    Each word of such a text is one, too: a header may hold its secret after a word such as Bearer.

    Args:
        name: That `value` has.
    """
    if isinstance(value, Mapping):
        within = name if is_secret_name(name) else None
        return [secret for key, inner in value.items() for secret in secrets_in(inner, within or str(key))]
    return [value, *value.split()] if isinstance(value, str) and is_secret_name(name) else []


def secrets_of_environment() -> list[str]:
    """List the values of all environment variables with a secret name."""
    return [value for name, value in os.environ.items() if is_secret_name(name)]


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace secrets by `[redacted]`: those given, and what looks like one. Of `name=value` the name is kept.

    Args:
        secrets: Those of fewer than 6 characters are left as they are.
    """
    for secret in sorted(set(secrets), key=len, reverse=True):  # one may be part of another
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, REDACTED)
    return _without_patterns(text)


def in_words(error: BaseException) -> str:
    """Return what an error is called and what it says, without secrets."""
    return redact(f"{type(error).__name__}: {error}", secrets_of_environment())


def without_credentials(text: str) -> str:
    """Replace user names and passwords in addresses, such as that of a private index."""
    return _CREDENTIALS.sub(f"{REDACTED}@", text)


def redacted(value: Any, longest_chars: int | None = None) -> Any:
    """Return a value without what looks like a secret: the same object where there is nothing to replace.

    A text under a secret name of a mapping is one as a whole.

    Args:
        longest_chars: Characters of the longest text; of a longer one the middle is left out. None leaves none out.
    """
    if isinstance(value, str):
        return redact(value if longest_chars is None or len(value) <= longest_chars else _short(value, longest_chars))
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


def _of_name(name: Any, value: Any, longest_chars: int | None) -> Any:
    if isinstance(value, str) and len(value) >= _MIN_SECRET_CHARS and isinstance(name, str) and is_secret_name(name):
        return REDACTED
    return redacted(value, longest_chars)


def _short(text: str, longest_chars: int) -> str:
    half = longest_chars // 2
    return f"{text[:half]}... [{len(text) - 2 * half:,} characters left out] ...{text[-half:]}"


def _changed(value: Mapping[Any, Any], shown: dict[Any, Any]) -> Mapping[Any, Any]:
    return value if all(shown[key] is each for key, each in value.items()) else shown


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
    if len(lowered) != len(text):  # one letter has two in small: a capital I with a dot
        lowered = text.replace("\u0130", "i").lower()
    for sign in ("", *signs):  # one character is found many times as fast as a mark
        for mark, pattern, any_case in _BY_SIGN[sign]:
            searched = lowered if any_case else text
            if mark in searched:
                for found in _compiled(pattern).finditer(searched):
                    yield found.span(found.lastindex or 0)
