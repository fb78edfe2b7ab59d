"""SIGINT, sent for real to a process of its own: the handler lives in its main thread."""

import os
import signal
import threading

import pytest

from sandbox_worker.repl.interrupts import Interrupts
from tests.support.forked_child import in_child


def sigint() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_hits_model_code_at_once() -> None:
    def scenario() -> str:
        interrupts = Interrupts()
        interrupts.install()
        with pytest.raises(KeyboardInterrupt), interrupts.armed():
            sigint()
        return "raised"

    assert in_child(scenario) == "raised"


def test_interrupt_waits_for_our_code() -> None:
    """Our own code is left alone, and the interrupt comes at its end."""

    def scenario() -> list[str]:
        interrupts = Interrupts()
        interrupts.install()
        story = []
        try:
            with interrupts.armed():
                with interrupts.held():
                    with interrupts.held():
                        sigint()
                        story.append("inner goes on")
                    story.append("outer goes on")
                story.append("never")
        except KeyboardInterrupt:
            story.append("interrupted")
        return story

    assert in_child(scenario) == ["inner goes on", "outer goes on", "interrupted"]


def test_interrupt_ends_a_wait_in_our_code() -> None:
    """A wait inside of our code may be left at once."""

    def scenario() -> list[str]:
        interrupts = Interrupts()
        interrupts.install()
        story = []
        try:
            with interrupts.armed(), interrupts.held(), interrupts.let_through():
                sigint()
                story.append("never")
        except KeyboardInterrupt:
            story.append("interrupted")
        return story

    assert in_child(scenario) == ["interrupted"]


def test_interrupt_between_blocks_hits_no_block() -> None:
    def scenario() -> list[str]:
        interrupts = Interrupts()
        interrupts.install()
        sigint()
        with interrupts.armed():
            pass
        with interrupts.armed(), interrupts.held():
            pass
        return ["untouched"]

    assert in_child(scenario) == ["untouched"]


def test_interrupt_is_not_held_by_other_threads() -> None:
    def scenario() -> list[str]:
        interrupts = Interrupts()
        interrupts.install()
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with interrupts.held():
                inside.set()
                leave.wait()

        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
        story = []
        try:
            with interrupts.armed():
                sigint()
                story.append("never")
        except KeyboardInterrupt:
            story.append("interrupted")
        leave.set()
        thread.join()
        return story

    assert in_child(scenario) == ["interrupted"]
