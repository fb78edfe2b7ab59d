"""Real shapes of replies, with the result of each; then properties that hold for every text."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlm_broker.values.parsing import ParsedReply, parse_reply
from rlm_broker.values.parsing.finals import FinalText, FinalVar
from rlm_broker.values.parsing.source import Inspector, StringScanner

ANY_TEXT = st.text(st.characters(codec=None))
"""Lone surrogates and NULs included."""


WITHIN = "a final answer that begins no line, or does not end"
MISPLACED = "a ```repl fence that is not on lines of its own"
UNTAGGED = "an untagged fence"
MENTIONED = "a final answer inside a sentence"
EMPTY = "an empty final answer"
NO_NAME = "a FINAL_VAR without a variable's name"


@dataclass(frozen=True)
class Shape:
    """A reply, and what must come of it. `final` is the answer's text."""

    reply: str
    code: tuple[str, ...] = ()
    final: str | None = None
    var: str | None = None
    not_run: tuple[str, ...] = ()

    def expected_final(self) -> FinalText | FinalVar | None:
        if self.var is not None:
            return FinalVar(self.var)
        return None if self.final is None else FinalText(self.final)


def code(reply: str, *blocks: str) -> Shape:
    return Shape(reply, blocks)


def unused(reply: str, *notes: str) -> Shape:
    return Shape(reply, not_run=notes)


def answer(reply: str, final: str) -> Shape:
    return Shape(reply, final=final)


DOC = 'p = """\n```json\n{}\n```\n"""\nprint(p)'
TYPO = 'x = """abc'

SHAPES = {
    "a repl fence": code("Let me look.\n```repl\nprint(len(context))\n```\n", "print(len(context))"),
    "a python fence": code("```python\nx = 1\n```", "x = 1"),
    "a py fence": code("```py\nx = 1\n```", "x = 1"),
    "a python3 fence without a stray 3": code("```python3\nx = 1\n```", "x = 1"),
    "an upper-case tag": code("```REPL\nx = 1\n```\n```Python\ny = 2\n```", "x = 1", "y = 2"),
    "a space before the tag": code("``` repl\nx = 1\n```", "x = 1"),
    "a tag in braces": code("```{repl}\nx = 1\n```", "x = 1"),
    "a tag with a dot in braces": code("```{.python .numberLines}\nx = 1\n```", "x = 1"),
    "a tag and attributes": code('```repl title="count.py"\nx = 1\n```', "x = 1"),
    "a tag and a file name": code("```python:main.py\nx = 1\n```", "x = 1"),
    "repl and python blocks in the reply's order": code(
        "```python\na\n```\n```repl\nb\n```\n```python\nc\n```", "a", "b", "c"
    ),
    "tildes": code("~~~repl\nx = 1\n~~~", "x = 1"),
    "backticks inside tildes": code('~~~repl\nx = """\n```\n"""\n~~~', 'x = """\n```\n"""'),
    "three backticks inside four": code("````repl\nx = '''\n```\n'''\n````", "x = '''\n```\n'''"),
    "a shorter fence is content": code("````repl\nx = 1\n```\n!y\n````", "x = 1\n```\n!y"),
    "escaped quotes end no string": code('```repl\nx = """a \\"""\n```\nb"""\n```', 'x = """a \\"""\n```\nb"""'),
    "a longer closing fence": code("```repl\nx = 1\n`````\nDone.", "x = 1"),
    "an indented fence": code("  ```repl\n  for x in y:\n      z()\n  ```", "for x in y:\n    z()"),
    "an indented fence around code that is not": code("   ```repl\nif a:\n  b()\n   ```", "if a:\n  b()"),
    "a fence in a list": code("1. ```repl\n   x = 1\n   ```\n2. Done", "x = 1"),
    "a closing fence that is indented": code("```repl\nx = 1\n  ```\nThen we see.", "x = 1"),
    "a fence behind a sentence": code("Step 1: ```python\nx = 1\n```\nDone.", "x = 1"),
    "a fence behind an exclamation": code("Okay! ```repl\nx = 1\n```\nDone.", "x = 1"),
    "a fence behind a whole sentence": code("Let me look. ```repl\nx = 1\n```", "x = 1"),
    "a fence behind bold words": code("**Code:** ```repl\nx = 1\n```", "x = 1"),
    "a fence right behind a word": code("Okay```python\nx = 1\n```", "x = 1"),
    "a fence behind words and code in a line": code("I look at `x`. ```repl\nx = 1\n```", "x = 1"),
    "a fence behind code in a line": code("`x` first! ```repl\nx = 1\n```", "x = 1"),
    "a fence behind words and a longer span of code": code("I use ```repl``` and ``x``. ```repl\nx = 1\n```", "x = 1"),
    "a tag in braces behind words": code("So. ```{repl}\nx = 1\n```", "x = 1"),
    "a tag and attributes behind words": code("So. ```repl title=x\nx = 1\n```", "x = 1"),
    "an upper-case fence behind words": code("So. ```REPL \nx = 1\n```", "x = 1"),
    "a longer fence behind words": code("So. ````repl\nx = '''\n```\n'''\n````", "x = '''\n```\n'''"),
    "an unclosed fence behind words": code("Okay! ```repl\nx = 1\nprint(x)", "x = 1\nprint(x)"),
    "an unclosed fence behind an announcement": code("So: ```repl\n!ls", "!ls"),
    "fences behind words in a row": code("First. ```repl\nx = 1\n```\nThen. ```repl\ny = 2\n```", "x = 1", "y = 2"),
    "a fence behind words, not closed before the next": code(
        "Okay! ```repl\nx = 1\n```repl\ny = 2\n```", "x = 1", "y = 2"
    ),
    "a fence behind the words of a list": code(
        "1. Let me look. ```repl\n   if x:\n     y()\n   ```\n2. Done", "if x:\n  y()"
    ),
    "a fence behind an announcement in a list": code("- Code: ```repl\n  x = 1\n  ```", "x = 1"),
    "a fence behind words inside a string": code(
        '```repl\nx = """\nOkay! ```repl\n"""\n```', 'x = """\nOkay! ```repl\n"""'
    ),
    "a fence behind words in a comment": code("```repl\n# as in ```repl\nx = 1\n```", "# as in ```repl\nx = 1"),
    "words that end with a tag, and a block": code(
        "I put code into ```repl\nfences, like so:\n```repl\nx = 1\n```", "x = 1"
    ),
    "CRLF": code("```repl\r\nx = 1\r\ny = 2\r\n```\r\n", "x = 1\ny = 2"),
    "an unclosed last fence": code("Look:\n```repl\nx = 1\nprint(x)", "x = 1\nprint(x)"),
    "backticks at the end of a line close nothing": code(
        "```repl\nprint('```')\nx = '```'\n```", "print('```')\nx = '```'"
    ),
    "a string that shows a fence": code(f"```repl\n{DOC}\n```\nI wait.", DOC),
    "a string that shows a fence, unclosed": code(f"```repl\n{DOC}", DOC),
    "a string that shows a fence, and another block": code(
        f"```repl\n{DOC}\n```\nAnd:\n```repl\ny = 2\n```", DOC, "y = 2"
    ),
    "a raw f-string that shows two fences": code(
        "```repl\nq = rf'''a\n```\nb\n```\n{x}\\''''\n```", "q = rf'''a\n```\nb\n```\n{x}\\''''"
    ),
    "a string left open by mistake ends with its fence": code(
        f"```repl\n{TYPO}\n```\nThen:\n```repl\ny = 2\n```", TYPO, "y = 2"
    ),
    "a string that ends in another block, and is not Python": code(
        f'```repl\n{TYPO}\n```\nThen:\n```repl\ny = \'a"""\'\n```', TYPO, 'y = \'a"""\''
    ),
    "quotes in a comment open no string": code('```repl\n# """\nx = 1\n```\n"""', '# """\nx = 1'),
    "code that is no Python is run all the same": code("```repl\n!ls -l\n```", "!ls -l"),
    "a block that was not closed before the next": code("```repl\nx = 1\n```repl\ny = 2\n```", "x = 1", "y = 2"),
    "a data block that was not closed before the code": code('```json\n{"a": 1}\n```repl\ny = 2\n```', "y = 2"),
    "a data block that was not closed before several blocks": code(
        '```json\n{"a": 1}\n```repl\nx = 1\n```repl\ny = 2\n```', "x = 1", "y = 2"
    ),
    "code indented less than its fence": code("   ```repl\n  x = 1\n   ```", "  x = 1"),
    "an empty line, and code indented less than its fence": code("   ```repl\n\n  x = 1\n   ```", "\n  x = 1"),
    "a stray closing fence before the code": code("Done.\n```\n\nNow:\n```repl\ny = 2\n```", "y = 2"),
    "code in thoughts is no code": code(
        "<think>\n```repl\ndraft()\n```\nFINAL(1)</think>\n```repl\nx = 1\n```", "x = 1"
    ),
    "thoughts that never end are the reply": code("<think>\n```repl\nx = 1\n```", "x = 1"),
    "a reply of words": unused("I need to look at the context first."),
    "an empty fence": unused("```repl\n\n```", "an empty ```repl fence"),
    "code on the line of the tag": unused("```repl print(1)\n```", "an empty ```repl fence"),
    "a fence on one line": unused("```repl print(1)```", MISPLACED),
    "a fence on one line behind words": unused("Okay! ```repl print(1)```", MISPLACED),
    "a quoted fence behind words": unused("> Okay! ```repl\n> x = 1\n> ```", MISPLACED),
    "words that end with a tag": unused("Code goes into a fence with ```repl\nand I have none.", MISPLACED),
    "a tag in a span of code at the end of a line": unused("I write `` ```repl ``\nand then code.", MISPLACED),
    "a tag behind a backtick": unused("I write ` ```repl\nx = 1\n```", MISPLACED),
    "a fence of data behind words": unused('It is ```json\n{"a": 1}\n```', "a ```json fence"),
    "bash behind words": unused("Okay! ```bash\nls\n```", "a ```bash fence"),
    "code in an untagged fence behind words": unused("Okay! ```\nprint(1)\n```", UNTAGGED),
    "an answer behind an untagged fence behind words": answer("It is: ```\n1, 2\n```\nFINAL(3)", "3"),
    "an answer behind words that end with backticks": answer("I use ```\nFINAL(3)", "3"),
    "a mention of a fence, and code": code("I use ```repl``` fences.\n```repl\nx = 1\n```", "x = 1"),
    "a document that shows a fence behind words": unused(
        "```markdown\nOkay! ```repl\nx = 1\n```\n", "a ```markdown fence"
    ),
    "a quoted fence": unused("> ```repl\n> x = 1\n> ```", MISPLACED),
    "a quoted fence with an upper-case tag, later": unused("Look:\n> ```REPL\n> x = 1\n> ```", MISPLACED),
    "a value with a type in an untagged fence": unused("```\nx: int = 5\n```", UNTAGGED),
    "code in an untagged fence": unused("```\nprint(1)\n```", UNTAGGED),
    "code in an untagged fence, and code": Shape(
        "```repl\nx = 1\n```\n```\nx = 2\n```", ("x = 1",), not_run=(UNTAGGED,)
    ),
    "text in an untagged fence": unused("It printed:\n```\nThe cat sat.\n```\n```\nTotal: 5\n```"),
    "bash": unused("```bash\nls\n```", "a ```bash fence"),
    "bash, and code": Shape("```bash\nls\n```\n```repl\nx = 1\n```", ("x = 1",), not_run=("a ```bash fence",)),
    "several languages, each once": unused(
        "```sql\nselect 1\n```\n```js\nf()\n```\n```sql\nselect 2\n```", "a ```sql fence", "a ```js fence"
    ),
    "data, and code": code('```json\n{"a": 1}\n```\n```repl\nx = 1\n```', "x = 1"),
    "data, and an answer": answer("```text\nabc\n```\nFINAL(1)", "1"),
    "data alone": unused('```json\n{"a": 1}\n```', "a ```json fence"),
    "an answer inside a text fence": unused("```text\nFINAL(42)\n```", "a ```text fence"),
    "a document that shows code": unused("````markdown\n# How\n```python\nprint(1)\n```\n````", "a ```markdown fence"),
    "a document with as many backticks as its code": code(
        "```markdown\n# How\n```python\nprint(1)\n```\nEnd.\n```\n```repl\nx = 1\n```", "x = 1"
    ),
    "a shorter fence closes no document": answer("````text\n```\nFINAL(shown)\n````\nFINAL(meant)", "meant"),
    "a document that was not closed": code(
        "```markdown\n# How\n```python\nprint(1)\n```\nAnd\n```repl\nx = 1\n```", "x = 1"
    ),
    "code in thoughts alone": unused("<think>\n```repl\nx = 1\n```\n</think>\nDone.", "code inside your reasoning"),
    "code in thoughts, told before what stands first in the reply": unused(
        "<think>\n```repl\nx = 1\n```\n</think>```bash\nls\n```", "code inside your reasoning", "a ```bash fence"
    ),
    "<tool_call>": unused(
        '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>',
        "<tool_call> markup",
        "a tool call in JSON",
    ),
    "<function=…>": unused("<function=python>\nprint(1)\n</function>", "<function=…> markup"),
    "<invoke …>": unused('<function_calls>\n<invoke name="python">', "<function_calls> markup", "<invoke …> markup"),
    "<python>": unused("Let me run <python>print(1)</python>", "<python> markup"),
    "<code>": unused("<code>\nprint(1)\n</code>", "<code> markup"),
    "<code> as typography": unused("The variable <code>x</code> is 1."),
    "<execute>": unused("<execute>\nprint(1)\n</execute>", "<execute> markup"),
    "<|python_tag|>": unused("<|python_tag|>print(1)", "<|python_tag|> markup"),
    "[TOOL_CALLS]": unused('[TOOL_CALLS] [{"x": 1}]', "[TOOL_CALLS] markup"),
    "a tool call in JSON": unused('{"name": "python", "arguments": {"code": "print(1)"}}', "a tool call in JSON"),
    "a tool call in a JSON fence": Shape(
        '```json\n{"tool": "python", "input": "1"}\n```\n```repl\nx = 1\n```',
        ("x = 1",),
        not_run=("a tool call in JSON",),
    ),
    "markup, and code": Shape(
        "<tool_call>a</tool_call>\n```repl\nx = 1\n```", ("x = 1",), not_run=("<tool_call> markup",)
    ),
    "markup as an example": unused("I must not use `<tool_call>` here."),
    "markup behind an answer": Shape("FINAL(1)<tool_call>", final="1", not_run=("<tool_call> markup",)),
    "markup in an answer": answer("FINAL(<python>1</python>)", "<python>1</python>"),
    "a number": answer("FINAL(42)", "42"),
    "at the end of words": answer("I am sure.\n\nFINAL(42)\n", "42"),
    "SUBMIT": answer("SUBMIT(42)", "42"),
    "after whitespace": answer("   FINAL(42)", "42"),
    "bold": answer("**FINAL(42)**", "42"),
    "in a list": answer("- FINAL(42)", "42"),
    "a bold heading in a list": answer("1. **FINAL(42)**.", "42"),
    "quoted": answer("> FINAL(one\n> two)", "one\ntwo"),
    "as code": answer("`FINAL(42)`", "42"),
    "double quotes": answer('FINAL("Paris, (France)")', "Paris, (France)"),
    "single quotes": answer("FINAL('Paris')", "Paris"),
    "triple quotes": answer('FINAL("""a\nb""")', "a\nb"),
    "one pair of quotes only": answer("""FINAL("'x'")""", "'x'"),
    "two quotations are no pair": answer('FINAL("a" and "b")', '"a" and "b"'),
    "two empty quotations are no pair": answer('FINAL("" and "")', '"" and ""'),
    "two quotations with an apostrophe are no pair": answer("FINAL('It's a' and 'b')", "'It's a' and 'b'"),
    "two quotations of sentences are no pair": answer('FINAL("Yes!" and "no")', '"Yes!" and "no"'),
    "an escaped quote inside quotes": answer(r'FINAL("6\" is half")', r"6\" is half"),
    "an escaped quote before another": answer(r"FINAL('a\'' b')", r"'a\'' b'"),
    "quotes that do not match": answer("""FINAL("x')""", """\"x'"""),
    "a quotation inside quotes": answer('FINAL("He said "yes" twice")', 'He said "yes" twice'),
    "an apostrophe inside quotes": answer("FINAL('It's fine')", "It's fine"),
    "an apostrophe": answer("FINAL(It's 42)", "It's 42"),
    "two apostrophes and parentheses": answer("FINAL(It's the dogs' (42))", "It's the dogs' (42)"),
    "an open parenthesis in quotes": answer('FINAL(the sign "(" is 1)', 'the sign "(" is 1'),
    "a closing parenthesis in quotes": answer('FINAL(")" is 2)', '")" is 2'),
    "a quoted parenthesis, and words after it": answer('FINAL("(")\nMore (words)', "("),
    "apostrophes around a parenthesis": answer("FINAL(It's (a dogs' b)\nc)", "It's (a dogs' b)\nc"),
    "nested parentheses": answer("FINAL(f(x) = 2 (see (1)))", "f(x) = 2 (see (1))"),
    "several lines": answer("FINAL(\nfirst (a)\n\nsecond\n)\nDone.", "first (a)\n\nsecond"),
    "a list as an answer": answer("FINAL([1, 2, (3, 4)])", "[1, 2, (3, 4)]"),
    "a smiley": answer("FINAL(It is a smiley :))", "It is a smiley :)"),
    "a smiley, and words after it": answer("FINAL(A smiley :))\nBye (for now)", "A smiley :)"),
    "a sad smiley": answer("FINAL(It is sad :()", "It is sad :("),
    "a sad smiley, and words after it": answer("FINAL(sad :()\nBye", "sad :("),
    "a sad smiley, and another answer": answer("FINAL(sad :()\nFINAL(2)", "sad :("),
    "a half-open interval": answer("FINAL([0, 1))", "[0, 1)"),
    "another half-open interval": answer("FINAL((0, 1])", "(0, 1]"),
    "an enumeration": answer("FINAL(\n1) one\n2) two\n)", "1) one\n2) two"),
    "a smiley on a later line, and words after it": answer(
        "FINAL(First.\nA smiley :))\nBye (for now)", "First.\nA smiley :)"
    ),
    "a sad smiley, closed on a line of its own": answer("FINAL(\nIt is sad :(\n)", "It is sad :("),
    "a quote that starts an answer, and one after it": answer("FINAL(' is a quote)\nAnd ' too.", "' is a quote"),
    "a quote that starts a mention, and one after it": unused("FINAL(' is a quote) or so\nAnd ' too.", MENTIONED),
    "parentheses behind an answer": answer("FINAL(1) (see above)", "1"),
    "parentheses right behind an answer": answer("FINAL(x)(y)", "x"),
    "a parenthesis": answer("FINAL())", ")"),
    "an enumeration behind an answer": answer("FINAL(1)! 2) So", "1"),
    "LaTeX keeps its backslashes": answer(r'FINAL("$\frac{1}{2}$ (\n)")', r"$\frac{1}{2}$ (\n)"),
    "a fence inside an answer is the answer": answer(
        "FINAL(Use:\n```python\nprint(1)\n```\n)", "Use:\n```python\nprint(1)\n```"
    ),
    "an answer that is never closed stops before code": Shape(
        "FINAL(sad :()\n```repl\nprint(1)\n```\n(See above.)", ("print(1)",), final="sad :("
    ),
    "a fence behind the first words of an answer is the answer": answer(
        "FINAL(Use ```python\nprint(1)\n```\n)", "Use ```python\nprint(1)\n```"
    ),
    "a fence behind an announcement in an answer is the answer": answer(
        "FINAL(Use: ```python\nprint(1)\n```\n)", "Use: ```python\nprint(1)\n```"
    ),
    "an answer before a fence on its line": Shape("FINAL(1) ```repl\nx = 1\n```", ("x = 1",), final="1"),
    "never closed": unused("FINAL(the answer is", WITHIN),
    "never closed, with parentheses in it": unused("FINAL((a) is it\nor not", WITHIN),
    "code and an answer": Shape("```repl\nx = 1\n```\nFINAL(1)", ("x = 1",), final="1"),
    "inside code only": code("```repl\nFINAL(x)\n```", "FINAL(x)"),
    "the first of several": answer("FINAL(1)\nFINAL(2)", "1"),
    "the first valid one of several": Shape("FINAL()\nFINAL_VAR(1)\nFINAL_VAR(x)", var="x", not_run=(EMPTY, NO_NAME)),
    "two on a line": answer("FINAL(1) FINAL(2)", "1"),
    "empty": unused("FINAL()", EMPTY),
    "an empty quotation": unused('FINAL("")', EMPTY),
    "a placeholder": unused("FINAL(...)", EMPTY),
    "a mention": unused("I will call FINAL() later.", WITHIN),
    "a mention with a placeholder": unused("then use FINAL(answer) when done", WITHIN),
    "a mention that a line break put first": unused("Then I will use\nFINAL(answer) when done.", MENTIONED),
    "a mention as code": unused("`FINAL(x)`: ends the run.", MENTIONED),
    "a mention that starts a sentence": unused("FINAL() comes later, when I know.", WITHIN),
    "prose": unused("Final answer: 42"),
    "another function's name": unused("FINAL_ANSWER(42)\nNOT_FINAL(1)\nFINALLY(2)"),
    "a variable": Shape("FINAL_VAR(result)", var="result"),
    "a quoted variable": Shape('FINAL_VAR("result")', var="result"),
    "a variable as code": Shape("**FINAL_VAR(`result`)**", var="result"),
    "a variable with spaces around it": Shape("FINAL_VAR( result )", var="result"),
    "an expression is no variable": unused('FINAL_VAR(result["x"])', NO_NAME),
    "a keyword is no variable": unused("FINAL_VAR(None)", NO_NAME),
}


def test_replies_of_these_shapes_say_this() -> None:
    read = {name: parse_reply(shape.reply) for name, shape in SHAPES.items()}
    assert {name: (parsed.code, parsed.final) for name, parsed in read.items()} == {
        name: (shape.code, shape.expected_final()) for name, shape in SHAPES.items()
    }
    assert {name: tuple(note.what for note in parsed.not_run) for name, parsed in read.items()} == {
        name: shape.not_run for name, shape in SHAPES.items()
    }
    for reply in (None, "", " \n\t\n"):
        assert parse_reply(reply) == ParsedReply((), None, ())


def test_reason_is_one_sentence_with_a_remedy() -> None:
    """A reason is one sentence that says what to write instead."""
    for reason in (note.reason for shape in SHAPES.values() for note in parse_reply(shape.reply).not_run):
        assert reason.endswith(".")
        assert "\n" not in reason
        assert "write" in reason.lower() or "goes into" in reason


def test_reply_reports_at_most_eight_skipped_parts() -> None:
    reply = "".join(f"```tag{number}\nx\n```\n" for number in range(100))
    assert [note.what for note in parse_reply(reply).not_run] == [f"a ```tag{number} fence" for number in range(8)]


def test_text_after_ten_thousand_fences_is_ignored() -> None:
    """Mentions are no fences, and an answer before that counts."""
    block = "```repl\nx = 1\n```\n"
    fewer = block * 4_998 + "```repl\nx = 1\n```repl\nx = 2\n```\n"  # 9,999 lines
    parsed = parse_reply(block * 5_001 + "FINAL(1)")
    assert (len(parsed.code), parsed.final) == (5_000, None)
    parsed = parse_reply("as in ```repl\nor\n" * 10_001 + "FINAL(1)")
    assert (parsed.code, parsed.final) == ((), None)
    for reply in (fewer + "FINAL(1)", block + "FINAL(1)\n" + block * 5_000):
        assert parse_reply(reply).final == FinalText("1")


@pytest.mark.parametrize(("mentions", "found"), [(31, ("x = 1", "y = 2")), (32, ("x = 1",))])
def test_words_open_no_fence_behind_so_many_mentions(mentions: int, found: tuple[str, ...]) -> None:
    block = "```repl\nx = 1\n```\n"
    reply = "as in ```repl\nor\n" * mentions + block + "Okay! ```repl\ny = 2\n```"
    assert parse_reply(reply).code == found


def test_prose_of_a_reply_excludes_code_and_thoughts() -> None:
    prose = {
        "Only words.": "Only words.",
        "Look:\n```repl\nx = 1\n```\nThen:\n```repl\nx = 2\n```\nDone.": "Look:\n\nThen:\n\nDone.",
        'Data:\n```json\n{"a": 1}\n```': 'Data:\n```json\n{"a": 1}\n```',
        "<think>A draft.</think>It is so.": "It is so.",
        "Okay! ```repl\nx = 1\n```\nDone.": "Okay! \nDone.",
        "```repl\nx = 1\n```": "",
    }
    assert {reply: parse_reply(reply).prose for reply in prose} == prose


# -- how far is looked -----------------------------------------------------------------------------------------------


def in_a_string(shown: str) -> str:
    """Code whose string shows something."""
    return f'x = """\n{shown}"""'


@pytest.mark.parametrize(("fences", "is_whole"), [(1, True), (32, True), (33, False)])
@pytest.mark.parametrize("before", ["", "```repl\ny = 2\n```\n" * 30])
def test_a_string_may_show_so_many_fence_lines(before: str, fences: int, is_whole: bool) -> None:
    code = in_a_string("```\n" * fences)
    found = parse_reply(f"{before}```repl\n{code}\n```\n").code
    assert (code in found) is is_whole
    assert ('x = """' in found) is not is_whole


@pytest.mark.parametrize(("chars", "is_whole"), [(49_000, True), (51_000, False)])
@pytest.mark.parametrize("before", ["", "word " * 20_000])
@pytest.mark.parametrize("closing", ["\n```\n", ""])
def test_string_with_a_fence_has_a_length_limit(before: str, chars: int, is_whole: bool, closing: str) -> None:
    """A string that shows a fence is read whole up to a length, wherever it stands."""
    code = in_a_string("```\n" + "a" * chars)
    found = parse_reply(f"{before}\n```repl\n{code}{closing}").code
    assert found[0] == (code if is_whole else 'x = """')


@pytest.mark.parametrize(("others", "is_whole"), [(0, True), (1, True), (2, False)])
@pytest.mark.parametrize("tag", ["python", "json"])
@pytest.mark.parametrize("before", ["", "```repl\ny = 2\n```\n" * 30])
def test_a_document_may_show_so_many_fence_lines(before: str, tag: str, others: int, is_whole: bool) -> None:
    shown = (
        f"````{tag}\nprint(1)\n````\nFINAL(shown)\n" * 15 + "~~~\n" * others
    )  # 30 to 32 lines, and then the one that closes
    parsed = parse_reply(f"{before}````markdown\n{shown}````\nFINAL(meant)")
    assert parsed.final == FinalText("meant" if is_whole else "shown")


@pytest.mark.parametrize(("chars", "is_whole"), [(99_999, True), (100_000, False)])
def test_answer_is_read_up_to_a_length(chars: int, is_whole: bool) -> None:
    content = '"(" '.ljust(chars, "x")
    expected = content if is_whole else f"{content})\nMore (words"
    assert parse_reply(f"FINAL({content})\nMore (words)").final == FinalText(expected)


def test_a_reply_may_have_so_many_characters_looked_at() -> None:
    inspector = Inspector()
    assert inspector.spend(99_999) is True
    assert inspector.spend(2) is False
    assert inspector.spend(1) is True
    assert inspector.spend(1) is False


def test_string_stays_open_until_unescaped_quotes() -> None:
    is_open = {
        '"""a"""': False,
        '"""a': True,
        r'"""a\"""': True,
        r'"""a\\"""': False,
        r'"""a\\\"""': True,
        r'"""a\""""': False,
        '"""a""""""b': True,
        '"""a""" + """b': True,
    }
    assert {code: StringScanner(code, 0).inside_at(len(code)) for code in is_open} == is_open


@pytest.mark.parametrize(("mentions", "is_found"), [(15, True), (16, False)])
def test_so_many_long_mentions_may_stand_before_an_answer(mentions: int, is_found: bool) -> None:
    """Each is read to the end twice, with quotations and without."""
    reply = "FINAL( a\n" * mentions + "b" * 10_000 + "\nFINAL(1)\nThen (so) it is"
    assert (parse_reply(reply).final is not None) is is_found


def test_unclosed_fences_of_a_document_stay_open() -> None:
    """A document that opens many fences and closes none is not closed."""
    reply = "```markdown\n" + "```python\nprint(1)\n" * 40 + "```\nFINAL(shown)"
    assert parse_reply(reply) == ParsedReply((), None, parse_reply("```markdown\nx\n```").not_run, reply)


def test_code_with_an_unknown_escape_gives_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert parse_reply("```\nre.compile('\\d')\n```").not_run
    assert not recwarn.list


FENCES = ["```", "````", "~~~", "repl", "python", "json", "\n", "\r\n"]
ANSWERS = ["FINAL(", "FINAL_VAR(", "SUBMIT(", ")", "(", '"', "'", '"""', "\\"]
PROSE = ["x = 1", " ", "> ", "- ", "**", "<tool_call>", "<think>", "</think>", "{", "#", "\0", "\ud800", "é", ":"]
FRAGMENTS = st.sampled_from([*FENCES, *ANSWERS, *PROSE])


@given(st.one_of(ANY_TEXT, st.lists(FRAGMENTS, max_size=60).map("".join)))
@example("FINAL('\ud800")
@example("```\n\0\n```")
@example("```\n\ud800\n```")
def test_parser_accepts_any_text(reply: str) -> None:
    """No text raises, and each part of the result occurs in the text."""
    parsed = parse_reply(reply)
    text = reply.replace("\r\n", "\n")
    assert all(line.strip() in text for code in parsed.code for line in code.split("\n"))
    if isinstance(parsed.final, FinalVar):
        assert parsed.final.name.isidentifier()
    elif parsed.final is not None:
        assert parsed.final.text.strip()
    assert len({note.what for note in parsed.not_run}) == len(parsed.not_run) <= 8


def is_plain_code(code: str) -> bool:
    """Code that says something and has no line that starts with a fence."""
    starts = [line.lstrip(" \t")[:3] for line in code.split("\n")]
    return bool(code.strip()) and "\r" not in code and not {"```", "~~~"} & set(starts)


PLAIN_CODE = st.one_of(ANY_TEXT, st.lists(FRAGMENTS, max_size=20).map("".join)).filter(is_plain_code)


TAGS = st.sampled_from(["repl", "python", "PY", "Python3", "{repl}", "repl title=x"])
MARKS = st.sampled_from(["```", "````", "~~~", "~~~~~"])
STRINGLESS_CODE = PLAIN_CODE.filter(lambda code: '"""' not in code and "'''" not in code)
"""A string that one block leaves open and the next one closes reads as one block: two of them would not be exact."""


@given(code=PLAIN_CODE, tag=TAGS, mark=MARKS)
def test_code_without_a_fence_is_returned_exactly(code: str, tag: str, mark: str) -> None:
    assert parse_reply(f"{mark}{tag}\n{code}\n{mark}\nThen.\n").code == (code,)


@given(
    blocks=st.lists(STRINGLESS_CODE, min_size=2, max_size=4),
    tags=st.lists(TAGS, min_size=4, max_size=4),
    mark=MARKS,
    between=st.sampled_from(["", "\n", "Then.\n"]),
)
@example(blocks=["first", "second"], tags=["python", "repl"], mark="```", between="")
@example(blocks=["first", "second", "third"], tags=["repl", "PY", "repl"], mark="```", between="")
def test_several_blocks_come_back_exactly_and_in_order(
    blocks: list[str], tags: list[str], mark: str, between: str
) -> None:
    reply = between.join(f"{mark}{tag}\n{code}\n{mark}\n" for tag, code in zip(tags, blocks, strict=False))
    assert parse_reply(reply).code == tuple(blocks)


@given(code=PLAIN_CODE, indent=st.sampled_from([" ", "   ", "\t", "        "]))
def test_code_indented_with_its_fence_is_dedented(code: str, indent: str) -> None:
    lines = ["```repl", *code.split("\n"), "```"]
    assert parse_reply("\n".join(indent + line for line in lines)).code == (code,)


@given(st.lists(FRAGMENTS, max_size=40).map("".join).filter(lambda text: "\r" not in text))
def test_line_ends_make_no_difference(text: str) -> None:
    assert parse_reply(text.replace("\n", "\r\n")) == parse_reply(text)


@given(st.text("abc 012\n:;.,[]{}").map(str.strip).filter(lambda text: text not in ("", "...")))
def test_an_answer_without_parentheses_and_quotes_comes_back_exactly(answer: str) -> None:
    assert parse_reply(f"Done.\nFINAL({answer})\n").final == FinalText(answer)


SIZE = 100_000
TIMES = 16
CHARACTERS = ["`", "~", "<", "(", ")", "'", '"', "\\", "\n", " ", "\r\n", "{", "> ", "- ", "\0", "\ud800", " 'a"]
OPENINGS = [
    *(
        "FINAL(",
        "FINAL(\n",
        "FINAL()\n",
        "FINAL_VAR(1)\n",
        "**FINAL(a) b\n",
        "FINAL(a :(\n",
        "<tool_call>",
        '{"name": "',
    ),
]
UNCLOSED = [
    *("```\n", "~~~\n", "```a\n", "```repl\n", "```repl\nx\n", "```\nx=1\n", "a:```repl\n", "a. ```repl\n", "a ` "),
    *("a `b` ", "a ```repl ", "a ```b``` ``c`` ", "a. ```\n", "a. ```b\n", "```markdown\n```repl\n"),
]
NESTED = ["```\nx=\n```\n", "```a\n```b\n```\n", "```a\n```repl\n", "```repl\n'''\n```\n", "```repl\n#'''\n'''\n```\n"]
PATHOLOGICAL: dict[str, Callable[[int], str]] = {
    **{
        repr(unit): lambda size, unit=unit: unit * (size // len(unit))  # type: ignore[misc]
        for unit in [*CHARACTERS, *OPENINGS, *UNCLOSED, *NESTED]
    },
    "an answer of parentheses": lambda size: "FINAL(" + "(" * size,
    "an answer of quotes": lambda size: "FINAL(" + "\"' " * (size // 3) + ")",
    "an answer of quotes that close nothing": lambda size: "FINAL(" + " 'a" * (size // 3) + ")",
    "many answers that one parenthesis could close": lambda size: "FINAL(\n" * (size // 7) + ")",
    "a string that never ends": lambda size: '```repl\n"""\n```\n' + "x;" * (size // 2),
    "statements without a tag": lambda size: "```\n" + "x;" * min(size // 2, 40_000) + "\n```\n" + "x;" * (size // 2),
    "a deep expression": lambda size: "```\n" + "-" * min(size, 90_000) + "1\n```",
    "a long chain": lambda size: "```\n" + "a" + ".b" * min(size // 2, 45_000) + "()\n```",
}


def test_parsing_time_is_linear() -> None:
    def cpu_s(text: str) -> float:
        gc.disable()  # a collection costs more, the more objects earlier tests of this process have left
        started = time.process_time()
        try:
            parse_reply(text)
            return time.process_time() - started
        finally:
            gc.enable()

    growth = {
        name: cpu_s(reply(SIZE)) / max(cpu_s(reply(SIZE // TIMES)), 0.002)  # shorter times are mostly noise
        for name, reply in PATHOLOGICAL.items()
    }
    assert {name: times for name, times in growth.items() if times >= 4 * TIMES} == {}, f"its square is {TIMES**2}"
