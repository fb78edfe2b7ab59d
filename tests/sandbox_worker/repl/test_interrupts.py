"""SIGINT, sent for real to a process of its own: the handler lives in its main thread."""

import os
import signal
import threading
from collections.abc import Callable

from sandbox_worker.repl.interrupts import Interrupts
from tests.support.forked_child import in_child

Say = Callable[[str], None]


def story_of(scenario: Callable[[Interrupts, Say], None]) -> list[str]:
    """Return what a scenario says in a child, and that it was interrupted if it was."""

    def told() -> list[str]:
        interrupts, story = Interrupts(), list[str]()
        interrupts.install()
        try:
            scenario(interrupts, story.append)
        except KeyboardInterrupt:
            story.append("interrupted")
        return story

    return list(in_child(told))


def sigint() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_hits_model_code_at_once() -> None:
    def scenario(interrupts: Interrupts, say: Say) -> None:
        with interrupts.armed():
            sigint()
            say("never")

    assert story_of(scenario) == ["interrupted"]


def test_interrupt_waits_for_our_code() -> None:
    """Our own code is left alone, and the interrupt comes at its end."""

    def scenario(interrupts: Interrupts, say: Say) -> None:
        with interrupts.armed():
            with interrupts.held():
                with interrupts.held():
                    sigint()
                    say("inner goes on")
                say("outer goes on")
            say("never")

    assert story_of(scenario) == ["inner goes on", "outer goes on", "interrupted"]


def test_interrupt_ends_a_wait_in_our_code() -> None:
    def scenario(interrupts: Interrupts, say: Say) -> None:
        with interrupts.armed(), interrupts.held(), interrupts.let_through():
            sigint()
            say("never")

    assert story_of(scenario) == ["interrupted"]


def test_interrupt_between_blocks_hits_no_block() -> None:
    def scenario(interrupts: Interrupts, say: Say) -> None:
        sigint()
        with interrupts.armed():
            say("untouched")
        with interrupts.armed(), interrupts.held():
            say("untouched")

    assert story_of(scenario) == ["untouched"] * 2


def test_interrupt_is_not_held_by_other_threads() -> None:
    def scenario(interrupts: Interrupts, say: Say) -> None:
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with interrupts.held():
                inside.set()
                leave.wait()

        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
        try:
            with interrupts.armed():
                sigint()
                say("never")
        finally:
            leave.set()
            thread.join()

    assert story_of(scenario) == ["interrupted"]
