"""The tools: their names, what each says of itself, its arguments and its structured result.

Clients show these texts to models, so they say limits, and what lives on. This module imports pydantic alone: a client
waits for it before it sees the tools.
"""

from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

LONGEST_WAIT_S: Final = 600.0
"""Longest wait for a run in one call, in seconds."""
WAIT_S: Final = 45.0
"""Default wait for a run, in seconds. Some clients end each call after 60 s."""
MOST_QUESTION_CHARS: Final = 100_000
"""Characters of a question, which is a part of each prompt. Longer texts are contexts."""
INSTRUCTIONS: Final = """\
execute_python runs Python in a sandbox without network and without your files. Each result names a REPL: pass it as \
`repl` to go on with its variables. ask_large_context has a model answer a question about texts that are too long to \
read, such as folders of logs. If it takes long, it returns a run: pass it to get_run."""

ReplId = Annotated[str, Field(description="Handle of a REPL, as execute_python returned it.", max_length=100)]
WaitS = Annotated[
    float, Field(description="Seconds to wait for the answer; then the handle is returned.", ge=0, le=LONGEST_WAIT_S)
]


class Arguments(BaseModel):
    """Base of the arguments of a tool. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


class Code(Arguments):
    """Arguments of `execute_python`."""

    code: Annotated[str, Field(description="Python source. The value of a last expression is shown.")]
    repl: Annotated[
        str | None,
        Field(
            description="REPL of an earlier call, to go on with its variables. Without it, a new one begins.",
            max_length=100,
        ),
    ] = None


class Question(Arguments):
    """Arguments of `ask_large_context` where no files may be named."""

    question: Annotated[
        str,
        Field(
            description="What to find out. The model sees only this and the context.", max_length=MOST_QUESTION_CHARS
        ),
    ]
    context: Annotated[str | None, Field(description="The text that the question is about.")] = None
    wait_s: WaitS = WAIT_S


class FileQuestion(Question):
    """Arguments of `ask_large_context` where files of a folder may be named."""

    paths: Annotated[
        list[str] | None,
        Field(description="Files, folders or globs that the question is about, below the folder of this server."),
    ] = None


class OneRun(Arguments):
    """Arguments of `stop_run`."""

    run: Annotated[str, Field(description="Handle of a run, as ask_large_context returned it.", max_length=100)]


class Wait(OneRun):
    """Arguments of `get_run`."""

    wait_s: WaitS = WAIT_S


class OneRepl(Arguments):
    """Arguments of `close_repl`."""

    repl: ReplId


class FileWork(Arguments):
    """Arguments of `repl_files`."""

    repl: ReplId
    action: Annotated[Literal["list", "read", "write", "delete"], Field(description="What to do.")]
    path: Annotated[str, Field(description="File, or folder for list, in the REPL's current folder.")] = "."
    text: Annotated[str | None, Field(description="For write: the content as text.")] = None
    base64: Annotated[str | None, Field(description="For write: the content as base64, in place of text.")] = None


class VariableMade(BaseModel):
    """A variable that a block made or changed."""

    name: str
    type: str
    size: int | list[int] | None = None


class Ran(BaseModel):
    """Result of `execute_python`."""

    repl: Annotated[str | None, Field(description="Pass it to go on with the variables; null if the REPL is gone.")]
    status: Annotated[
        Literal["ok", "error", "exited", "interrupted", "killed"],
        Field(description="killed: blocks_undone says which variables are lost."),
    ]
    stdout: str
    stderr: str
    error: Annotated[str | None, Field(description="One line with the reason, unless ok.")] = None
    limit: Annotated[str | None, Field(description="Name of the limit that ended it.")] = None
    blocks_undone: Annotated[
        int | None, Field(description="If killed: blocks whose variables are lost, this one included; null for all.")
    ] = None
    seconds: float
    variables: list[VariableMade] = []
    pictures: Annotated[int, Field(description="Number of images beside the text.")] = 0


class Answer(BaseModel):
    """Result of `ask_large_context`, `get_run` and `stop_run`."""

    run: str
    state: Literal["queued", "running", "ended"]
    answer: Annotated[str | None, Field(description="The answer; null while the run goes on, or without one.")] = None
    error: Annotated[str | None, Field(description="Why the run has ended without an answer.")] = None
    partial_answer: Annotated[str | None, Field(description="Best answer of a failed run.")] = None
    limit: Annotated[str | None, Field(description="Name of the limit at which the best answer was taken.")] = None
    is_stopped: Annotated[bool, Field(description="Whether stop_run ended it.")] = False
    doing: Annotated[str | None, Field(description="What the run does at this moment.")] = None
    turns: int = 0
    seconds: float = 0.0
    tokens: int = 0
    cost_usd: Annotated[float | None, Field(description="US dollars; null if a price is not known.")] = None


class Entry(BaseModel):
    """One entry of a folder in a REPL."""

    name: str
    kind: Literal["file", "folder", "link", "other"]
    bytes: int


class FilesDone(BaseModel):
    """Result of `repl_files`."""

    action: Literal["list", "read", "write", "delete"]
    path: str
    entries: Annotated[list[Entry] | None, Field(description="For list.")] = None
    text: Annotated[str | None, Field(description="For read, if the file is UTF-8 text.")] = None
    base64: Annotated[str | None, Field(description="For read, if it is not.")] = None
    bytes: Annotated[int | None, Field(description="Size of the file.")] = None


class Closed(BaseModel):
    """Result of `close_repl`."""

    repl: str
    closed: Literal[True] = True


class ToolForm(NamedTuple):
    """A tool as clients see it.

    Attributes:
        name: Its name.
        title: Its name for people.
        description: Text for the model.
        arguments: Type of its arguments.
        result: Type of its structured result.
        right: Right that its caller must have: to run code, or to have questions answered.
        hint: What a client may want to know before it calls: that it changes nothing, may remove things, or reaches out
            of the sandbox, to the provider of a model.
    """

    name: str
    title: str
    description: str
    arguments: type[Arguments]
    result: type[BaseModel]
    right: Literal["execute", "run"]
    hint: Literal["read_only_hint", "destructive_hint", "open_world_hint"] | None = None


_TAKES_LONG: Final = (
    "It may call a paid model, and takes seconds to minutes: after `wait_s` seconds the handle of the run is returned, "
    "for get_run and stop_run."
)
_ASK_FILES: Final = ToolForm(
    "ask_large_context",
    "Ask about large files",
    "Have a model answer a question about files or a text of any size, up to gigabytes. It searches them by code, so "
    "you need not read them. Give either `paths` or `context`. Likely secrets and what .gitignore excludes are left "
    f"out of folders. {_TAKES_LONG}",
    FileQuestion,
    Answer,
    "run",
    "open_world_hint",
)
_ASK_TEXT: Final = ToolForm(
    "ask_large_context",
    "Ask about a large text",
    "Have a model answer a question about a long text, `context`. It searches the text by code. " + _TAKES_LONG,
    Question,
    Answer,
    "run",
    "open_world_hint",
)
_OTHERS: Final = (
    ToolForm(
        "get_run",
        "Wait for an answer",
        "Return the answer of a run of ask_large_context, or what it does at this moment if it goes on after `wait_s` "
        "seconds. An answer is kept for an hour.",
        Wait,
        Answer,
        "run",
        "read_only_hint",
    ),
    ToolForm(
        "stop_run",
        "Stop a run",
        "End a run of ask_large_context, and return its best answer so far.",
        OneRun,
        Answer,
        "run",
        "destructive_hint",
    ),
    ToolForm(
        "repl_files",
        "Files of a REPL",
        "List, read, write or delete files in the current folder of a REPL. Give `text` or `base64` to write. A file "
        "is read as text, or as base64 if it is not UTF-8, up to 1 MiB.",
        FileWork,
        FilesDone,
        "execute",
        "destructive_hint",
    ),
    ToolForm(
        "close_repl",
        "Close a REPL",
        "End a REPL with its variables, its files and the code that it runs.",
        OneRepl,
        Closed,
        "execute",
        "destructive_hint",
    ),
)


def forms(block_timeout_s: float, *, with_paths: bool) -> tuple[ToolForm, ...]:
    """Return all tools."""
    execute = ToolForm(
        "execute_python",
        "Run Python in a sandbox",
        "Run Python code in a sandboxed REPL, and return what it prints, as a notebook cell does. Pass `repl` of an "
        "earlier result to go on: its variables, imports and files are still there. A REPL that is idle for 20 minutes "
        "is closed. There is no network, and none of the user's files: bring data by repl_files. Code may compute for "
        f"{block_timeout_s:g} s; then it is interrupted, and variables stay. Figures and pictures that it shows come "
        "back as images. To see installed packages: `import importlib.metadata as m; print(sorted({d.name for d in "
        "m.distributions()}))`. Text beyond 20,000 characters is cut in the middle.",
        Code,
        Ran,
        "execute",
    )
    return (execute, _ASK_FILES if with_paths else _ASK_TEXT, *_OTHERS)
