"""The digest of a stored context, which is equal for equal contexts on any machine."""

import hashlib
import mmap

import msgspec

from rlm_broker.context.stored import StoredContext


def digest_of(context: StoredContext) -> bytes:
    """Return the SHA-256 of a context's pieces. Call it in a thread: it takes a second for each gigabyte.

    Args:
        context: Context that stays open meanwhile.

    Raises:
        OSError: There is no address space to map a piece.
    """
    digest = hashlib.sha256()
    for fd, piece in context.pieces():
        digest.update(msgspec.json.encode(piece))  # the form, too: contexts of two forms may have the same bytes
        with mmap.mmap(fd, piece.form.size_bytes, access=mmap.ACCESS_READ) as mapped:
            digest.update(mapped)
    return digest.digest()
