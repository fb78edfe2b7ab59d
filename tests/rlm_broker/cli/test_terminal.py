"""The live line, panels and output of untrusted code, on a real terminal."""

import re
from pathlib import Path
from typing import Any

from tests.support.command import run
from tests.support.fake_openai import Answer, FakeOpenAI, completion
from tests.support.terminals import COLUMNS, lines_shown, on_a_terminal

HOSTILE = "import sys\nsys.stdout.write('\\x1b]0;owned\\x07' + 'plain\\ttext\\n')\nsys.stderr.write('\\x1b[2J')"


def test_escape_sequences_are_shown_on_a_terminal_and_sent_to_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    seen = on_a_terminal("exec", str(tmp_path / "hostile.py"))
    assert b"\x1b" not in seen
    assert rb"\x1b]0;owned\x07plain" in seen
    assert b"\ttext\r\n" in seen
    done = run("exec", tmp_path / "hostile.py")
    assert (done.stdout, done.stderr) == ("\x1b]0;owned\x07plain\ttext\n", "\x1b[2J")


def asked(server: FakeOpenAI, folder: Path, *options: str, **terminal: Any) -> bytes:
    (folder / "text.txt").write_text("The disk failed at 03:14.\n")
    base = ["--model", "m", "--base-url", server.base_url]
    return on_a_terminal("ask", "When did the disk fail?", str(folder / "text.txt"), *base, *options, **terminal)


def test_retries_and_failures_are_shown_above_the_live_line(tmp_path: Path) -> None:
    replies = (
        completion("```repl\nprint(undefined)\n```", 900, 20),
        Answer(status=429, headers={"Retry-After": "0.2"}),
        completion("```repl\nprint(llm_query('a part'))\n```", 900, 20),
        Answer(status=400),
        completion("FINAL(at 03:14)", 900, 20),
    )
    with FakeOpenAI(*replies, models=["m"]) as server:
        lines = lines_shown(asked(server, tmp_path))
    assert any("block 1: error after" in line and "NameError: name 'undefined'" in line for line in lines)
    assert any(re.search(r"call 2 failed, attempt 2 in .* s: m: HTTP status 429", line) for line in lines)
    assert any("[depth 1] call 3 failed: m: HTTP status 400" in line for line in lines)
    assert not any("[depth 0] turn" in line for line in lines)  # what goes well is in the live line alone
    assert any(line.endswith(" s, 3 turns, 3 calls, 2,700 tokens in and 60 out, cost unknown") for line in lines)
    assert lines[-1] == "at 03:14"


def test_the_live_line_ticks_while_nothing_happens_and_leaves_room_for_ctrl_c(tmp_path: Path) -> None:
    def has_ticked(seen: bytes) -> bool:
        return len(set(re.findall(rb"(\d+) s, turn 1 of 30, waiting for 1 call", seen))) > 1

    with FakeOpenAI(Answer(never=True), models=["m"]) as server:
        lines = lines_shown(asked(server, tmp_path, keys=b"\x03", after=has_ticked))
    assert any(re.match(r"\d+ s, starting: modules", line) for line in lines)
    live = [line for line in lines if re.match(r"\d+ s, ", line)]
    assert max(len(line.replace("^C", "")) for line in live) <= COLUMNS - 3
    assert lines[-1] == "rlm-broker ask: the run was cancelled before it had an answer"


def test_verbose_shows_each_turn_in_panels_and_errors_in_red(tmp_path: Path) -> None:
    looks = "I [bold]look[/bold]\x1b[2J.\n```repl\nprint(llm_query('a part'))\n1 / 0\n```"
    replies = completion(looks, 900, 20), completion("sub-reply", 10, 2), completion("FINAL(at 03:14)", 900, 20)
    with FakeOpenAI(*replies, models=["m"]) as server:
        seen = asked(server, tmp_path, "-v")
    lines = lines_shown(seen)

    def panel(title: str) -> list[str]:
        """The lines in the panel of this title."""
        at = next(number for number, line in enumerate(lines) if re.match(rf" *╭─ {title}", line))
        end = next(number for number in range(at, len(lines)) if lines[number].lstrip().startswith("╰"))
        return [line.strip(" │") for line in lines[at + 1 : end]]

    assert panel("run 1 with m ") == ["When did the disk fail?"]
    assert panel(r"turn 1: reply of m, .* s, 900 tokens in and 20 out ") == [r"I [bold]look[/bold]\x1b[2J."]
    assert panel("block 1 ") == ["print(llm_query('a part'))", "1 / 0"]
    assert panel(r"call 2: m, .* s, 10 tokens in and 2 out ") == ["asked", "a part", "replied", "sub-reply"]
    assert panel("block 1: error after .* s: ZeroDivisionError")[0] == "sub-reply"
    assert b"\x1b[31mZeroDivisionError: division by zero" in seen
    assert lines[-1] == "at 03:14"
    assert sum("at 03:14" in line for line in lines) == 2  # in the reply, and as the answer


def test_no_color_is_obeyed_and_a_terminal_without_a_cursor_gets_lines(tmp_path: Path) -> None:
    def shown(**variables: str) -> bytes:
        replies = iter([completion("```repl\n1 / 0\n```"), completion("FINAL(at 03:14)")])
        with FakeOpenAI(lambda _: next(replies), models=["m"]) as server:
            return asked(server, tmp_path, "-v", **variables)

    colourless = shown(NO_COLOR="1")
    assert "╭─ block 1: error after".encode() in colourless
    assert not re.search(rb"\x1b\[(3|9)\dm", colourless)
    lines = shown(TERM="dumb").splitlines()
    assert b"\x1b" not in b"".join(lines)
    assert b"[depth 0] turn 1" in lines


def test_the_live_line_tells_how_far_a_batch_has_come(tmp_path: Path) -> None:
    def answer(request: dict[str, Any]) -> Answer:
        asked = str(request["messages"][-1]["content"])
        if asked == "part 7":
            return Answer(never=True)
        return completion("done" if asked.startswith("part") else BATCH, 900, 20)

    with FakeOpenAI(answer, models=["m"]) as server:
        lines = lines_shown(asked(server, tmp_path, keys=b"\x03", after=b"batch 39 of 40"))
    assert any("turn 1 of 30, block 1 running, batch 39 of 40" in line for line in lines)
    assert lines[-1] == "rlm-broker ask: the run was cancelled before it had an answer"


BATCH = "```repl\nllm_query_batched([f'part {number}' for number in range(40)])\n```"


def test_a_command_that_reads_the_terminal_says_so() -> None:
    hint = b"reading from the terminal; Ctrl+D"
    assert b"2 + 2\r\n" in on_a_terminal("exec", "-", keys=b"print('2 + 2')\n\x04", after=hint)
    seen = on_a_terminal("ask", "Who is Ada?", "-", keys=b"Ada is a beekeeper.\n\x04", after=hint)
    assert b"beekeeper" in seen.rpartition(b" s, ")[2]
