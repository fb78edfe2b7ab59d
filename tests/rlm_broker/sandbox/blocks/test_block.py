"""Input of a block that comes from a function, piece by piece."""

import tracemalloc
from unittest.mock import AsyncMock

from rlm_broker.sandbox.blocks.block import PIECE_BYTES, BlockInput


async def test_pieces_of_a_long_text_take_no_copies_of_the_rest() -> None:
    source = BlockInput(AsyncMock(side_effect=["x" * (8 << 20), ""]), 64 << 20)
    pieces = [len(await source.piece())]
    tracemalloc.start()
    while piece := await source.piece():
        pieces.append(len(piece))
    assert (tracemalloc.get_traced_memory()[1] < 1 << 20, {*pieces}, sum(pieces)) == (True, {PIECE_BYTES}, 8 << 20)
    tracemalloc.stop()
