"""Texts and files of a request become one context, as a REPL finds it."""

import io
import os
import zipfile
from collections.abc import Iterator

import pytest

from rlm_broker.errors import ContextRefused
from rlm_broker.serve.hosting.files import Files, UploadedFile
from rlm_broker.serve.hosting.owner import Owner, UnknownHandle
from rlm_broker.serve.materials import MOST_SHARED, Material, Text, _Names, stored_of

ALICE = Owner("alice")


@pytest.fixture
def files() -> Iterator[Files]:
    with Files() as files:
        yield files


def uploaded(files: Files, name: str, data: bytes) -> UploadedFile:
    with files.receiving(ALICE) as upload:
        upload.write(data)
        return upload.keep(name)


def zipped(**members: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return packed.getvalue()


async def value_of(*materials: Material) -> object:
    with await stored_of(materials) as stored:
        return stored.value()


async def test_lone_material_is_its_text(files: Files) -> None:
    assert await value_of(Text("any", "a text")) == "a text"
    assert await value_of(uploaded(files, "a.log", "ä file\n".encode())) == "ä file\n"


async def test_several_are_a_dict_by_unique_names(files: Files) -> None:
    """Names that steer a terminal are made printable, and repeated ones numbered."""
    one, two = uploaded(files, "a\n.log", b"one"), uploaded(files, "a\n.log", b"two \xff")
    assert await value_of(one, two, Text("a_.log", "three"), Text("", "four")) == {
        "a_.log": "one",
        "a_.log (1)": "two \ufffd",
        "a_.log (2)": "three",
        "text": "four",
    }


async def test_archive_gives_its_texts(files: Files) -> None:
    archive = uploaded(files, "logs.zip", zipped(x="1", y="2"))
    assert await value_of(archive) == {"x": "1", "y": "2"}
    assert await value_of(archive, Text("t", "3")) == {"logs.zip/x": "1", "logs.zip/y": "2", "t": "3"}


async def test_more_materials_than_a_worker_maps_apart(files: Files) -> None:
    many = [uploaded(files, f"{number}.txt", b"x" * number) for number in range(1, MOST_SHARED + 3)]
    assert await value_of(*many) == {f"{number}.txt": "x" * number for number in range(1, MOST_SHARED + 3)}


async def test_file_is_stored_once_and_outlives_its_deletion(files: Files) -> None:
    file = uploaded(files, "a.log", b"text")
    first, second = await file.stored(), await stored_of([file])
    (fd, _), (other, _) = *first.pieces(), *second.pieces()
    assert os.path.sameopenfile(fd, other)
    files.delete(ALICE, file.id)
    first.close()
    assert second.value() == "text"
    with pytest.raises(UnknownHandle):
        await stored_of([file])


async def test_file_without_text_is_refused(files: Files) -> None:
    binary = uploaded(files, "a.bin", b"\0\1")
    given: tuple[list[Material], ...] = ([binary], [binary, Text("t", "x")])
    for materials in given:
        with pytest.raises(ContextRefused, match=r"a\.bin is binary"):
            await stored_of(materials)
    with pytest.raises(ContextRefused, match=r"e\.txt is empty"):
        await stored_of([uploaded(files, "e.txt", b"")])


class Counting(_Names):
    """Names that count how often one is compared."""

    asked = 0

    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return super().__contains__(name)


def test_equal_names_take_linear_time() -> None:
    """A name is compared at most twice for each material, also if numbers are taken by others."""
    names = Counting()
    given = [*("a" for _ in range(300)), *(f"a ({n})" for n in range(200, 400)), *("a" for _ in range(300))]
    made = [names.unique(name) for name in given]
    assert made[:3] == ["a", "a (1)", "a (2)"]
    assert len(set(made)) == len(given)
    assert names.asked < 3 * len(given)
