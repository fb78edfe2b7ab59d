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


DOC = 'p = """\n```json\n{}\n```\n"""\nprint(p)'
TYPO = 'x = """abc'

CODE_SHAPES = {
    "a repl fence": Shape("Let me look.\n```repl\nprint(len(context))\n```\n", ("print(len(context))",)),
    "a python fence": Shape("```python\nx = 1\n```", ("x = 1",)),
    "a py fence": Shape("```py\nx = 1\n```", ("x = 1",)),
    "a python3 fence without a stray 3": Shape("```python3\nx = 1\n```", ("x = 1",)),
    "an upper-case tag": Shape("```REPL\nx = 1\n```\n```Python\ny = 2\n```", ("x = 1", "y = 2")),
    "a space before the tag": Shape("``` repl\nx = 1\n```", ("x = 1",)),
    "a tag in braces": Shape("```{repl}\nx = 1\n```", ("x = 1",)),
    "a tag with a dot in braces": Shape("```{.python .numberLines}\nx = 1\n```", ("x = 1",)),
    "a tag and attributes": Shape('```repl title="count.py"\nx = 1\n```', ("x = 1",)),
    "a tag and a file name": Shape("```python:main.py\nx = 1\n```", ("x = 1",)),
    "repl and python blocks in the reply's order": Shape(
        "```python\na\n```\n```repl\nb\n```\n```python\nc\n```", ("a", "b", "c")
    ),
    "tildes": Shape("~~~repl\nx = 1\n~~~", ("x = 1",)),
    "backticks inside tildes": Shape('~~~repl\nx = """\n```\n"""\n~~~', ('x = """\n```\n"""',)),
    "three backticks inside four": Shape("````repl\nx = '''\n```\n'''\n````", ("x = '''\n```\n'''",)),
    "a shorter fence is content": Shape("````repl\nx = 1\n```\n!y\n````", ("x = 1\n```\n!y",)),
    "escaped quotes end no string": Shape('```repl\nx = """a \\"""\n```\nb"""\n```', ('x = """a \\"""\n```\nb"""',)),
    "a longer closing fence": Shape("```repl\nx = 1\n`````\nDone.", ("x = 1",)),
    "an indented fence": Shape("  ```repl\n  for x in y:\n      z()\n  ```", ("for x in y:\n    z()",)),
    "an indented fence around code that is not": Shape("   ```repl\nif a:\n  b()\n   ```", ("if a:\n  b()",)),
    "a fence in a list": Shape("1. ```repl\n   x = 1\n   ```\n2. Done", ("x = 1",)),
    "a closing fence that is indented": Shape("```repl\nx = 1\n  ```\nThen we see.", ("x = 1",)),
    "a fence behind a sentence": Shape("Step 1: ```python\nx = 1\n```\nDone.", ("x = 1",)),
    "a fence behind an exclamation": Shape("Okay! ```repl\nx = 1\n```\nDone.", ("x = 1",)),
    "a fence behind a whole sentence": Shape("Let me look. ```repl\nx = 1\n```", ("x = 1",)),
    "a fence behind bold words": Shape("**Code:** ```repl\nx = 1\n```", ("x = 1",)),
    "a fence right behind a word": Shape("Okay```python\nx = 1\n```", ("x = 1",)),
    "a fence behind words and code in a line": Shape("I look at `x`. ```repl\nx = 1\n```", ("x = 1",)),
    "a fence behind code in a line": Shape("`x` first! ```repl\nx = 1\n```", ("x = 1",)),
    "a fence behind words and a longer span of code": Shape(
        "I use ```repl``` and ``x``. ```repl\nx = 1\n```", ("x = 1",)
    ),
    "a tag in braces behind words": Shape("So. ```{repl}\nx = 1\n```", ("x = 1",)),
    "a tag and attributes behind words": Shape("So. ```repl title=x\nx = 1\n```", ("x = 1",)),
    "an upper-case fence behind words": Shape("So. ```REPL \nx = 1\n```", ("x = 1",)),
    "a longer fence behind words": Shape("So. ````repl\nx = '''\n```\n'''\n````", ("x = '''\n```\n'''",)),
    "an unclosed fence behind words": Shape("Okay! ```repl\nx = 1\nprint(x)", ("x = 1\nprint(x)",)),
    "an unclosed fence behind an announcement": Shape("So: ```repl\n!ls", ("!ls",)),
    "fences behind words in a row": Shape("First. ```repl\nx = 1\n```\nThen. ```repl\ny = 2\n```", ("x = 1", "y = 2")),
    "a fence behind words, not closed before the next": Shape(
        "Okay! ```repl\nx = 1\n```repl\ny = 2\n```", ("x = 1", "y = 2")
    ),
    "a fence behind the words of a list": Shape(
        "1. Let me look. ```repl\n   if x:\n     y()\n   ```\n2. Done", ("if x:\n  y()",)
    ),
    "a fence behind an announcement in a list": Shape("- Code: ```repl\n  x = 1\n  ```", ("x = 1",)),
    "a fence behind words inside a string": Shape(
        '```repl\nx = """\nOkay! ```repl\n"""\n```', ('x = """\nOkay! ```repl\n"""',)
    ),
    "a fence behind words in a comment": Shape("```repl\n# as in ```repl\nx = 1\n```", ("# as in ```repl\nx = 1",)),
    "words that end with a tag, and a block": Shape(
        "I put code into ```repl\nfences, like so:\n```repl\nx = 1\n```", ("x = 1",)
    ),
    "CRLF": Shape("```repl\r\nx = 1\r\ny = 2\r\n```\r\n", ("x = 1\ny = 2",)),
    "an unclosed last fence": Shape("Look:\n```repl\nx = 1\nprint(x)", ("x = 1\nprint(x)",)),
    "backticks at the end of a line close nothing": Shape(
        "```repl\nprint('```')\nx = '```'\n```", ("print('```')\nx = '```'",)
    ),
    "a string that shows a fence": Shape(f"```repl\n{DOC}\n```\nI wait.", (DOC,)),
    "a string that shows a fence, unclosed": Shape(f"```repl\n{DOC}", (DOC,)),
    "a string that shows a fence, and another block": Shape(
        f"```repl\n{DOC}\n```\nAnd:\n```repl\ny = 2\n```", (DOC, "y = 2")
    ),
    "a raw f-string that shows two fences": Shape(
        "```repl\nq = rf'''a\n```\nb\n```\n{x}\\''''\n```", ("q = rf'''a\n```\nb\n```\n{x}\\''''",)
    ),
    "a string left open by mistake ends with its fence": Shape(
        f"```repl\n{TYPO}\n```\nThen:\n```repl\ny = 2\n```", (TYPO, "y = 2")
    ),
    "a string that ends in another block, and is not Python": Shape(
        f'```repl\n{TYPO}\n```\nThen:\n```repl\ny = \'a"""\'\n```', (TYPO, 'y = \'a"""\'')
    ),
    "quotes in a comment open no string": Shape('```repl\n# """\nx = 1\n```\n"""', ('# """\nx = 1',)),
    "code that is no Python is run all the same": Shape("```repl\n!ls -l\n```", ("!ls -l",)),
    "a block that was not closed before the next": Shape("```repl\nx = 1\n```repl\ny = 2\n```", ("x = 1", "y = 2")),
    "a data block that was not closed before the code": Shape('```json\n{"a": 1}\n```repl\ny = 2\n```', ("y = 2",)),
    "a data block that was not closed before several blocks": Shape(
        '```json\n{"a": 1}\n```repl\nx = 1\n```repl\ny = 2\n```', ("x = 1", "y = 2")
    ),
    "code indented less than its fence": Shape("   ```repl\n  x = 1\n   ```", ("  x = 1",)),
    "an empty line, and code indented less than its fence": Shape("   ```repl\n\n  x = 1\n   ```", ("\n  x = 1",)),
    "a stray closing fence before the code": Shape("Done.\n```\n\nNow:\n```repl\ny = 2\n```", ("y = 2",)),
    "code in thoughts is no code": Shape(
        "<think>\n```repl\ndraft()\n```\nFINAL(1)</think>\n```repl\nx = 1\n```", ("x = 1",)
    ),
    "thoughts that never end are the reply": Shape("<think>\n```repl\nx = 1\n```", ("x = 1",)),
}

NOT_RUN_SHAPES = {
    "a reply of words": Shape("I need to look at the context first."),
    "an empty fence": Shape("```repl\n\n```", not_run=("an empty ```repl fence",)),
    "code on the line of the tag": Shape("```repl print(1)\n```", not_run=("an empty ```repl fence",)),
    "a fence on one line": Shape("```repl print(1)```", not_run=("a ```repl fence that is not on lines of its own",)),
    "a fence on one line behind words": Shape(
        "Okay! ```repl print(1)```", not_run=("a ```repl fence that is not on lines of its own",)
    ),
    "a quoted fence behind words": Shape(
        "> Okay! ```repl\n> x = 1\n> ```", not_run=("a ```repl fence that is not on lines of its own",)
    ),
    "words that end with a tag": Shape(
        "Code goes into a fence with ```repl\nand I have none.",
        not_run=("a ```repl fence that is not on lines of its own",),
    ),
    "a tag in a span of code at the end of a line": Shape(
        "I write `` ```repl ``\nand then code.", not_run=("a ```repl fence that is not on lines of its own",)
    ),
    "a tag behind a backtick": Shape(
        "I write ` ```repl\nx = 1\n```", not_run=("a ```repl fence that is not on lines of its own",)
    ),
    "a fence of data behind words": Shape('It is ```json\n{"a": 1}\n```', not_run=("a ```json fence",)),
    "bash behind words": Shape("Okay! ```bash\nls\n```", not_run=("a ```bash fence",)),
    "code in an untagged fence behind words": Shape("Okay! ```\nprint(1)\n```", not_run=("an untagged fence",)),
    "an answer behind an untagged fence behind words": Shape("It is: ```\n1, 2\n```\nFINAL(3)", final="3"),
    "an answer behind words that end with backticks": Shape("I use ```\nFINAL(3)", final="3"),
    "a mention of a fence, and code": Shape("I use ```repl``` fences.\n```repl\nx = 1\n```", ("x = 1",)),
    "a document that shows a fence behind words": Shape(
        "```markdown\nOkay! ```repl\nx = 1\n```\n", not_run=("a ```markdown fence",)
    ),
    "a quoted fence": Shape("> ```repl\n> x = 1\n> ```", not_run=("a ```repl fence that is not on lines of its own",)),
    "a quoted fence with an upper-case tag, later": Shape(
        "Look:\n> ```REPL\n> x = 1\n> ```", not_run=("a ```repl fence that is not on lines of its own",)
    ),
    "a value with a type in an untagged fence": Shape("```\nx: int = 5\n```", not_run=("an untagged fence",)),
    "code in an untagged fence": Shape("```\nprint(1)\n```", not_run=("an untagged fence",)),
    "code in an untagged fence, and code": Shape(
        "```repl\nx = 1\n```\n```\nx = 2\n```", ("x = 1",), not_run=("an untagged fence",)
    ),
    "text in an untagged fence": Shape("It printed:\n```\nThe cat sat.\n```\n```\nTotal: 5\n```"),
    "bash": Shape("```bash\nls\n```", not_run=("a ```bash fence",)),
    "bash, and code": Shape("```bash\nls\n```\n```repl\nx = 1\n```", ("x = 1",), not_run=("a ```bash fence",)),
    "several languages, each once": Shape(
        "```sql\nselect 1\n```\n```js\nf()\n```\n```sql\nselect 2\n```", not_run=("a ```sql fence", "a ```js fence")
    ),
    "data, and code": Shape('```json\n{"a": 1}\n```\n```repl\nx = 1\n```', ("x = 1",)),
    "data, and an answer": Shape("```text\nabc\n```\nFINAL(1)", final="1"),
    "data alone": Shape('```json\n{"a": 1}\n```', not_run=("a ```json fence",)),
    "an answer inside a text fence": Shape("```text\nFINAL(42)\n```", not_run=("a ```text fence",)),
    "a document that shows code": Shape(
        "````markdown\n# How\n```python\nprint(1)\n```\n````", not_run=("a ```markdown fence",)
    ),
    "a document with as many backticks as its code": Shape(
        "```markdown\n# How\n```python\nprint(1)\n```\nEnd.\n```\n```repl\nx = 1\n```", ("x = 1",)
    ),
    "a shorter fence closes no document": Shape("````text\n```\nFINAL(shown)\n````\nFINAL(meant)", final="meant"),
    "a document that was not closed": Shape(
        "```markdown\n# How\n```python\nprint(1)\n```\nAnd\n```repl\nx = 1\n```", ("x = 1",)
    ),
    "code in thoughts alone": Shape(
        "<think>\n```repl\nx = 1\n```\n</think>\nDone.", not_run=("code inside your reasoning",)
    ),
    "code in thoughts, told before what stands first in the reply": Shape(
        "<think>\n```repl\nx = 1\n```\n</think>```bash\nls\n```",
        not_run=("code inside your reasoning", "a ```bash fence"),
    ),
    "<tool_call>": Shape(
        '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>',
        not_run=("<tool_call> markup", "a tool call in JSON"),
    ),
    "<function=…>": Shape("<function=python>\nprint(1)\n</function>", not_run=("<function=…> markup",)),
    "<invoke …>": Shape(
        '<function_calls>\n<invoke name="python">', not_run=("<function_calls> markup", "<invoke …> markup")
    ),
    "<python>": Shape("Let me run <python>print(1)</python>", not_run=("<python> markup",)),
    "<code>": Shape("<code>\nprint(1)\n</code>", not_run=("<code> markup",)),
    "<code> as typography": Shape("The variable <code>x</code> is 1."),
    "<execute>": Shape("<execute>\nprint(1)\n</execute>", not_run=("<execute> markup",)),
    "<|python_tag|>": Shape("<|python_tag|>print(1)", not_run=("<|python_tag|> markup",)),
    "[TOOL_CALLS]": Shape('[TOOL_CALLS] [{"x": 1}]', not_run=("[TOOL_CALLS] markup",)),
    "a tool call in JSON": Shape(
        '{"name": "python", "arguments": {"code": "print(1)"}}', not_run=("a tool call in JSON",)
    ),
    "a tool call in a JSON fence": Shape(
        '```json\n{"tool": "python", "input": "1"}\n```\n```repl\nx = 1\n```',
        ("x = 1",),
        not_run=("a tool call in JSON",),
    ),
    "markup, and code": Shape(
        "<tool_call>a</tool_call>\n```repl\nx = 1\n```", ("x = 1",), not_run=("<tool_call> markup",)
    ),
    "markup as an example": Shape("I must not use `<tool_call>` here."),
    "markup behind an answer": Shape("FINAL(1)<tool_call>", final="1", not_run=("<tool_call> markup",)),
    "markup in an answer": Shape("FINAL(<python>1</python>)", final="<python>1</python>"),
}

FINAL_SHAPES = {
    "a number": Shape("FINAL(42)", final="42"),
    "at the end of words": Shape("I am sure.\n\nFINAL(42)\n", final="42"),
    "SUBMIT": Shape("SUBMIT(42)", final="42"),
    "after whitespace": Shape("   FINAL(42)", final="42"),
    "bold": Shape("**FINAL(42)**", final="42"),
    "in a list": Shape("- FINAL(42)", final="42"),
    "a bold heading in a list": Shape("1. **FINAL(42)**.", final="42"),
    "quoted": Shape("> FINAL(one\n> two)", final="one\ntwo"),
    "as code": Shape("`FINAL(42)`", final="42"),
    "double quotes": Shape('FINAL("Paris, (France)")', final="Paris, (France)"),
    "single quotes": Shape("FINAL('Paris')", final="Paris"),
    "triple quotes": Shape('FINAL("""a\nb""")', final="a\nb"),
    "one pair of quotes only": Shape("""FINAL("'x'")""", final="'x'"),
    "two quotations are no pair": Shape('FINAL("a" and "b")', final='"a" and "b"'),
    "two empty quotations are no pair": Shape('FINAL("" and "")', final='"" and ""'),
    "two quotations with an apostrophe are no pair": Shape("FINAL('It's a' and 'b')", final="'It's a' and 'b'"),
    "two quotations of sentences are no pair": Shape('FINAL("Yes!" and "no")', final='"Yes!" and "no"'),
    "an escaped quote inside quotes": Shape(r'FINAL("6\" is half")', final=r"6\" is half"),
    "an escaped quote before another": Shape(r"FINAL('a\'' b')", final=r"'a\'' b'"),
    "quotes that do not match": Shape("""FINAL("x')""", final="""\"x'"""),
    "a quotation inside quotes": Shape('FINAL("He said "yes" twice")', final='He said "yes" twice'),
    "an apostrophe inside quotes": Shape("FINAL('It's fine')", final="It's fine"),
    "an apostrophe": Shape("FINAL(It's 42)", final="It's 42"),
    "two apostrophes and parentheses": Shape("FINAL(It's the dogs' (42))", final="It's the dogs' (42)"),
    "an open parenthesis in quotes": Shape('FINAL(the sign "(" is 1)', final='the sign "(" is 1'),
    "a closing parenthesis in quotes": Shape('FINAL(")" is 2)', final='")" is 2'),
    "a quoted parenthesis, and words after it": Shape('FINAL("(")\nMore (words)', final="("),
    "apostrophes around a parenthesis": Shape("FINAL(It's (a dogs' b)\nc)", final="It's (a dogs' b)\nc"),
    "nested parentheses": Shape("FINAL(f(x) = 2 (see (1)))", final="f(x) = 2 (see (1))"),
    "several lines": Shape("FINAL(\nfirst (a)\n\nsecond\n)\nDone.", final="first (a)\n\nsecond"),
    "a list as an answer": Shape("FINAL([1, 2, (3, 4)])", final="[1, 2, (3, 4)]"),
    "a smiley": Shape("FINAL(It is a smiley :))", final="It is a smiley :)"),
    "a smiley, and words after it": Shape("FINAL(A smiley :))\nBye (for now)", final="A smiley :)"),
    "a sad smiley": Shape("FINAL(It is sad :()", final="It is sad :("),
    "a sad smiley, and words after it": Shape("FINAL(sad :()\nBye", final="sad :("),
    "a sad smiley, and another answer": Shape("FINAL(sad :()\nFINAL(2)", final="sad :("),
    "a half-open interval": Shape("FINAL([0, 1))", final="[0, 1)"),
    "another half-open interval": Shape("FINAL((0, 1])", final="(0, 1]"),
    "an enumeration": Shape("FINAL(\n1) one\n2) two\n)", final="1) one\n2) two"),
    "a smiley on a later line, and words after it": Shape(
        "FINAL(First.\nA smiley :))\nBye (for now)", final="First.\nA smiley :)"
    ),
    "a sad smiley, closed on a line of its own": Shape("FINAL(\nIt is sad :(\n)", final="It is sad :("),
    "a quote that starts an answer, and one after it": Shape("FINAL(' is a quote)\nAnd ' too.", final="' is a quote"),
    "a quote that starts a mention, and one after it": Shape(
        "FINAL(' is a quote) or so\nAnd ' too.", not_run=("a final answer inside a sentence",)
    ),
    "parentheses behind an answer": Shape("FINAL(1) (see above)", final="1"),
    "parentheses right behind an answer": Shape("FINAL(x)(y)", final="x"),
    "a parenthesis": Shape("FINAL())", final=")"),
    "an enumeration behind an answer": Shape("FINAL(1)! 2) So", final="1"),
    "LaTeX keeps its backslashes": Shape(r'FINAL("$\frac{1}{2}$ (\n)")', final=r"$\frac{1}{2}$ (\n)"),
    "a fence inside an answer is the answer": Shape(
        "FINAL(Use:\n```python\nprint(1)\n```\n)", final="Use:\n```python\nprint(1)\n```"
    ),
    "an answer that is never closed stops before code": Shape(
        "FINAL(sad :()\n```repl\nprint(1)\n```\n(See above.)", ("print(1)",), final="sad :("
    ),
    "a fence behind the first words of an answer is the answer": Shape(
        "FINAL(Use ```python\nprint(1)\n```\n)", final="Use ```python\nprint(1)\n```"
    ),
    "a fence behind an announcement in an answer is the answer": Shape(
        "FINAL(Use: ```python\nprint(1)\n```\n)", final="Use: ```python\nprint(1)\n```"
    ),
    "an answer before a fence on its line": Shape("FINAL(1) ```repl\nx = 1\n```", ("x = 1",), final="1"),
    "never closed": Shape("FINAL(the answer is", not_run=(WITHIN,)),
    "never closed, with parentheses in it": Shape("FINAL((a) is it\nor not", not_run=(WITHIN,)),
    "code and an answer": Shape("```repl\nx = 1\n```\nFINAL(1)", ("x = 1",), final="1"),
    "inside code only": Shape("```repl\nFINAL(x)\n```", ("FINAL(x)",)),
    "the first of several": Shape("FINAL(1)\nFINAL(2)", final="1"),
    "the first valid one of several": Shape(
        "FINAL()\nFINAL_VAR(1)\nFINAL_VAR(x)",
        var="x",
        not_run=("an empty final answer", "a FINAL_VAR without a variable's name"),
    ),
    "two on a line": Shape("FINAL(1) FINAL(2)", final="1"),
    "empty": Shape("FINAL()", not_run=("an empty final answer",)),
    "an empty quotation": Shape('FINAL("")', not_run=("an empty final answer",)),
    "a placeholder": Shape("FINAL(...)", not_run=("an empty final answer",)),
    "a mention": Shape("I will call FINAL() later.", not_run=(WITHIN,)),
    "a mention with a placeholder": Shape("then use FINAL(answer) when done", not_run=(WITHIN,)),
    "a mention that a line break put first": Shape(
        "Then I will use\nFINAL(answer) when done.", not_run=("a final answer inside a sentence",)
    ),
    "a mention as code": Shape("`FINAL(x)`: ends the run.", not_run=("a final answer inside a sentence",)),
    "a mention that starts a sentence": Shape("FINAL() comes later, when I know.", not_run=(WITHIN,)),
    "prose": Shape("Final answer: 42"),
    "another function's name": Shape("FINAL_ANSWER(42)\nNOT_FINAL(1)\nFINALLY(2)"),
    "a variable": Shape("FINAL_VAR(result)", var="result"),
    "a quoted variable": Shape('FINAL_VAR("result")', var="result"),
    "a variable as code": Shape("**FINAL_VAR(`result`)**", var="result"),
    "a variable with spaces around it": Shape("FINAL_VAR( result )", var="result"),
    "an expression is no variable": Shape('FINAL_VAR(result["x"])', not_run=("a FINAL_VAR without a variable's name",)),
    "a keyword is no variable": Shape("FINAL_VAR(None)", not_run=("a FINAL_VAR without a variable's name",)),
}

SHAPES = {**CODE_SHAPES, **NOT_RUN_SHAPES, **FINAL_SHAPES}


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
    for reason in (note.reason for shape in NOT_RUN_SHAPES.values() for note in parse_reply(shape.reply).not_run):
        assert reason.endswith(".")
        assert "\n" not in reason
        assert "write" in reason.lower() or "goes into" in reason


def test_reply_reports_at_most_eight_skipped_parts() -> None:
    reply = "".join(f"```tag{number}\nx\n```\n" for number in range(100))
    assert [note.what for note in parse_reply(reply).not_run] == [f"a ```tag{number} fence" for number in range(8)]


def test_text_after_ten_thousand_fences_is_ignored() -> None:
    """Text after ten thousand fence lines is neither run nor an answer."""
    parsed = parse_reply("```repl\nx = 1\n```\n" * 5_001 + "FINAL(1)")
    assert len(parsed.code) == 5_000
    assert parsed.final is None


@pytest.mark.parametrize(("mentions", "found"), [(31, ("x = 1", "y = 2")), (32, ("x = 1",))])
def test_words_open_no_fence_behind_so_many_mentions(mentions: int, found: tuple[str, ...]) -> None:
    block = "```repl\nx = 1\n```\n"
    reply = "as in ```repl\nor\n" * mentions + block + "Okay! ```repl\ny = 2\n```"
    assert parse_reply(reply).code == found


def test_ten_thousand_mentions_are_no_fence() -> None:
    parsed = parse_reply("as in ```repl\nor\n" * 10_001 + "FINAL(1)")
    assert (parsed.code, parsed.final) == ((), None)


def test_an_answer_among_ten_thousand_fence_lines_counts() -> None:
    block = "```repl\nx = 1\n```\n"
    fewer = block * 4_998 + "```repl\nx = 1\n```repl\nx = 2\n```\n"  # 9,999 lines
    assert parse_reply(fewer + "FINAL(1)").final == FinalText("1")
    assert parse_reply(block + "FINAL(1)\n" + block * 5_000).final == FinalText("1")


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


SIZE = 200_000
TIMES = 16
CHARACTERS = ["`", "~", "<", "(", ")", "'", '"', "\\", "\n", " ", "\r\n", "{", "> ", "- ", "\0", "\ud800", " 'a"]
OPENINGS = [
    "FINAL(",
    "FINAL(\n",
    "FINAL()\n",
    "FINAL_VAR(1)\n",
    "**FINAL(a) b\n",
    "FINAL(a :(\n",
    "<tool_call>",
    '{"name": "',
]
UNCLOSED = [
    "```\n",
    "~~~\n",
    "```a\n",
    "```repl\n",
    "```repl\nx\n",
    "```\nx=1\n",
    "a:```repl\n",
    "a. ```repl\n",
    "a ` ",
    "a `b` ",
    "a ```repl ",
    "a ```b``` ``c`` ",
    "a. ```\n",
    "a. ```b\n",
    "```markdown\n```repl\n",
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
        name: cpu_s(reply(SIZE)) / max(cpu_s(reply(SIZE // TIMES)), 0.005)  # shorter times are mostly noise
        for name, reply in PATHOLOGICAL.items()
    }
    assert {name: times for name, times in growth.items() if times >= 4 * TIMES} == {}, f"its square is {TIMES**2}"
