"""Files of containers by OpenAI's own client, those that code makes among them, and names that would lead elsewhere."""

from typing import Any

import httpx
import openai
import pytest

from tests.support.fds import memfds
from tests.support.service import Served


def run(served: Served, container: str, code: str) -> Any:
    url = f"{served.base_url}/containers/{container}/execute"
    return httpx.post(url, headers=served.headers, json={"code": code}, timeout=60).json()


def test_files_go_in_and_come_out(served: Served, client: openai.OpenAI, container: str) -> None:
    before = memfds("upload")
    data = bytes(range(256)) * 2_000
    made = client.containers.files.create(container, file=("../in.bin", data))
    assert (made.path, made.bytes, made.source, made.object) == (
        "/mnt/data/in.bin",
        len(data),
        "user",
        "container.file",
    )
    code = "import os; os.makedirs('deep/er'); open('deep/er/out', 'wb').write(open('in.bin', 'rb').read()[::-1])"
    run(served, container, code)
    listed = {file.path: file for file in client.containers.files.list(container, order="asc")}
    assert {path: file.source for path, file in listed.items()} == {
        "/mnt/data/in.bin": "user",
        "/mnt/data/deep/er/out": "assistant",
    }
    out = listed["/mnt/data/deep/er/out"]
    assert client.containers.files.content.retrieve(out.id, container_id=container).read() == data[::-1]
    assert client.containers.files.retrieve(out.id, container_id=container).bytes == len(data)
    client.containers.files.delete(made.id, container_id=container)
    assert [file.id for file in client.containers.files.list(container)] == [out.id]
    with pytest.raises(openai.NotFoundError):
        client.containers.files.content.retrieve(made.id, container_id=container)
    assert memfds("upload") == before


def test_uploaded_file_is_put_in_by_its_id(served: Served, client: openai.OpenAI, container: str) -> None:
    file = client.files.create(file=("a.txt", b"text"), purpose="user_data")
    assert client.containers.files.create(container, file_id=file.id).path == "/mnt/data/a.txt"
    run(served, container, "open('a.txt', 'a').write(' and more')")
    form = httpx.post(
        f"{served.base_url}/containers/{container}/files", headers=served.headers, files={"file_id": (None, file.id)}
    )
    assert form.json()["bytes"] == 4
    client.files.delete(file.id)


def test_names_that_code_makes_are_shown_and_lead_nowhere(
    served: Served, client: openai.OpenAI, container: str
) -> None:
    """Neither steers a terminal, and a link to a file of the machine is none."""
    run(
        served,
        container,
        "import os; open(b'\\xff\\x1b[2J', 'w'); os.symlink('/etc/passwd', 'link'); os.mkfifo('fifo')",
    )
    (file,) = client.containers.files.list(container)
    assert file.path == "/mnt/data/\\xff\\x1b[2J"
    assert client.containers.files.content.retrieve(file.id, container_id=container).read() == b""
    client.containers.files.delete(file.id, container_id=container)


def test_id_that_is_no_file_is_not_found(served: Served, container: str) -> None:
    """Among them are the ids of /etc/passwd, ../a, a NUL and a link."""
    run(served, container, "import os; os.symlink('/etc/passwd', 'link')")
    coded = ["", "%FF", "L2V0Yy9wYXNzd2Q", "Li4vYQ", "AA", "bGluaw"]
    for id in (*(f"cfile_{each}" for each in coded), "file-1", "x" * 5_000):
        url = f"{served.base_url}/containers/{container}/files/{id}"
        for answer in (httpx.get(url, headers=served.headers), httpx.get(f"{url}/content", headers=served.headers)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), id


def test_bad_file_is_refused(served: Served, client: openai.OpenAI, container: str) -> None:
    for sent, status, param in (
        ({"files": {"file": ("n" * 300, b"x")}}, 400, "file"),
        ({"files": {"file": ("a", b"x" * (2 << 20))}}, 413, None),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "x"}}, 400, "purpose"),
        ({"files": {"x": (None, "y")}}, 400, "file_id"),
        ({"json": {"file_id": "file-none"}}, 404, "file_id"),
        ({"json": {"file": "a"}}, 400, "file_id"),
        ({"content": b""}, 400, None),
    ):
        given: Any = sent
        answer = httpx.post(f"{served.base_url}/containers/{container}/files", headers=served.headers, **given)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert list(client.containers.files.list(container)) == []


def test_container_without_room_refuses_a_file(served: Served, client: openai.OpenAI) -> None:
    small = httpx.post(
        f"{served.base_url}/containers", headers=served.headers, json={"name": "", "limits": {"scratch_bytes": 1 << 16}}
    ).json()["id"]
    with pytest.raises(openai.BadRequestError, match="scratch_bytes"):
        client.containers.files.create(small, file=("a", b"x" * 500_000))
    client.containers.delete(small)


def test_too_many_folders_are_refused(served: Served, client: openai.OpenAI, container: str) -> None:
    run(served, container, "import os\nfor n in range(300): os.mkdir(str(n))")
    with pytest.raises(openai.BadRequestError, match="256 folders"):
        client.containers.files.list(container)
