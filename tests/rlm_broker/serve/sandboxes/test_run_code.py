"""`POST /run_code` by SandboxFusion's own client, whose key stands in the address."""

import base64
from typing import Any

import httpx
import pytest
import sandbox_fusion
from sandbox_fusion.models import CommandRunResult

from tests.support.service import Served
from tests.support.waiting import within_longer


def ran(served: Served, code: str, **given: Any) -> sandbox_fusion.RunCodeResponse:
    endpoint = f"http://:{served.key}@127.0.0.1:{served.port}"
    request = sandbox_fusion.RunCodeRequest(code=code, **{"language": "python", **given})
    return sandbox_fusion.run_code(request, endpoint, max_attempts=1)


def result(response: sandbox_fusion.RunCodeResponse) -> CommandRunResult:
    assert response.run_result is not None
    return response.run_result


def test_program_runs_as_by_python(served: Served) -> None:
    """With its stdin, its `__main__`, its threads, its functions of `atexit`, and no echo of a last value."""
    code = (
        "import atexit, sys, threading, time\n"
        "atexit.register(print, 'bye')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "if __name__ == '__main__': print(input(), sys.argv)\n"
        "'not shown'"
    )
    response = ran(served, code, stdin="typed\n")
    assert (response.status, response.message) == ("Success", "")
    assert result(response).stdout == "typed ['main.py']\nthread\nbye\n"
    assert (result(response).status, result(response).return_code) == ("Finished", 0)


def test_failed_program_has_its_exit_code(served: Served) -> None:
    for code, return_code, stderr in (
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import sys; sys.exit(3)", 3, ""),
        ("input()", 1, "EOFError"),
        ("def", 1, "SyntaxError"),
        ("import os; os.kill(os.getpid(), 9)", -9, "killed"),
    ):
        response = ran(served, code)
        assert response.status == "Failed"
        assert (result(response).status, result(response).return_code) == ("Finished", return_code), code
        assert stderr in (result(response).stderr or "")


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
def test_late_program_is_told_apart(served: Served, code: str) -> None:
    response = within_longer(
        lambda limit_s: ran(served, f"print('begun')\n{code}", run_timeout=limit_s),
        lambda response: result(response).stdout,
    )
    assert response.status == "Failed"
    assert (result(response).status, result(response).return_code) == ("TimeLimitExceeded", None)
    assert result(response).stdout == "begun\n"


def test_late_thread_is_told_apart(served: Served) -> None:
    response = ran(
        served, "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", run_timeout=0.5
    )
    assert result(response).status == "TimeLimitExceeded"


def test_files_are_put_in_and_fetched(served: Served) -> None:
    data = bytes(range(256))
    code = "open('out', 'wb').write(open('in/data', 'rb').read()[::-1])"
    files = {"in/data": base64.b64encode(data).decode(), "none": None}
    response = ran(served, code, files=files, fetch_files=["out", "missing", "in/data"])
    assert {path: base64.b64decode(content) for path, content in response.files.items()} == {
        "out": data[::-1],
        "in/data": data,
    }


def test_files_of_a_killed_program_are_fetched(served: Served) -> None:
    response = ran(served, "import os\nopen('out', 'w').write('half')\nos._exit(3)", fetch_files=["out"])
    assert (response.status, base64.b64decode(response.files["out"])) == ("Failed", b"half")


def test_other_language_is_a_sandbox_error(served: Served) -> None:
    with pytest.raises(Exception, match="this server runs python, and no cpp"):
        ran(served, "int main() {}", language="cpp")


def test_bound_of_memory_is_that_of_the_trainer(served: Served) -> None:
    """A bound beyond the server's leaves that one."""
    for limit, status in ((128, "Failed"), (1 << 30, "Success"), (-1, "Success")):
        body = {"code": "x = bytearray(1 << 28)", "language": "python", "memory_limit_MB": limit}
        answer = httpx.post(f"{served.url}/run_code", headers=served.headers, json=body)
        assert answer.json()["status"] == status


def test_bad_request_is_refused(served: Served) -> None:
    """Also memory that no machine has, and none that a REPL can use."""
    bad: list[tuple[dict[str, Any], int, str | None]] = [
        ({"run_timeout": 31}, 400, "run_timeout"),
        ({"run_timeout": 0}, 400, "run_timeout"),
        ({"files": {"a": "%%%"}}, 400, "files"),
        ({"files": {"../a": "YQ=="}}, 400, None),
        ({"fetch_files": ["../a"]}, 400, None),
        ({"unknown": 1}, 400, "unknown"),
        ({"code": None}, 400, "code"),
        *(({"memory_limit_MB": memory_mb}, 422, "memory_limit_MB") for memory_mb in (1e308, 1e12, 2**31, 3.9, 1e-308)),
    ]
    for given, status, param in bad:
        body = {"code": "1", "language": "python", **given}
        answer = httpx.post(f"{served.url}/run_code", headers=served.headers, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_key_is_needed(served: Served) -> None:
    body = {"code": "1", "language": "python"}
    basic = {"authorization": "Basic bm8="}
    statuses = [
        httpx.post(f"{served.url}/run_code", headers=headers, json=body).status_code
        for headers in ({}, basic, {"authorization": "Basic %%"}, served.headers_of("runner"))
    ]
    assert statuses == [401, 401, 401, 403]
