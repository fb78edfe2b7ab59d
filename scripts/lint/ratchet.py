"""Figures that may only fall, in `ratchet.txt`: one a line, so that branches which lower different ones merge.

After a merge a figure may stand there twice; the higher one counts until `python -m scripts.lint --write` is run.
"""

from collections.abc import Iterable, Iterator

from scripts.lint.project import Figure, Finding, Project

FILE = "scripts/lint/ratchet.txt"
HEAD = """\
# Figures that may only fall: room (or arrow, class, folder of tests), kind, number. A higher one fails the lint.
# `python -m scripts.lint --write` lowers them to what is reached. To raise one, or to add a room, edit its line by hand
# and give the reason in the commit message. Of lines, 25 to 74 are to spare.
"""
KINDS = {
    "lines": "lines: merge, shorten, or remove what it replaces",
    "code": "lines of code: let it replace other code, or use a library",
    "modules": "modules: put the new one's content where its story is told",
    "root_modules": "modules at the root: give it a room",
    "verbs": "file names that are verbs or participles: name a thing",
    "same_names": "classes of one name: find another name for the new one",
    "mergeable": "small modules whose one importer is in their folder: merge them into it",
    "parameters": "functions with more than 8 parameters (public constructors: 12): pass one object",
    "handed_on": "functions that only hand on `**given: Any`: write the parameters out",
    "imports_in_functions": "imports inside of functions: import at the top; only the command line may do so",
    "internal_names": "internal names that this outer room imports: use what `rlm_broker` exports",
    "up": "imports that run up or stay on a floor: move the code down, or pass a function or protocol in",
    "rooms": "rooms: put it into a folder that exists",
    "arrows": "arrows between rooms: is the new import needed?",
    "arrows_up": "arrows that run up",
    "circles": "circles of rooms: cut the import that closes it",
    "rooms_in_circles": "rooms in circles: cut the import that adds one",
    "floors": "floors: a longer chain of rooms than before",
    "test_lines": "lines of tests: a behaviour is tested in one place",
}
"""Kinds of figures: the thing counted, and what to do about one more."""
ROUNDED = {"lines", "code", "test_lines"}
STEP = 50
SPARE = 25
"""Lines to spare at the least, so that one sentence more needs no new figure."""


def rules(project: Project, figures: Iterable[Figure]) -> Iterator[Finding]:
    """Yield the figures that have grown."""
    allowed = read(project)
    for figure in figures:
        highest, line = allowed.get((figure.subject, figure.kind), (0, 1))
        if figure.value > highest:
            what, _, advice = KINDS[figure.kind].partition(":")
            places = f" ({'; '.join(figure.places[:40])})" if figure.places else ""
            yield Finding(FILE, line, f"{figure.subject} has {figure.value} {what}, not {highest}:{advice}{places}")


def read(project: Project) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the figures of the file and their lines."""
    path = project.root / FILE
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for line, text in enumerate(path.read_text().split("\n") if path.exists() else [], 1):
        words = text.partition("#")[0].split()
        if len(words) == 3 and words[2].isdecimal():
            found[words[0], words[1]] = max(found.get((words[0], words[1]), (0, 0)), (int(words[2]), line))
    return found


def write(project: Project, figures: Iterable[Figure]) -> None:
    """Lower the figures of the file to what is reached; figures of what is gone go as well."""
    path = project.root / FILE
    allowed = read(project)
    lines = []
    for figure in sorted(figures, key=lambda each: (each.subject, each.kind)):
        reached = -(-(figure.value + SPARE) // STEP) * STEP if figure.kind in ROUNDED else figure.value
        highest = allowed.get((figure.subject, figure.kind), (0, 0))[0] if allowed else reached
        if kept := min(reached, highest):
            lines.append(f"{figure.subject} {figure.kind} {kept}\n")
    path.write_text(HEAD + "".join(lines))
