"""`python -m scripts.lint`: prints each place that breaks a rule, and exits with 1 if there is one."""

import argparse
import sys
from collections.abc import Sequence

from scripts.lint import documents, examples, patterns, prose, public_names, ratchet, rooms, shapes
from scripts.lint.project import Project
from tests.support.places import PROJECT


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all rules over all files, or lower the figures of the ratchet."""
    parser = argparse.ArgumentParser(prog="python -m scripts.lint", description="Checks the rules of CONTRIBUTING.md.")
    parser.add_argument("--write", action="store_true", help="lower the figures of the ratchet to what is reached")
    options = parser.parse_args(arguments)
    project = Project(PROJECT)
    figures = [*rooms.figures(project), *shapes.figures(project)]
    if options.write:
        ratchet.write(project, figures)
    found = [
        finding
        for each in (prose, rooms, shapes, documents, public_names, examples, patterns)
        for finding in each.rules(project)
    ]
    found += ratchet.rules(project, figures)
    for finding in sorted(found, key=lambda each: (each.path, each.line)):
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
