"""The documentation as a site: it builds without a warning, is whole, and loads nothing from the network."""

import subprocess
from pathlib import Path

import click

import rlm_broker
from rlm_broker.cli.main import cli
from tests.support import site_pages
from tests.support.places import PROJECT


def test_site_is_built_whole_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """One test, since the build takes most of its time."""
    site = tmp_path.resolve() / "site"
    built = subprocess.run([PROJECT / "scripts" / "docs", site], capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout) == (0, ""), built.stdout + built.stderr
    assert site_pages.faults(site) == []
    read = site_pages.pages(site)
    reference = {path.name: page for path, page in read.items() if path.parent == site / "reference"}
    anchors = set().union(*(page.anchors for page in reference.values()))
    assert {name for name in rlm_broker.__all__ if f"rlm_broker.{name}" not in anchors} == set()
    assert set(options(cli, "rlm-broker")) - anchors == set()
    assert (
        site / "search" / "search_index.js"
    ).stat().st_size > 10_000  # what a page that is opened from a folder reads


def options(command: click.Command, path: str) -> list[str]:
    """Return the anchors of a command, of its options and of all commands below it."""
    found = [path.replace(" ", "-")]
    found += [
        f"{found[0]}{option}" for each in command.params if isinstance(each, click.Option) for option in each.opts
    ]
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            each = command.get_command(click.Context(command), name)
            assert each is not None
            found += options(each, f"{path} {name}")
    return found


def test_fault_of_a_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link href="https://fonts.example/x.css" rel="stylesheet"><img src="gone.png"><a href="b.html#nowhere">x</a>'
        '<a href="b.html#here">x</a><a href="c.html">x</a><a href="https://example.org">x</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">x</h1><link href="https://example.org/b" rel="canonical">')
    (tmp_path / "s.css").write_text("@import 'x.css';")
    assert site_pages.faults(tmp_path) == [
        "a.html loads https://fonts.example/x.css",
        "a.html loads gone.png, which is not there",
        "a.html links to b.html#nowhere, and there is no such anchor",
        "a.html links to c.html, which is not there",
        "s.css loads @import",
    ]
