"""Links, anchors, files, functions, scripts and tests that documents name, and the form of the changelog."""

import ast
import re
from collections.abc import Iterator

from scripts.lint.project import FUNCTIONS, PACKAGES, Finding, Project, Source
from scripts.lint.prose import FENCE

LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?)(?:\{ *#([\w.-]+) *\})?$", re.MULTILINE)
ANCHOR = re.compile(r"(?:\{ *#|\bid=\")([\w.-]+)")
FILE = re.compile(r"`((?:rlm_broker|sandbox_worker|tests|scripts|docs|examples|\.ci)/[\w/.]*[\w/])(?::([\w.]+))?`")
STEP = re.compile(r"`([\w/]+\.py):([\w.]+)`")
SCRIPT = re.compile(r"python -m ((?:scripts|tests)\.[\w.]*\w)")
TEST = re.compile(r"`(test_\w+)`")
GENERATED = "docs/reference/"
"""Pages whose anchors the site makes; `tests/test_site.py` checks links to them."""
RELEASE = re.compile(r"\[Unreleased\]|\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d")
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def rules(project: Project) -> Iterator[Finding]:
    """Yield what documents name and what does not exist; the changelog tells of the past, and has its form alone."""
    tests = {node.name for each in project.python("tests") for node in each.nodes if isinstance(node, FUNCTIONS)}
    for source in project.documents():
        plain = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), source.text)
        found = [(match, fault) for match in LINK.finditer(plain) if (fault := _link(project, source, match[1]))]
        if source.path == "CHANGELOG.md":
            yield from _changelog(source)
        else:
            found += [(match, fault) for match in FILE.finditer(plain) if (fault := _file(project, *match.groups()))]
            found += [(each, fault) for each in STEP.finditer(plain) if (fault := _step(project, *each.groups()))]
            found += [(each, "no such test") for each in TEST.finditer(plain) if each[1] not in tests]
        yield from (Finding(source.path, _line(plain, each.start()), f"{each[0]}: {fault}") for each, fault in found)
        for each in SCRIPT.finditer(source.text):
            path = project.root / each[1].replace(".", "/")
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                yield Finding(source.path, _line(source.text, each.start()), f"{each[0]}: no such script")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: those of its headings as GitHub makes them, and those that are written out."""
    found = set(ANCHOR.findall(text))
    for title, _ in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _link(project: Project, source: Source, target: str) -> str:
    path, _, anchor = target.partition("#")
    if ":" in path or source.path.startswith(GENERATED):
        return ""
    page = (project.root / source.path).parent / path if path else project.root / source.path
    if not page.exists():
        return "no such file"
    is_generated = page.resolve().is_relative_to(project.root.resolve() / GENERATED)
    if anchor and page.suffix == ".md" and not is_generated and anchor not in anchors(page.read_text()):
        return "no such anchor"
    return ""


def _file(project: Project, path: str, name: str | None) -> str:
    if not (project.root / path).exists():
        return "no such file"
    sources = [each for every in project.sources.values() for each in every if each.path == path]
    return f"it does not define {name}" if name and name not in _defined(sources[0]) else ""


def _step(project: Project, path: str, name: str) -> str:
    """Return what is wrong with a function that is named by its file below a package."""
    sources = [each for each in project.modules.values() if each.path in {path, *(f"{p}/{path}" for p in PACKAGES)}]
    if not sources and (project.root / path).exists():
        return ""
    return "" if any(name in _defined(each) for each in sources) else "no such function"


def _defined(source: Source) -> set[str]:
    """Return names at the top of a module, and members of its classes as `Class.member`."""
    names: set[str] = set()
    for node in source.tree.body:
        names |= _names(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member}" for each in node.body for member in _names(each)}
    return names


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _changelog(source: Source) -> Iterator[Finding]:
    """Yield what differs from "Keep a Changelog": releases, sections in their order, and entries as lists."""
    lines = source.text.split("\n")
    sections: list[str] = []
    releases = 0
    for number, line in enumerate(lines, 1):
        if line.startswith("## "):
            sections = []
            releases += 1
            if not RELEASE.fullmatch(line[3:]) or (releases == 1) != ("Unreleased" in line):
                yield Finding(source.path, number, "the first release is [Unreleased], others are [1.2.3] - 2026-01-31")
        elif line.startswith("### "):
            sections.append(line[4:])
            if sections != [kind for kind in SECTIONS if kind in sections]:
                yield Finding(source.path, number, f"each section once, in the order {', '.join(SECTIONS)}")
            if re.match(r"\s*(###? |$)", "\n".join(lines[number:]).lstrip("\n")):
                yield Finding(source.path, number, "a section without entries")
        elif sections and not re.match(r"- \S|  \S|#### |$", line):
            yield Finding(source.path, number, "an entry begins with `- `, and goes on behind two spaces")
