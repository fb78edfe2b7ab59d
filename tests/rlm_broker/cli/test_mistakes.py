"""Mistakes of users: each one ends in one sentence and the right exit code, and no file is changed."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_broker.cli.commands import COMMANDS
from tests.support import forked_client, forked_python
from tests.support.command import COMMAND, ENVIRONMENT, WAIT_S
from tests.support.forked_python import python

FILES = {
    "text.txt": b"The beekeeper is called Ada.\n",
    "empty.txt": b"",
    "below/in.txt": b"text",
    "loop.py": b"while True: print('on and on')",
    "hello.py": b"print('hello')",
    "dies.py": b"import os; os._exit(7)",
    "crashes.py": b"import ctypes; ctypes.string_at(1)",
    "data": bytes(70_000),
    "server.toml": b'[serve.keys.ann]\nkey = "sk-a-real-key"\n',
    "typo.toml": b"[serve]\nmax_rums = 3\n",
}
ASK = [  # arguments of ask; exit code; part of the sentence
    ("q nowhere.log", 2, "nowhere.log does not exist"),
    ("q nowhere/", 2, "rlm-broker ask: nowhere/ does not exist"),
    ("q empty.txt", 2, "empty.txt is empty"),
    ("' ' text.txt", 2, "the question is empty"),
    ("", 2, "rlm-broker ask: Missing argument 'QUESTION'. See `rlm-broker ask --help`."),
    ("q", 2, "rlm-broker ask: name files or folders to ask about, or pipe a text in: stdin is empty"),
    ("q -", 2, "stdin is empty"),
    ("q - text.txt", 2, "- is stdin, and cannot be combined"),
    ("text.txt", 2, "text.txt is a path: the question comes first, then what it is about"),
    ("text.txt 'Who is the beekeeper?'", 2, "text.txt is a path: the question comes first, then what it is about"),
    ("q https://host.invalid/x", 2, "'https://host.invalid/x' is an address"),
    ("q text.txt --xyzzy", 2, "rlm-broker ask: No such option '--xyzzy'. See `rlm-broker ask --help`."),
    ("q text.txt --mdoel x", 2, "'--sub-model'?) See `rlm-broker ask --help`."),
    ("q text.txt --timeout 3", 2, "No such option '--timeout'; did you mean --limit run_timeout_s=10m? See"),
    ("q text.txt --file x", 2, "No such option '--file'; did you mean a path behind the question?"),
    ("q text.txt --format json", 2, "No such option '--format'; did you mean --json?"),
    ("q text.txt --set foo=1", 2, "there is no such limit or setting; `rlm-broker config show` lists all"),
    ("q text.txt --max-iterations 3", 2, "did you mean --limit max_iterations=VALUE?"),
    ("q text.txt --set modle=x", 2, "--limit modle: there is no such limit or setting; did you mean model?"),
    ("q text.txt -o below/in.txt", 2, "below/in.txt exists: remove it, or name another file; --output-type names a"),
    ("q text.txt -o /nowhere/x", 2, "cannot write /nowhere/x: there is no folder /nowhere"),
    ("q text.txt --model", 2, "rlm-broker ask: Option '--model' requires an argument. See `rlm-broker ask --help`."),
    ("q text.txt --max-nodes 2", 2, "No such option '--max-nodes'; did you mean --set max_nodes=VALUE?"),
    ("q text.txt --set max_nodes=2", 2, "--set max_nodes has no effect without a cluster: give --set cluster=auto"),
    ("q text.txt --set strict_text=maybe", 2, "strict_text = 'maybe': give true or false"),
    ("q text.txt --set encoding=klingon", 2, "klingon"),
    ("q text.txt --replay /nowhere --set model_policy=open", 2, "give either models or a recording to replay"),
    ("q text.txt --model nonsense", 2, "'nonsense' is not the name of a model"),
    ("q text.txt --model ''", 2, "the model's name is empty"),
    ("q text.txt --model openai/gpt-5-mini", 2, "needs OPENAI_API_KEY, which is not set"),
    ("q text.txt --api-key sk-plain", 2, "'--api-key': write env:NAME of the variable that holds the key"),
    ("q text.txt --base-url http://127.0.0.1:1/v1", 2, "name the model that the base_url or the api_key is for"),
    ("q text.txt --base-url nowhere --model m", 2, "'nowhere' is not the address of a server"),
    ("q text.txt --base-url http://127.0.0.1:1/v1 -m m", 5, "cannot connect to http://127.0.0.1:1/v1: Connection"),
    ("q text.txt --replay /nowhere --model offline", 2, "give either models or a recording to replay"),
    ("q text.txt --replay /nowhere", 2, "cannot read the recording /nowhere"),
    ("q text.txt --isolation vault", 2, "'vault' is not one of 'auto', 'strict', 'standard', 'process'."),
    ("q text.txt --allow-exec --isolation standard", 2, "cannot start programs"),
    ("q text.txt --set prompt_profile=final --system x", 2, "give either a system prompt or a prompt profile"),
    ("q text.txt --tools /nowhere.py", 2, "tools: cannot read /nowhere.py: No such file or directory"),
    ("q text.txt --output-type text.txt", 2, "text.txt is not JSON: "),
    ("q text.txt --python /nowhere", 2, "python: there is no /nowhere"),
    ("q text.txt --packages six --python /nowhere", 2, "give either python or packages"),
    ("q text.txt --max-depth -1", 2, "limit max_depth = -1: "),
    ("q text.txt --max-depth 3 --limit max_depth=2", 2, "--limit max_depth is given twice: give it once"),
    ("q text.txt --limit memory_bytes=99999999999999999999999", 2, "limit memory_bytes = "),
    ("q text.txt --limit memory_bytes=1", 2, "limit memory_bytes = 1: give bytes from 1048576 to"),
    ("q text.txt --limit memory_bytes=64XB", 2, "memory_bytes = 64XB: give bytes from 1048576 to"),
    ("q text.txt --trace /nowhere/t", 2, "cannot write the trace /nowhere/t: No such file or directory"),
    ("q text.txt --trace text.txt", 2, "lies in what you ask about"),
    ("q below --record below/new", 2, "lies in what you ask about"),
    ("q text.txt --record below/new --trace below/../below/new", 2, "--trace and --record name the same file"),
]
EXEC = [
    ("nowhere.py", 2, "cannot read nowhere.py: No such file or directory"),
    ("/", 2, "cannot read /: Is a directory"),
    ("--isolation vault -", 2, "'vault' is not one of 'auto', 'strict', 'standard', 'process'"),
    ("--python /nowhere -", 2, "python: there is no /nowhere: make one by `uv venv"),
    ("--packages '-r list' -", 2, "packages: '-r' is not a name with versions"),
    ("--timeout 0 -", 2, "limit block_timeout_s = 0: give a finite number of seconds above 0"),
    ("--timeout nan -", 2, "limit block_timeout_s = nan: "),
    ("--timeout soon -", 2, "limit block_timeout_s = soon: give a finite number of seconds above 0, or a time such"),
    ("--set encoding=cp1252 -", 2, "--limit encoding has no effect on exec, which runs a program without any model"),
    ("--limit memory_bites=1 -", 2, "there is no such limit or setting; did you mean memory_bytes?"),
    ("--limit memory_bytes -", 2, "give NAME=VALUE"),
    ("--limit =3 -", 2, "give NAME=VALUE"),
    ("--limit memory_bytes=lots -", 2, "limit memory_bytes = lots: "),
    ("--file nowhere hello.py", 2, "nowhere cannot be read: No such file or directory"),
    ("--file below hello.py", 2, "is not a regular file"),
    ("--file hello.py hello.py", 2, "there is a file hello.py already: give it a name by LOCAL=NAME"),
    ("--file data=a --file hello.py=./a loop.py", 2, "there is a file a already"),
    ("--file data=../a hello.py", 2, "the path '../a' must be without '..': absolute, or from the REPL's scratch folder"),
    ("--file data= hello.py", 2, "give LOCAL or LOCAL=NAME, for example /srv/table.csv=data.csv"),
    ("--limit scratch_bytes=64k --file data hello.py", 2, "'data' needs 70,000 bytes, and scratch_bytes leaves room"),
    ("--limit max_frame_bytes=4k /dev/zero", 2, "/dev/zero has more than max_frame_bytes = 4,096: raise it by --limit"),
]
SERVE = [
    ("--key env:NO_SUCH_KEY", 2, "serve.keys.default: the variable NO_SUCH_KEY is not set"),
    ("--key sk-a-real-key", 2, "env:NAME"),
    (
        "--config server.toml",
        2,
        "serve.keys.ann.key must be env:NAME, with the name of the variable that holds the key",
    ),
    ("--config typo.toml", 2, "there is no setting 'serve.max_rums'; did you mean max_runs?"),
    ("--config /no/such/file.toml", 2, "/no/such/file.toml"),
    ("--host 0.0.0.0", 2, "0.0.0.0 is beyond loopback: give --certificate and --private-key for TLS"),
    ("--host no.such.host.invalid --behind-proxy", 2, "cannot listen on no.such.host.invalid"),
    ("--certificate x.pem", 2, "TLS needs both files"),
    ("--certificate no.pem --private-key text.txt", 2, "no.pem cannot be read: No such file or directory"),
    ("--certificate text.txt --private-key text.txt", 2, "it is no PEM"),
    ("--context logs", 2, "--context logs: give NAME=PATH"),
    ("--context logs=/no/such/place", 2, "serve.contexts.logs: /no/such/place does not exist"),
    ("--context a=/tmp --context a=/etc", 2, "--context a is given twice"),
    ("--context 'a b=/tmp'", 2, "serve.contexts.a b"),
    ("--max-runs 0", 2, "serve.max_runs must be above 0"),
    ("--port 70000", 2, "serve.port must be at most 65535"),
]
OTHERS = [
    ("fly", 2, f"rlm-broker: No such command 'fly'; there are: {', '.join(COMMANDS)}. See `rlm-broker --help`."),
    ("aks q f", 2, "rlm-broker: No such command 'aks'; did you mean ask? See `rlm-broker --help`."),
    ("ask q empty.txt", 2, "rlm-broker ask: empty.txt is empty"),
    ("models default ''", 2, "rlm-broker models: the name of the model is empty: name one, such as"),
    ("help aks", 2, "rlm-broker: No such command 'aks'; did you mean ask? See `rlm-broker --help`."),
    ("--fast", 2, "rlm-broker: No such option '--fast'. See `rlm-broker --help`."),
    ("config shwo", 2, "rlm-broker config: No such command 'shwo'; did you mean show? See `rlm-broker config --help`."),
    (
        "config show --limit max_dpth=3",
        2,
        "config show: --limit max_dpth: there is no such limit or setting; did you mean max_depth?",
    ),
    ("runs /dev/null", 2, "rlm-broker runs: No such command '/dev/null'; did you mean runs show /dev/null?"),
    ("run x.py", 2, "rlm-broker: No such command 'run'; did you mean ask or exec?"),
    ("runs export f --rlm", 2, "--rlm is no longer written: give --otlp, or read the trace, which is JSON lines"),
    ("runs export f --chrome", 2, "--chrome is no longer written: give --otlp, or read the trace"),
    ("runs stop 'nothing\x1b[31m'", 2, "see `rlm-broker runs`"),
    ("runs show text.txt", 2, "rlm-broker runs show: text.txt is not a trace: line 1 is not JSON"),
    ("runs show empty.txt", 2, "rlm-broker runs show: empty.txt is not a trace: it is empty"),
    ("runs show /dev/zero", 2, "line 1 has"),
    ("runs show nowhere", 2, "cannot read"),
    ("runs view --no-open --out below/new nowhere", 2, "cannot read"),
    ("runs view --no-open --out below/new below", 2, "cannot read"),
    ("runs view --no-open --out below/new text.txt", 2, "text.txt is not a trace: line 1"),
    ("runs view --no-open --host 0.0.0.0", 2, "ssh -L"),
    ("runs view --no-open --host example.com", 2, "ssh -L"),
]
SHELL = [
    ("rlm-broker ask 'Who is the beekeeper?' text.txt -q >&-", 0, ""),
    ("rlm-broker ask 'Who?' - -q <&-", 2, "stdin is empty"),
    ("rlm-broker ask 'Who is the beekeeper?' text.txt -q >/dev/full", 1, "no space is left"),
    ("rlm-broker ask 'Who is the beekeeper?' text.txt -q --trace /dev/full", 0, "the trace /dev/full is not whole: No"),
    ("rlm-broker ask $'Who is the beekeeper? \\xff' text.txt -q -m offline", 0, ""),
    ("rlm-broker doctor --json >/dev/full", 1, "no space is left"),
    ("rlm-broker exec hello.py >/dev/full", 1, "rlm-broker: the output cannot be written: no space is left"),
    ("rlm-broker exec loop.py | head -1; exit ${PIPESTATUS[0]}", 1, ""),
    ("rlm-broker exec dies.py", 1, "os._exit"),
    ("rlm-broker exec crashes.py", 1, "SIGSEGV"),
    ("rlm-broker exec --timeout 0.5 loop.py >/dev/null", 3, "block_timeout_s = 0.5 s"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "cases"),
    [("ask -q", ASK), ("exec", EXEC), ("serve --port 0", SERVE), ("", OTHERS)],
    ids=["ask", "exec", "serve", "others"],
)
def test_a_mistake_is_one_sentence(folder: Path, command: str, cases: list[tuple[str, int, str]]) -> None:
    wrong = []
    for line, exit_code, said in cases:
        done = python("-m", "rlm_broker", *shlex.split(f"{command} {line}"), env=ENVIRONMENT, cwd=folder)
        is_right = (done.returncode, done.stdout, done.stderr.count("\n")) == (exit_code, "", 1)
        if not is_right or said not in done.stderr or any(each in done.stderr for each in ("\x1b", "sk-")):
            wrong.append((line, done.returncode, done.stderr, done.stdout))
    assert wrong == []
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert not (folder / "below" / "new").exists()


def test_a_mistake_in_a_shell_is_a_sentence_and_an_exit_code(folder: Path) -> None:
    fork = f"{sys.executable} -IS {forked_client.__file__} {forked_python.address()} -m rlm_broker"
    wrong = []
    for script, exit_code, said in SHELL:
        command = " ".join(COMMAND) if "&-" in script else fork  # a fork has all standard streams
        line = ["bash", "-c", script.replace("rlm-broker", command, 1)]
        done = subprocess.run(
            line, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        is_ours = 'File "/' in done.stderr or "warning: on_output" in done.stderr  # a traceback
        if done.returncode != exit_code or said not in done.stderr or is_ours:
            wrong.append((script, done.returncode, done.stderr))
    assert wrong == []
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
