"""Declarations of all commands. The work of each is in the module of its name, which `--help` does not import."""

import click

from rlm_broker.cli.parameters import (
    FILE,
    FOLDER,
    ISOLATION,
    PATH,
    Flag,
    Group,
    KeyVariable,
    LazyCommand,
    Option,
    RunsGroup,
    completed_assignments,
    completed_models,
    require_paths,
)

MOST_RUNS = 4_096
"""Runs of a batch at the same time, at most."""
KEY = KeyVariable()
BY_SIGNALS = "130, 143, 129 stopped by Ctrl+C, SIGTERM, SIGHUP"

# -- options of several commands ---------------------------------------------------------------------------------------

JSON = Flag("--json as_json", "Print one JSON object.")
DEBUG = Flag("--debug", "Show tracebacks of rlm-broker itself.")
NO_OPEN = Flag("--no-open", "Only print the link; do not open the browser.")
MODEL = Option(
    "-m --model",
    "NAME",
    "The root model; default: that of the settings, see models default.",
    completed=completed_models,
)
SUB_MODEL = Option(
    "-s --sub-model", "NAME", "The model that code asks; default: the root model.", completed=completed_models
)
BASE_URL = Option("--base-url", "URL", "Address of an OpenAI-compatible server with the models.")
API_KEY = Option("--api-key", "env:NAME", "Variable that holds the key of the model.", type=KEY)
MODELS = (MODEL, SUB_MODEL, BASE_URL, API_KEY)
MAX_DEPTH = Option("--max-depth", "N", "Levels of runs that have a REPL (default 1).", type=int)
LEVEL = click.Option(
    ["--isolation"], type=ISOLATION, help="Level of the sandbox (default auto); process is unprotected."
)
PYTHON = Option("--python", "FOLDER", "A virtual environment whose packages code has.", type=FOLDER)
PACKAGES = Option("--packages", "LIST", "Packages to make such an environment of: 'numpy>=2 six'.")
ALLOW_EXEC = click.Option(
    ["--allow-exec/--no-allow-exec"], default=None, help="Whether code may start programs (default: at strict)."
)
SANDBOX = (LEVEL, PYTHON, PACKAGES, ALLOW_EXEC)
TOOLS = Option(
    "--tools", "FILE", "Python file whose functions and values code may use. It runs without a sandbox.", type=FILE
)


def _limit(example: str) -> Option:
    help = f"Any limit or setting, as {example}; config show lists them."
    return Option("--limit --set assignments", "NAME=VALUE", help, multiple=True, completed=completed_assignments)


LIMIT = _limit("run_timeout_s=10m")
SYSTEM = Option("--system", "TEXT", "System prompt, in place of the built-in one.")
QUIET = Flag("-q --quiet", "Print no progress and no advice.")
RETRY_FAILED = Flag("--retry-failed", "Ask again what has failed in an earlier process.")


def _output_type(help: str) -> Option:
    return Option("--output-type", "FILE", help, type=FILE)


# -- questions ---------------------------------------------------------------------------------------------------------

ASK = LazyCommand(
    "ask",
    """Ask QUESTION about files, folders or globs. Without any, or with -, it is about stdin.

    The answer goes to stdout, all else to stderr. With --resume the trace has the QUESTION: give the PATHs alone.

    \b
    rlm-broker ask "Which service failed first?" logs/ -m openai/gpt-5-mini
    rlm-broker ask "Who signed it, and when?" contract.pdf -m ollama/qwen3:4b -v
    rlm-broker ask --resume run.jsonl logs/ --limit max_budget_usd=2
    journalctl | rlm-broker ask "When did the disk fail?" --limit max_budget_usd=0.5
    """,
    (
        click.Argument(["question"], required=False, metavar="QUESTION"),
        click.Argument(["paths"], nargs=-1, type=FILE, metavar="[PATH]..."),
        "Often",
        *MODELS,
        MAX_DEPTH,
        LIMIT,
        Flag("-c --continue go_on", "Go on from the last question at a terminal, about the same paths."),
        Flag("-v --verbose", "Show each turn's reply, code, output and calls."),
        QUIET,
        "Answer",
        Option("-o --out", "FILE", "Write the answer to a file, too.", type=PATH),
        Option("--best-of", "N", "Answer N times; print the most frequent answer.", type=click.IntRange(1, 256)),
        JSON,
        _output_type("A JSON Schema of the answer, which is printed as JSON."),
        SYSTEM,
        TOOLS,
        "Keep",
        Option("--trace", "FILE", "Write all events to a new file, as JSON lines.", type=PATH),
        Option("--resume", "TRACE", "Go on with its run, about the same PATHs.", type=PATH, multiple=True),
        Option("--record", "FILE", "Write all model calls to a new file.", type=PATH),
        Option("--replay", "FILE", "Take replies from such a file; no model is called.", type=PATH),
        "Sandbox",
        *SANDBOX,
        DEBUG,
    ),
    checked=require_paths,
    epilog=f"""\b
exit codes: 0 answered (NOT FOUND is an answer), 1 failed, 2 the command line or configuration is wrong,
3 a limit or `runs stop` ended it (the partial answer is printed), 4 the isolation cannot be had or the sandbox
failed, 5 the model provider failed, {BY_SIGNALS} (the partial answer is printed)""",
)

CHAT = LazyCommand(
    "chat",
    """Talk about files or folders. The REPL stays, with all that code has found out, and so does the conversation.

    Each line of stdin is a question, or one of /files, /undo, /cost, /help and /quit. Ctrl+C ends an answer with what
    there is, and keeps the variables.

    \b
    rlm-broker chat logs/ -m openai/gpt-5-mini
    rlm-broker chat src/ docs/ -m ollama/qwen3:4b -v
    rlm-broker chat contract.pdf -q <questions.txt
    """,
    (
        click.Argument(["paths"], nargs=-1, type=FILE, metavar="PATH..."),
        "Often",
        *MODELS,
        MAX_DEPTH,
        LIMIT,
        Flag("-v --verbose", "Show each turn's reply, code, output and calls."),
        QUIET,
        TOOLS,
        "Sandbox",
        *SANDBOX,
        DEBUG,
    ),
    epilog=f"""\b
exit codes: 0 the input has ended, 1 a question of a pipe or a file had no answer, 2 the command line or
configuration is wrong, 4 the isolation cannot be had, 5 the model provider cannot be reached at the start,
{BY_SIGNALS}""",
)

BATCH = LazyCommand(
    "batch",
    """Ask the questions of INPUT, one JSON object a line, and write each result to OUT as soon as there is one.

    If INPUT is -, lines are read from stdin. The same command goes on after a kill: finished items are not asked again,
    and calls that were paid are not paid again. Limits of the whole batch hold for all of its processes together.
    """,
    (
        click.Argument(["input"], required=False, type=FILE, metavar="INPUT"),
        Option("-o --out", "FILE", "File of results, as JSON lines.", type=PATH),
        Option("--status", "FILE", "Show how far the batch of FILE is, or all its shards.", type=PATH),
        Option("--shard", "K/N", "Ask every N-th item; auto/N takes K from Slurm or Kubernetes."),
        Option("--merge", "FILE", "Put the results of all shards of FILE into it.", type=PATH),
        Option(
            "--max-concurrent",
            "N",
            "Runs at the same time (default 16).",
            type=click.IntRange(1, MOST_RUNS),
            default=16,
        ),
        Flag("--fail-fast", "End the batch when an item fails; default: a failure is a result."),
        RETRY_FAILED,
        Flag("--settings-changed", "Take other limits of runs for the items that are left; their lines say so."),
        Option("--samples", "N", "Ask each item N times (default 1).", type=click.IntRange(1), default=1),
        Option("--batch-budget-usd", "USD", "Dollars of the whole batch."),
        Option("--batch-tokens", "N", "Tokens of the whole batch."),
        Option("--batch-timeout", "TIME", "Time of the whole batch, such as 90s or 1h30m."),
        Flag("--trajectories", "Write the conversations of each item and its children, as chat messages."),
        Option(
            "--score",
            "PLACE:FUNCTION",
            "Function (item, result) whose value each line has; PLACE is a FILE.py or a module. No sandbox.",
        ),
        Option("--root", "DIR", "Folder of the paths in lines (default: that of INPUT).", type=FOLDER),
        "Runs",
        *MODELS,
        MAX_DEPTH,
        _limit("max_budget_usd=0.1 of each item"),
        TOOLS,
        _output_type("A JSON Schema of the answers."),
        SYSTEM,
        *SANDBOX,
        Flag("--json as_json", "Print one JSON object about the batch at its end."),
        QUIET,
        DEBUG,
    ),
    epilog=f"""\b
a line of INPUT is one of these, with "metadata": {{...}} for values of your own:
  {{"id": "a1", "question": "Which disk failed?", "context": "a text, an object or a list"}}
  {{"id": "a2", "question": "Which disk failed?", "path": "logs/a2.log"}}

\b
exit codes: 0 each item has a result, and none failed, 1 some items failed, 2 the command line, the input or
the configuration is wrong, or it does not fit OUT, 3 a limit of the batch or `rlm-broker runs stop` ended it,
4 the isolation cannot be had or the sandbox failed, 5 every call would fail (a wrong key, model or address),
{BY_SIGNALS}.
After 3, 4, 5, 130, 143, 129 and a kill the same command goes on with the items that have no result.""",
)

EVAL = LazyCommand(
    "eval",
    """Print the line that measures whether an RLM is worth it for a model, by questions with known answers.

    The line is a command of inspect_ai, which has logs, a viewer, statistics, retries and prices. Each question is
    asked in each arm. pip install 'rlm-broker[eval]' brings it.
    """,
    (
        MODEL,
        SUB_MODEL,
        Option("--tasks", "LIST", "Generated tasks (default needles,messages).", default="needles,messages"),
        Option("--length", "LIST", "Lengths of the contexts in tokens, such as 8k,1m (default 8k).", default="8k"),
        Option("--samples", "N", "Questions of each task at each length.", type=click.IntRange(1, 10_000)),
        Option("--seed", "N", "Seed of the generated questions (default 0).", type=int, default=0),
        Option("--data", "FILE", "Your own questions or OOLONG's, as JSON lines, in place of the tasks.", type=FILE),
        Option("--arms", "LIST", "Ways to ask each question (default rlm,plain).", default="rlm,plain"),
        DEBUG,
    ),
    epilog="""\b
tasks: needles (a fact that shares no word with its question, one of two hops, one that is missing),
       messages (counts, users and dates over messages that have to be judged one by one)
arms:  plain (the context is in the prompt), rlm (runs with a REPL), rlm2 (and their children with one); an arm may
       have settings of its own, such as rlm:max_iterations=10 or rlm:recursion=auto

\b
exit codes: 0 the line was printed, 2 the command line or configuration is wrong""",
)

# -- code, servers -----------------------------------------------------------------------------------------------------

EXEC = LazyCommand(
    "exec",
    """Run a Python FILE in a sandbox of its own, without any model, as `python FILE ARGS...` would.

    All arguments behind FILE are the program's. It reads the stdin of this command, as it needs it. If FILE is -, the
    program itself is read from stdin.

    \b
    rlm-broker exec script.py --verbose <numbers.txt
    rlm-broker exec --file data.csv --out results/ plot.py
    rlm-broker exec -c "print(2 ** 100)"
    """,
    (
        click.Argument(["file"], type=FILE, required=False),
        click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]..."),
        Option("-c code", "CODE", "Run this code in place of a FILE; what stands behind it are its arguments."),
        Option("--file files", "LOCAL[=NAME]", "A file to put beside the program; repeatable.", multiple=True),
        Option(
            "-o --out", "FOLDER", "A new folder for the files that it makes and the pictures that it shows.", type=PATH
        ),
        Option("--timeout", "TIME", "Compute time, such as 90s or 1h30m (default 60 s)."),
        *SANDBOX,
        _limit("memory_bytes=64MB"),
        JSON,
        DEBUG,
    ),
    epilog=f"""\b
exit codes: 0 it ran through, its own if it exited with one, 1 it raised or crashed, 2 the command line is wrong,
3 a limit ended, interrupted or killed it, 4 the sandbox cannot be had or failed,
{BY_SIGNALS}""",
    context_settings={"allow_interspersed_args": False},
)

SERVE = LazyCommand(
    "serve",
    """Serve an RLM as a model over HTTP, and its sandbox: to OpenAI's clients, chat windows and agents.

    The address, the key and the link of the viewer go to stdout. SIGTERM lets runs end; a second one ends them.
    """,
    (
        *MODELS,
        Option("--host", "HOST", "Address to listen on (default 127.0.0.1)."),
        Option("--port", "N", "Port (default 8700); 0 takes a free one.", type=int),
        Option("--key", "env:NAME", "Variable that holds the key of clients; default: one is made.", type=KEY),
        Option(
            "--context contexts",
            "NAME=PATH",
            "Files that the model MODEL@NAME asks about. They are read once, at the start.",
            multiple=True,
        ),
        Option("--config", "FILE", "Settings, in place of rlm-broker.toml of this folder.", type=PATH),
        LEVEL,
        Option("--max-runs", "N", "Runs at the same time (default 64).", type=int),
        Option("--drain-s", "S", "Seconds that runs have to end after SIGTERM (default 30).", type=float),
        Option("--certificate", "FILE", "Certificate for TLS, as PEM.", type=FILE),
        Option("--private-key", "FILE", "Private key of the certificate, as PEM.", type=FILE),
        Flag("--behind-proxy", "A proxy in front speaks TLS: listen beyond loopback.", default=None),
        LIMIT,
        DEBUG,
    ),
    epilog="""\b
exit codes: 0 drained after SIGTERM or Ctrl+C, 1 failed, 2 the command line or configuration is wrong, or the port is
in use, 4 the isolation cannot be had, 5 the model provider failed""",
    extra="serve",
)

MCP = LazyCommand(
    "mcp",
    """Serve a sandbox, and questions about large files, to one client of the Model Context Protocol.

    The client starts this command, and talks with it by stdin and stdout. The command ends when stdin does.
    """,
    (
        *MODELS,
        Option("--root", "DIR", "Folder whose files may be asked about.", type=FOLDER, default="."),
        *SANDBOX,
        TOOLS,
        MAX_DEPTH,
        LIMIT,
        Flag("--config only_config", "Print the JSON that clients want, and exit."),
        DEBUG,
    ),
    epilog=f"""\b
for Claude Code:
  claude mcp add rlm -- rlm-broker mcp --model openai/gpt-5-mini

\b
exit codes: 0 the client has left, 2 the command line or configuration is wrong,
{BY_SIGNALS}""",
)

# -- this machine, settings, runs that go on ---------------------------------------------------------------------------

DOCTOR = LazyCommand(
    "doctor",
    "Show what isolation this machine offers, tried out in a real worker of each level.",
    (JSON,),
    epilog="exit codes: 0 isolation 'auto' works here, 4 it does not",
)

AS_ASK = "As it would be given to ask."
LIST_MODELS = LazyCommand(
    "models",
    """Show the models and routes that hold here, which names of models can be used, and what the others lack.

    With a NAME, show which model would serve code that asks for it. `models default NAME` sets the model that commands
    take when none is named.
    """,
    (
        click.Argument(["name"], required=False),
        click.Argument(["value"], required=False, metavar=""),
        click.Option(
            ["--depth"],
            type=click.IntRange(0),
            default=1,
            help="Depth of the call: 0 a root's own, 1 (default) its REPL's.",
        ),
        Option("-m --model", "NAME", AS_ASK),
        Option("-s --sub-model", "NAME", AS_ASK),
        BASE_URL,
        API_KEY,
        _limit("model_policy=pinned"),
        JSON,
    ),
    epilog="exit codes: 0 shown, 2 a setting is wrong, or code may not ask for that model",
)

CONFIG = Group(
    "config",
    help="Settings: flags, then RLM_BROKER_*, ./rlm-broker.toml, and ~/.config/rlm-broker/config.toml.",
    commands=[
        LazyCommand(
            "trust",
            "Trust ./rlm-broker.toml with its present content. It may then name servers, Python files of tools, which"
            " run without a sandbox, and isolation 'process'.",
            epilog="exit codes: 0 trusted, 2 there is no such file, or it is wrong",
            work="config.trust",
        ),
        LazyCommand(
            "show",
            """Print each setting with the value that holds, and where it came from.

            A sentence at the end of each line says what the setting is.
            """,
            (_limit("it would be given to ask"), JSON),
            epilog="exit codes: 0 shown, 2 a setting is wrong",
            work="config.show",
        ),
    ],
)

KERNEL_NAME = "rlm-broker"
KERNEL = Group(
    "kernel",
    help="A kernel for Jupyter whose cells run in a sandbox.",
    commands=[
        LazyCommand(
            "install",
            """Make the kernel known to Jupyter. Its options hold for each notebook that takes this kernel.

            Install it several times, with names of your own, for several sets of packages or limits. A cell may take
            a day, unless a limit of time is given. `jupyter kernelspec list` shows all kernels.

            \b
            rlm-broker kernel install --sys-prefix
            rlm-broker kernel install --name tables --packages "pandas matplotlib" --limit memory_bytes=8G
            """,
            (
                Flag("--user where", "For this user (default).", value="user"),
                Flag("--sys-prefix where", "For the environment of this Python.", value="sys-prefix"),
                Option("--prefix", "FOLDER", "For the environment in this folder.", type=FOLDER),
                Option("--name", "NAME", f"Its name (default {KERNEL_NAME}).", default=KERNEL_NAME),
                Option("--display-name", "TEXT", "Its name for people."),
                *SANDBOX,
                _limit("memory_bytes=8G"),
                DEBUG,
            ),
            epilog="exit codes: 0 installed, 2 an option is wrong, or packages are missing, 4 there is no sandbox",
            work="kernel.install",
            extra="jupyter",
        ),
        LazyCommand(
            "uninstall",
            "Remove a kernel that was installed so.",
            (Option("--name", "NAME", f"Its name (default {KERNEL_NAME}).", default=KERNEL_NAME),),
            epilog="exit codes: 0 removed, 2 there is no such kernel of rlm-broker's",
            work="kernel.uninstall",
            extra="jupyter",
        ),
    ],
)

RUN_FILE = click.Argument(["file"], type=PATH)
NEW_PAGE = Option("-o --out", "FILE.html", "The page (default: beside the trace, with .html).", type=PATH)
RUNS = RunsGroup(
    "runs",
    help="Runs: those that go on in this user's processes, and those in files of `ask --trace FILE`.",
    commands=[
        LazyCommand(
            "list",
            """Show each run and each REPL of this user's processes, and what it does. It is `runs` without a command.

            Listed are `ask`, `chat`, `batch`, `exec`, `serve`, `mcp`, and Python programs that were started with
            RLM_BROKER_CONTROL=1. A process that does not answer is named. `runs stop` takes the ids.
            """,
            (JSON, Flag("--watch", "Show the table again each second, until Ctrl+C.")),
            epilog="exit codes: 0 shown, also if no process runs, 2 the command line is wrong, 130 Ctrl+C",
            work="ps",
        ),
        LazyCommand(
            "stop",
            """Stop a run: it ends with its best answer so far. Stop a REPL: its block is interrupted.

            With the id of a process, stop all its runs, and all REPLs that belong to no run. `runs list` shows the
            ids; the beginning of the id of a run or a REPL is enough. The command waits for the end.
            """,
            (
                click.Argument(["target"], metavar="RUN|REPL|PID"),
                Flag("--now", "Cancel a run, without an answer; close a REPL, with all its processes."),
                Flag("--dry-run", "Show what would be stopped."),
                JSON,
            ),
            epilog="""\b
exit codes: 0 it has ended, 1 it goes on or its process hangs, 2 there is no such run, REPL or process,
or the beginning of an id is that of several""",
        ),
        LazyCommand(
            "show",
            "Print the tree of runs of a trace: question, turns, blocks, calls, tokens and cost of each.",
            (
                RUN_FILE,
                Flag("--full", "Show each reply, code, output, and call with its prompt and reply."),
                Flag("--json as_json", "Print the runs as one JSON list; a trace itself is JSON lines."),
            ),
            epilog="exit codes: 0 shown, 2 the file is no trace",
            work="trace.show",
        ),
        LazyCommand(
            "view",
            """Show runs in the browser: those of this machine, to follow and stop them; or a trace, as one page.

            The page of a trace needs no network. The link to the runs of this machine has a key, with which they can be
            seen and stopped: keep it to yourself.
            """,
            (
                click.Argument(["file"], type=PATH, required=False),
                NEW_PAGE,
                Option("--port", "N", "Port (default: a free one).", type=click.IntRange(0, 65535), default=0),
                Option("--host", "ADDRESS", "Address of this machine (default 127.0.0.1).", default="127.0.0.1"),
                NO_OPEN,
            ),
            epilog="exit codes: 0 a page was written, 2 the file is no trace, the page cannot be written, the port"
            " cannot be had, or packages are missing, 130 Ctrl+C",
            work="trace.view",
        ),
        LazyCommand(
            "export",
            "Write a trace as spans of OpenTelemetry. The trace itself is JSON lines.",
            (
                RUN_FILE,
                Flag("--otlp formats", "Spans as OTLP in JSON, for collectors (default).", value="--otlp"),
                Flag("--chrome formats", "", value="--chrome", hidden=True),
                Flag("--rlm formats", "", value="--rlm", hidden=True),
                Option("-o --out", "FILE", "A new file (default: stdout).", type=PATH),
            ),
            epilog="exit codes: 0 written, 2 the file is no trace, or the output cannot be written",
            work="trace.export",
        ),
    ],
)

COMMANDS: dict[str, tuple[str, click.Command]] = {
    "ask": ("Ask a question about a text, files or folders.", ASK),
    "chat": ("Talk about files: the REPL and the conversation stay.", CHAT),
    "batch": ("Ask many questions, and go on where a killed batch was.", BATCH),
    "eval": ("Print the line that measures whether an RLM is worth it for a model.", EVAL),
    "exec": ("Run a Python file in a sandbox, without any model.", EXEC),
    "serve": ("Serve an RLM as a model over HTTP, and its sandbox.", SERVE),
    "mcp": ("Serve a sandbox and questions about files to an MCP client.", MCP),
    "kernel": ("Install a kernel for Jupyter whose cells run in a sandbox.", KERNEL),
    "doctor": ("Show what isolation this machine offers.", DOCTOR),
    "models": ("Show which models and keys there are, and which model would serve a call.", LIST_MODELS),
    "config": ("Show every setting, where it came from, and what it is.", CONFIG),
    "runs": ("List, stop and show runs, in a terminal or in the browser.", RUNS),
}
"""Name of a command -> its sentence in the list of commands, and the command, in the order of that list."""
RENAMED = {"ps": "runs list", "stop": "runs stop", "view": "runs view", "trace": "runs"}
"""Name of a command until 0.1 -> its present one. It works for one release more."""
