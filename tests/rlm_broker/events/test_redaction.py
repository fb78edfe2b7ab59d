"""Texts that count as secrets, and that none of them is left."""

import re
import time

import pytest

from rlm_broker.broker.clients.failures import one_line
from rlm_broker.events import redaction
from rlm_broker.events.event import Replied
from rlm_broker.events.redaction import (
    in_words,
    is_secret_name,
    redact,
    redacted,
    secrets_in,
    secrets_of_environment,
    without_credentials,
)
from rlm_broker.results import Block

SECRET_NAMES = (
    *("api_key", "OPENAI_API_KEY", "apiKey", "auth-token", "Secret", "authorization", "extra_headers"),
    *("PGPASSWORD", "password", "DB_PASSWD", "passphrase", "MYSQL_PWD", "aws_credentials"),
)
OTHER_NAMES = ("monkey", "max_tokens", "keyboard", "temperature", "api_base", "PWD", "OLDPWD")


def test_secret_names() -> None:
    assert [name for name in (*SECRET_NAMES, *OTHER_NAMES) if is_secret_name(name)] == [*SECRET_NAMES]


def test_secrets_in_options_are_found_at_any_depth() -> None:
    options = {
        "api_key": "one two",
        "temperature": 1,
        "extra_headers": {"X-Team": "Bearer three"},
        "nested": {"client_secret": "four", "kept": "public"},
        "token": None,
    }
    assert set(secrets_in(options)) == {"one two", "one", "two", "Bearer three", "Bearer", "three", "four"}


def test_known_secrets_are_replaced_longest_first() -> None:
    text = "canary-1 and canary-1-and-more and 1"
    assert redact(text, ["canary-1", "canary-1-and-more", "1"]) == "[redacted] and [redacted] and 1"


def test_failures_hide_secrets_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures hide secrets of the environment, known secrets, and text that looks like a secret."""
    monkeypatch.setenv("SOME_VENDORS_SECRET", "env-secret-value")
    assert "env-secret-value" in secrets_of_environment()
    said = one_line("env-secret-value, known-secret,\nsk-of-somebody-else-0123456789", ["known-secret"])
    assert said == "[redacted], [redacted], [redacted]"


MIXED = "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8S9t0U1v2W3x4"
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"
TOKENS = [
    *("AKIAIOSFODNN7EXAMPLE", f"ASIAIOSFODNN7EXAMPLE,{AWS_SECRET}"),
    *(f"{kind}_{MIXED[:36]}" for kind in ("ghp", "gho", "ghu", "ghs", "ghr")),
    *(f"github_pat_{MIXED[:22]}_{MIXED}", f"glpat-{MIXED[:20]}", f"AIza{MIXED[:35]}", f"ya29.a0{MIXED}"),
    *(f"xoxb-123456789012-{MIXED[:24]}", f"xapp-1-A0123-{MIXED[:24]}"),
    *(f"hooks.slack.com/services/T00000001/B00000001/{MIXED[:24]}", f"sk-{MIXED[:48]}", f"sk-proj-{MIXED}_x-y"),
    *(f"sk-ant-api03-{MIXED}-AA", f"sk-or-v1-{MIXED}", f"gsk_{MIXED}", f"xai-{MIXED}", f"pplx-{MIXED}"),
    *(f"nvapi-{MIXED}", f"hf_{MIXED[:34]}", f"r8_{MIXED[:37]}", f"npm_{MIXED[:36]}", f"pypi-AgEIcHlwaS5vcmc{MIXED}"),
    *(f"{kind}_{MIXED[:24]}" for kind in ("sk_live", "sk_test", "rk_live", "rk_test", "whsec")),
    f"hvs.{MIXED[:24]}",
    *(f"{kind}_v1_{'0123456789abcdef' * 4}" for kind in ("dop", "doo", "dor")),
    f"glsa_{MIXED[:32]}_0a1b2c3d",
    *(f"{kind}_{'0123456789abcdef' * 2}" for kind in ("shpat", "shpss", "shpca", "shppa")),
    *(f"dckr_pat_{MIXED[:27]}", f"AGE-SECRET-KEY-1{'QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L' * 2}"[:74]),
    *(f"SG.{MIXED[:22]}.{MIXED[:43]}", f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{MIXED}"),
    f"-----BEGIN PRIVATE KEY-----\n{BODY}\n{BODY}\nab==\n-----END PRIVATE KEY-----",
    f"-----BEGIN RSA PRIVATE KEY-----\\nProc-Type: 4,ENCRYPTED\\n\\n{BODY}\\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{BODY}\n=abcd\n-----END PGP PRIVATE KEY BLOCK-----",
]
"""Texts that are a secret as a whole, at any place."""


def test_tokens_of_providers_are_taken_out_wherever_they_stand() -> None:
    places = (
        *(("", ""), ("it is ", ", I think"), ('{"text": "', '"}'), ("a line\n", "\nanother")),
        *(("a line\\n", "\\nanother"), ("x=%3D", "&y"), ("\x1b[31m", "\x1b[0m")),
    )
    texts = {(before + token + after): f"{before}[redacted]{after}" for before, after in places for token in TOKENS}
    assert {text: redact(text) for text in texts} == texts


NAMED = [
    *("aws_secret_access_key = {wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY}", "auth_token={abcdefgh12}"),
    *("export GITHUB_TOKEN='{abcdef123456}'", "PGPASSWORD={pa$$word}", "DB_PWD={hunter2}"),
    *("password = {hunter2hunter2}", "password: {correcthorse}", "passwd: '{a b c d}'"),
    *('passphrase: "{correct horse}"', 'ssh_passphrase: str = "{correct horse}"', "API-KEY: {abcdefgh12345}"),
    *("apiKey: '{abcdefgh}'", 'os.environ["OPENAI_API_KEY"] = "{abcdefgh}"'),
    *('{{"client_secret": "{hunterhunter}", "n": 1}}', '{{\\"password\\": \\"{hunter2}\\", \\"n\\": 1}}'),
    *('{{"password": "{back\\\\slash}"}}', "jwt_secret={abcdefgh}", "secret: {abc12345}"),
    *("credentials: {abcdef123456}", "signing_key: {abcdefgh}", "DEPLOY_KEY={abcdef1234567890}"),
    *("AccountKey={abcdefghijkl==};EndpointSuffix=core", "https://host/path?api_key={abcdefgh}&x=1"),
    *("https://host/path?x=1&key={abcdef1234567890}", "https://host/path?sig={abc%2Fdef1234567890}&x=1"),
    *("https://host/path?X-Amz-Signature={abcdef1234567890}", "access_token%3D{abcdefgh}"),
    *("https://{user:pa55}@host/path", "postgres://{user:p%40ss}@host:5432/db"),
    *("https://{abcdefghij0123456789}@host/path", "Authorization: Basic {dXNlcjpwYXNz}"),
    *("authorization: token {abcdef}", '"Authorization": "Bearer {abc.def}"'),
    *("('Authorization', 'Bearer {abcdefgh}')", "Authorization: {abcdef123456}"),
    'Authorization: Digest {username="me", response="6629fae49393a053"}',
    *("they sent Bearer {abcdef.123456-7890} twice", "\u0130 api_key={abcdefgh}"),
    *("machine host login me password {hunter2}", "machine host\n  login me\n  password {correcthorse}\n"),
    *("curl -u me:{hunter2} https://host", "curl -sS --user 'me:{hunter2}' https://host"),
    *("<password>{hunter2}</password>", "<db:Password>{correcthorse}</db:Password>"),
    *('{{"token": ["{abcdefgh1234}"]}}', '{{"password": [ "{hunter2}" ]}}', "secret_key = b'{abcdefgh}'"),
    *("token = b'{abcdefgh1234}'", "db_password: >-\n  {hunter2}\n", "db_password: |\n  {correcthorse}"),
    "bot 123456789:{AAabcdefghijklmnopqrstuvwxyz0123456} on",
]
"""Texts with the secret in braces."""


def test_values_under_secret_names_are_removed_and_the_names_stay() -> None:
    expected = {}
    for each in NAMED:
        text = each.replace("{{", "\0").replace("}}", "\1")
        before, _, rest = text.partition("{")
        secret, _, after = rest.rpartition("}")
        before, secret, after = (part.replace("\0", "{").replace("\1", "}") for part in (before, secret, after))
        expected[before + secret + after] = f"{before}[redacted]{after}"
    assert {text: redact(text) for text in expected} == expected


INNOCENT = [
    *("max_tokens=100", "token_count: 5", "next_token = tokens[i]", "eos_token: '<|endoftext|>'"),
    *("pad_token = tokenizer.eos_token", "token = tokenizer2.decode(ids)", "token: 1234567890123"),
    *("token_type: bearer", "commit 3f786850e387550fdab836ed7e6dc881de23001b"),
    "id 550e8400-e29b-41d4-a716-446655440000",
    "VGhlIHF1aWNrIGJyb3duIGZveCBqdW1wcyBvdmVyIHRoZSBsYXp5IGRvZy4gMTIzNDU2Nzg5MA==",
    *("sorted(rows, key=lambda row: row[1])", "sort_key = order_by_name_and_date", "primary_key=True"),
    *('"key": "orders/2024/10/file.csv"', "monkey=abcdef1234567890abcdef", "keyword: alpha1beta2gamma3delta4"),
    *("the key: understanding 12345678901234567890", 'api_key=os.environ["OPENAI_API_KEY"]', "api_key = self.api_key"),
    *("api_key=openai_api_key, model=model", "api_key: str", "access_token = response_text"),
    *("password = get_password()", "password: Optional[str]", 'password: "string"', "password: required"),
    *("password=${DB_PASSWORD}", "password=$DB_PASSWORD", "password: <your password>", "password: ********"),
    *("secret = secrets.token_hex(16)", "The secret: everybody knows it", "PWD=/home/user/project-1"),
    *("risk-management-framework-2024", "task-1234567890abcdef12", "sk-learn-compatible-estimators"),
    *("Authorization: Basic authentication is required", "Bearer authentication-is-explained-below"),
    *('{"Authorization": "Bearer " + token}', 'f"Bearer {token}"', "http://localhost:8080/x@y"),
    *("git@github.com:x/y.git", "ssh://git@github.com/x", "https://{user}:{password}@host"),
    "eyJ is how JSON begins in base64",
    "-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8A\n-----END PUBLIC KEY-----",
    *("the machine is slow: login fails, password required", "machine host login me password <password>"),
    *("docker run -u 1000:1000000 image", "curl -u $USER:$PASSWORD https://host"),
    *("curl --user name:password https://host", "curl https://host; rsync -u host:path/to/it"),
    "<b>password</b>, <th class=password>Username</th>",
    *('{"password": ["This field is required."], "token": ["required"]}', '{"password": ["incorrect"]}'),
    *("password: |\n  The password of the user\n", "password: >-\n  required\n", "at 12:AAAA and 123456789:AAAA"),
    *("ghp_short and npm_config_cache and hf_hub_download", "already api_key=[redacted] and https://[redacted]@host"),
]


def test_innocent_text_stays_unchanged() -> None:
    assert [text for text in INNOCENT if redact(text) is not text] == []


def test_redaction_is_idempotent() -> None:
    once = redact("\n".join([*TOKENS, *NAMED]))
    assert redact(once) == once


def test_part_of_a_cut_key_is_removed() -> None:
    assert redact(f"-----BEGIN PRIVATE KEY-----\n{BODY}\n{BODY}\nand on") == "[redacted]\nand on"


UNITS = [
    *("key=", "password:", "password: ", "sk-", "-sk-", "eyJ", "eyJhbGciOi.", "://", "://a:", "://a:b", "a"),
    "secret='",
    *("-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\n-----BEGIN ", "-----BEGIN ", "token=a", "token=a1"),
    *("\\", "password\\\\\\", "password='\\", "AKIA", "AKIAIOSFODNN7EXAMPLE ", "authorization: digest ", "bearer a "),
    *("<password>a", "password:|\n a", "password:['1", "machine a login a password ", "curl -u a", "curl -u a:"),
    "curl ",
    *("password=a.b.", "password=a_", "xoxb-", "github_pat_", "api_key: str", "password = _", "token: a.", " ", "$a"),
]
STARTS = ["", "password=", "password: '", "token=", 'secret: "', "authorization: ", "sk-", "://", "bearer ", "eyJ"]


def spent_s(texts: list[str]) -> float:
    """Return the time of the processor that a search takes; other processes are not counted."""
    began = time.thread_time()
    for text in texts:
        redact(text)
    return time.thread_time() - began


def test_the_search_takes_time_in_proportion_to_the_text() -> None:
    """Twelve times the text may take thirty times the time; what looks again at what follows takes 144 times as much."""

    def spent_on(unit: str, chars: int) -> float:
        return spent_s([start + unit * (chars // len(unit)) for start in STARTS])

    slow = []
    for unit in UNITS:
        spent_on(unit, 100)
        few = min(spent_on(unit, 2_000) for _ in range(4))
        if all(spent_on(unit, 24_000) >= 30 * few for _ in range(3)):
            slow.append(unit)
    assert slow == []


def test_each_rule_takes_time_linear_in_its_marks() -> None:
    """Sixteen times the marks may take fifty times the time; what reads on from each mark takes 256 times as much."""

    def spent_on(mark: str, marks: int) -> float:
        units = [before + mark + after for before in ("", "_", "0m", "\\n") for after in ("", "1a", "=1a", "%3d1a.")]
        return spent_s([unit * marks + end for unit in units for end in ("!", "(", "'", "<", "\\")])

    slow = []
    for rule in redaction.RULES:
        spent_on(rule.mark, 10)
        few = min(spent_on(rule.mark, 40) for _ in range(4))
        if all(spent_on(rule.mark, 640) >= 50 * few for _ in range(3)):
            slow.append(rule.mark)
    assert slow == []


def test_only_a_mark_that_occurs_has_its_pattern_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    compiled = redaction._compiled

    def compile_and_note(pattern: str) -> re.Pattern[str]:
        tried.append(pattern)
        return compiled(pattern)

    monkeypatch.setattr(redaction, "_compiled", compile_and_note)
    redact("prose without any " * 1_000)
    assert tried == []
    redact("the token")
    assert [pattern[:5] for pattern in tried] == ["token"]


def test_value_is_redacted_at_any_depth_by_name() -> None:
    given = {
        "api_key": "anything",
        "n": 1,
        "list": ["fine", f"x {TOKENS[0]}"],
        "block": Block(f"print('{TOKENS[0]}')", "ok", stdout="fine"),
        "kept": {"max_tokens": "many"},
    }
    shown = redacted(given)
    assert shown == {
        "api_key": "[redacted]",
        "n": 1,
        "list": ["fine", "x [redacted]"],
        "block": Block("print('[redacted]')", "ok", stdout="fine"),
        "kept": {"max_tokens": "many"},
    }
    assert redacted(shown) == shown
    innocent = {"a": ["b", ("c", Block("d", "ok"))], "other": object()}
    assert redacted(innocent) is innocent


def test_too_long_text_loses_its_middle_on_request() -> None:
    assert redacted("a" * 10 + "b" * 10, 8) == "aaaaaa... [12 characters cut] ...bb"
    assert redacted("a" * 8, 8) == "a" * 8
    assert redacted("a" * 20) == "a" * 20


def test_an_error_is_told_in_words_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VENDORS_SECRET", "env-secret-value")
    assert in_words(ValueError(f"env-secret-value and {TOKENS[0]}")) == "ValueError: [redacted] and [redacted]"


def test_credentials_in_addresses_are_replaced() -> None:
    assert without_credentials("at https://me@host/a@b and http://x") == "at https://[redacted]@host/a@b and http://x"


def test_a_known_secret_has_six_characters_at_least() -> None:
    assert redact("abcdef abcde", ["abcdef", "abcde"]) == "[redacted] abcde"
    assert redacted({"token": "abcdef"}) == {"token": "[redacted]"}
    assert redacted({"token": "abcde"}) == {"token": "abcde"}


def test_event_text_is_bounded() -> None:
    assert Replied("1", 0, 1, "a" * 524_288).text == "a" * 524_288
    cut = Replied("1", 0, 1, "a" * 393_216 + "b" + "c" * 131_072).text
    assert cut == "a" * 393_216 + "... [1 characters cut] ..." + "c" * 131_072
