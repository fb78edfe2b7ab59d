"""Uploaded files: their owners, bounds and ends, and that nothing is left of them."""

import asyncio
import gc
import io
import os
import zipfile

import pytest

from rlm_broker.errors import ConfigurationError, ValueTooLarge
from rlm_broker.serve.hosting.files import Files, UploadedFile
from rlm_broker.serve.hosting.owner import Owner, UnknownHandle
from tests.support.fds import memfds
from tests.support.waiting import until

ALICE, BOB = Owner("alice"), Owner("bob")


def uploaded(
    files: Files, data: bytes = b"data", owner: Owner = ALICE, expires_s: float | None = None, name: str = "a.txt"
) -> UploadedFile:
    with files.receiving(owner) as upload:
        upload.write(data)
        return upload.keep(name, expires_s=expires_s)


def test_file_is_there_for_its_owner_alone() -> None:
    with Files() as files:
        file = uploaded(files)
        assert files.get(ALICE, file.id) is file
        assert files.of(ALICE) == [file]
        assert files.of(BOB) == []
        for refused in (lambda: files.get(BOB, file.id), lambda: files.delete(BOB, file.id)):
            with pytest.raises(UnknownHandle):
                refused()


def test_content_is_sealed() -> None:
    with Files() as files:
        fd = uploaded(files).opened()
        try:
            assert os.pread(fd, 100, 0) == b"data"
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
        finally:
            os.close(fd)


def test_bounds_hold_while_a_file_comes() -> None:
    before = memfds("upload")
    with Files(file_bytes=10, owner_bytes=15, owner_files=2) as files:
        with pytest.raises(ValueTooLarge, match="more than 10 bytes"), files.receiving(ALICE) as upload:
            upload.write(b"x" * 11)
        uploaded(files, b"x" * 10)
        with pytest.raises(ValueTooLarge, match="delete some"), files.receiving(ALICE) as upload:
            upload.write(b"x" * 6)
        uploaded(files, b"x" * 10, BOB)
        uploaded(files, b"x" * 5)
        with pytest.raises(ConfigurationError, match="has 2 files"), files.receiving(ALICE):
            pass
        files.delete(ALICE, files.of(ALICE)[0].id)
        uploaded(files, b"x" * 10)
    assert memfds("upload") == before


def packed(text: str) -> bytes:
    """A small archive of a large text."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", text)
    return made.getvalue()


async def test_texts_of_files_count_to_their_owner() -> None:
    """Those that no caller uses make room for others, the least recently used first, and can be stored again."""
    before = memfds("")
    with Files(owner_bytes=250_000) as files:
        first, second, third = (uploaded(files, packed(letter * 100_000), name="a.zip") for letter in "abc")
        for file in (first, second, first):
            (await file.stored()).close()
        assert 200_000 < files.size_bytes < 250_000
        (await third.stored()).close()
        assert list(files._texts) == [first, third]
        assert 200_000 < files.size_bytes < 250_000
        with await second.stored() as used:
            assert used.value() == {"a.txt": "b" * 100_000}
            uploaded(files, b"x" * 100_000)
            assert list(files._texts) == [second]
            with pytest.raises(ValueTooLarge, match="with the texts that runs use, have more than 250,000 bytes"):
                await first.stored()
        (await first.stored()).close()
        for text in await asyncio.gather(*(uploaded(files, packed("d"), BOB, name="a.zip").stored() for _ in range(2))):
            text.close()
        files.delete(ALICE, first.id)
        assert first not in files._texts
    assert files.size_bytes == 0
    gc.collect()
    await until(lambda: memfds("") <= before)  # a thread that has stored a text lets go of it a moment later


async def test_expired_file_is_gone() -> None:
    with Files() as files:
        file = uploaded(files, expires_s=0.01)
        lasting = uploaded(files, expires_s=3_600)
        gone, close = asyncio.Event(), file.close

        def closed() -> None:
            close()
            gone.set()

        file.close = closed  # type: ignore[method-assign]
        await gone.wait()
        assert files.of(ALICE) == [lasting]
        with pytest.raises(UnknownHandle):
            file.opened()
