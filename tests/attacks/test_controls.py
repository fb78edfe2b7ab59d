"""Ordinary work with data, which must simply work: a sandbox that refuses everything holds everything."""

import importlib.util
from collections.abc import Iterator

import pytest

from rlm_broker.limits import Limits
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.skips import require_cpp_library, require_time_zones
from tests.support.tables import table

PROGRAMS = {
    "regular_expressions": "import re; assert len(re.findall(r'\\b\\w+ing\\b', 'sing ' * 200_000)) == 200_000",
    "json": "import json; assert json.loads(json.dumps({'a': [1, 2.5, None, 'ä']}))['a'][3] == 'ä'",
    "csv": "import csv, io; assert list(csv.DictReader(io.StringIO('a,b\\n1,2\\n')))[0]['b'] == '2'",
    "sqlite_in_memory": "import sqlite3; c = sqlite3.connect(':memory:'); c.execute('create table t (x)'); c.execute('insert into t values (1)')",
    "sqlite_in_a_file": "import sqlite3\nwith sqlite3.connect('a.db') as c: c.execute('create table t (x)')\nassert sqlite3.connect('a.db').execute('select count(*) from t').fetchone() == (0,)",
    "threads": "import threading; r = []; ts = [threading.Thread(target=r.append, args=(i,)) for i in range(8)]; [t.start() for t in ts]; [t.join() for t in ts]; assert len(r) == 8",
    "thread_pools": "from concurrent.futures import ThreadPoolExecutor as P\nwith P(4) as p: assert list(p.map(len, ['a', 'bb'])) == [1, 2]",
    "queues_and_locks": "import queue, threading; q = queue.Queue(); threading.Timer(0.01, q.put, [1]).start(); assert q.get(timeout=5) == 1",
    "asyncio": "import asyncio\nasync def f(x): await asyncio.sleep(0.001); return x\nassert await asyncio.gather(*map(f, range(50))) == list(range(50))",
    "asyncio_threads": "import asyncio; assert await asyncio.to_thread(sum, [1, 2]) == 3",
    "temporary_files": "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f: f.write('x'); f.seek(0); assert f.read() == 'x'",
    "temporary_folders": "import tempfile, pathlib\nwith tempfile.TemporaryDirectory() as d: (pathlib.Path(d) / 'a').write_text('x'); assert len(list(pathlib.Path(d).iterdir())) == 1",
    "copies_and_moves": "import shutil, os; open('a', 'w').write('x'); shutil.copy2('a', 'b'); shutil.copytree('.', 'tree', ignore=shutil.ignore_patterns('tree')); shutil.move('b', 'c'); shutil.rmtree('tree'); assert os.path.exists('c')",
    "archives": "import zipfile, tarfile, gzip, io\nopen('z', 'w').write('x' * 1000)\nwith zipfile.ZipFile('z.zip', 'w') as z: z.write('z')\nwith tarfile.open('z.tgz', 'w:gz') as t: t.add('z')\nassert gzip.decompress(gzip.compress(b'x')) == b'x'",
    "bz2_and_lzma": "import bz2, lzma; assert lzma.decompress(lzma.compress(b'x' * 9999)) == bz2.decompress(bz2.compress(b'x' * 9999))",
    "dataclasses_and_enums": "import dataclasses, enum\n@dataclasses.dataclass(slots=True)\nclass P:\n    x: int = 1\nclass E(enum.Enum):\n    A = 1\nassert dataclasses.asdict(P()) == {'x': 1} and E['A'].value == 1",
    "pickling_of_own_classes": "import pickle\nclass P: pass\nassert isinstance(pickle.loads(pickle.dumps(P())), P)",
    "dates_and_zones": "import datetime as d, zoneinfo; assert d.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin')).utcoffset() == d.timedelta(hours=2)",
    "decimals_and_fractions": "import decimal, fractions; assert decimal.Decimal('0.1') + decimal.Decimal('0.2') == decimal.Decimal('0.3')",
    "statistics": "import statistics, math; assert statistics.fmean([1, 2, 3]) == 2 and math.comb(5, 2) == 10",
    "hashes": "import hashlib, hmac; assert hashlib.sha256(b'').hexdigest().startswith('e3b0c442')",
    "randomness": "import random, secrets, os; assert len({random.random(), random.random(), secrets.token_hex(), os.urandom(8)}) == 4",
    "text_tools": "import difflib, textwrap, unicodedata, string; assert unicodedata.name('é') and difflib.get_close_matches('appel', ['apple'])",
    "collections": "import collections, heapq, itertools, bisect; assert collections.Counter('aab').most_common(1) == [('a', 2)]",
    "logging_and_warnings": "import logging, warnings; logging.basicConfig(); logging.warning('w'); warnings.warn('x')",
    "introspection": "import inspect, traceback, dis, ast\ndef f(): return 1\nassert 'return 1' in inspect.getsource(f)",
    "lazy_imports": "import xml.etree.ElementTree as E, html.parser, urllib.parse, email.message, http.client; assert E.fromstring('<a/>').tag == 'a'",
    "ctypes_callbacks": "import ctypes; f = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: x + 1); assert f(1) == 2",
    "mapped_files": "import mmap; open('m', 'wb').write(bytes(4096)); f = open('m', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0] = 1; m.flush(); assert open('m', 'rb').read(1) == b'\\1'",
    "context_variables_and_caches": "import contextvars, functools\n@functools.lru_cache\ndef f(x): return x\nassert f(1) == 1 and contextvars.ContextVar('v', default=3).get() == 3",
    "signals_to_itself": "import signal; h = []; signal.signal(signal.SIGALRM, lambda *a: h.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause(); assert h",
    "pairs_of_sockets": "import socket; a, b = socket.socketpair(); a.sendall(b'x'); assert b.recv(1) == b'x'",
}
WITH_PROCESSES = {
    "subprocesses": "import subprocess; assert subprocess.run(['sort'], input=b'b\\na\\n', capture_output=True, check=True).stdout == b'a\\nb\\n'",
    "another_python": "import subprocess, sys; assert subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout == '42\\n'",
    "shell_pipelines": "import os; assert os.popen('printf abc | wc -c').read().strip() == '3'",
    "process_pools": "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: assert p.map(len, ['a', 'bb']) == [1, 2]",
    "process_pool_executors": "import multiprocessing as m\nfrom concurrent.futures import ProcessPoolExecutor as P\nwith P(2, mp_context=m.get_context('fork')) as p: assert list(p.map(abs, [-1, 2])) == [1, 2]",
    "async_subprocesses": "import asyncio; p = await asyncio.create_subprocess_exec('true'); assert await p.wait() == 0",
    "forks": "import os\np = os.fork()\nif p == 0: os._exit(7)\nassert os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) == 7",
}
LIBRARIES = {
    "numpy": "import numpy as n; assert (n.arange(6).reshape(2, 3) @ n.ones(3)).tolist() == [3.0, 12.0]",
    "pandas": "import pandas as p; assert p.DataFrame({'a': [1, 1, 2], 'b': [1, 2, 3]}).groupby('a').b.sum().tolist() == [3, 3]",
}  # fmt: skip


@pytest.fixture(scope="module", params=["strict", "standard"])
def repl(request: pytest.FixtureRequest) -> Iterator[SandboxedRepl]:
    with Sandbox(Limits(max_repl_restarts=100), request.param) as sandbox, sandbox.repl("text") as opened:
        yield opened


@table("name", [*PROGRAMS, *WITH_PROCESSES])
def test_ordinary_work_works(repl: SandboxedRepl, name: str) -> None:
    """Ordinary work works, that with processes where the level allows processes."""
    if name == "dates_and_zones":
        require_time_zones()
    if name in PROGRAMS or repl.isolation.level == "strict":
        block = repl.execute({**PROGRAMS, **WITH_PROCESSES}[name])
        assert block.status == "ok", block.stderr


@table("name", LIBRARIES)
def test_libraries_for_data_work(repl: SandboxedRepl, name: str) -> None:
    require_cpp_library()
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    block = repl.execute(LIBRARIES[name])
    assert block.status == "ok", block.stderr


def test_workers_draw_different_random_numbers() -> None:
    draws = "import random; print(random.random())"
    if importlib.util.find_spec("numpy") is not None:
        draws += "\nimport numpy; print(numpy.random.rand())"
    drawn: list[str] = []
    with Sandbox() as sandbox:
        for _ in range(3):
            with sandbox.repl() as fresh:
                drawn += fresh.execute(draws).stdout.split()
    assert len(set(drawn)) == 3 * len(draws.splitlines())
