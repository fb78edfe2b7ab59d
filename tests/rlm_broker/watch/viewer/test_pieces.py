"""Compressed pieces: in order, whole, bounded in memory."""

import base64
import re
import zlib

import pytest

from rlm_broker.watch.viewer import page
from rlm_broker.watch.viewer.page import Pieces, pool


def _unpacked(elements: bytes) -> list[bytes]:
    found = re.findall(rb'<script type="text/plain" class="texts-piece">([A-Za-z0-9+/=]*)</script>\n', elements)
    assert b"".join(b'<script type="text/plain" class="texts-piece">%s</script>\n' % each for each in found) == elements
    return [zlib.decompress(base64.b64decode(each), -zlib.MAX_WBITS) for each in found]


@pytest.mark.parametrize("in_memory", [1 << 20, 1])
def test_pieces_come_back_in_order(monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    """Pieces are what was added, in this order, in memory and beyond it in a file."""
    monkeypatch.setattr(page, "IN_MEMORY_BYTES", in_memory)
    wanted = [b"</script>%d" % number * number for number in range(40)]
    with pool() as threads:
        packed = Pieces("texts-piece", threads)
        for each in wanted:
            packed.add(each)
        assert _unpacked(b"".join(packed.elements())) == wanted
        assert packed.count == 40
        packed.close()


def test_closed_pieces_leave_no_work() -> None:
    with pool() as threads:
        packed = Pieces("texts-piece", threads)
        packed.add(b"one")
        packed.close()
