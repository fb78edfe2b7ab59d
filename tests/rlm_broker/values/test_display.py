"""A display as notebooks, servers and people read it. `e2e/test_displays.py` has its way from a block."""

import base64
import copy
import json
import pickle
from typing import Any

from rlm_broker import Block, Display
from rlm_broker.results import without_displays
from rlm_broker.values.display import picture_in
from rlm_broker.values.text import as_json, jsonable

PNG = b"\x89PNG\r\n\x1a\n" + bytes([0, 0, 0, 13]) + b"IHDR" + (640).to_bytes(4) + (480).to_bytes(4) + b"\x08\x06\xff"
SHOWN = [
    (Display({"image/png": PNG}), "Display(image/png, 640 x 480, 27 bytes)", "image/png, 640 x 480"),
    (Display({"image/png": PNG[:20]}), "Display(image/png, 20 bytes)", "image/png"),
    (Display({"image/png": b""}), "Display(image/png, 0 bytes)", "image/png"),
    (Display({"image/jpeg": b"abc"}), "Display(image/jpeg, 3 bytes)", "image/jpeg"),
    (Display({"image/svg+xml": "<svg/>"}), "Display(image/svg+xml, 6 characters)", "image/svg+xml"),
    (
        Display({"text/html": "x" * 50, "text/plain": "y"}),
        "Display(text/html, 50 characters; text/plain, 1 characters)",
        None,
    ),
    (Display({}), "Display()", None),
]


def test_repr_is_short_and_pictures_have_a_size() -> None:
    assert [(display, repr(display), picture_in(display)) for display, _, _ in SHOWN] == SHOWN


def test_dict_has_text_and_base64() -> None:
    display = Display({"image/png": PNG, "text/html": "<b>"})
    assert display.to_dict() == {"image/png": base64.b64encode(PNG).decode(), "text/html": "<b>"}
    assert display.sizes == {"image/png": len(PNG), "text/html": 3}


def test_notebook_gets_nothing_that_could_run() -> None:
    """IPython in a terminal prints the plain text as it is, so that it is escaped."""
    every = Display(
        {"image/png": b"1", "image/svg+xml": "2", "text/html": "3", "text/markdown": "4", "text/latex": "5"}
    )
    assert every._repr_mimebundle_() == {"text/plain": repr(every), "image/png": "MQ=="}
    text = "a\tb\n\x1b]52;c;aGk=\x07\x1b[2J\r\x9b1m\u202e\ud800é"
    bundle = Display({"text/plain": text, "text/html": "<script>"})._repr_mimebundle_(include=None, exclude=None)
    assert bundle == {"text/plain": "a\tb\n\\x1b]52;c;aGk=\\x07\\x1b[2J\\r\\x9b1m\\u202e\\ud800é"}
    odd: Any = {"image/\x1b[2J": b""}
    assert Display(odd)._repr_mimebundle_()["text/plain"].isprintable()


def test_block_with_displays_is_a_value() -> None:
    block = Block("code", "ok", displays=(Display({"image/png": PNG}),), displays_omitted=2)
    assert pickle.loads(pickle.dumps(block)) == copy.deepcopy(block) == block
    assert hash(block) == hash(copy.copy(block))
    shown = json.loads(as_json(jsonable(block)))
    assert shown["displays"] == [{"image/png": base64.b64encode(PNG).decode()}]
    assert without_displays(block) == Block("code", "ok", displays_omitted=2)
