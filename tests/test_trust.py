"""The pages on which others decide whether to trust nsq_fast, and where newcomers begin: what they point at is there.

What they promise is shown by tests elsewhere (test_guarantees), and by those here that have no other place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from nsq_fast import Message
from nsq_fast.cli import main
from nsq_fast.client.give_up import WriteToFolder

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ENTRIES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "THREAT_MODEL.md", "AGENTS.md", "llms.txt"]
GENERATED = {"options.md", "cli.md", "changes.md"}  # pages of docs/hooks.py


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_changes_without_a_release_have_names_that_say_their_kind_and_are_short() -> None:
    for path in sorted((ROOT / "changes").glob("*")):
        if path.name in {"README.md", "template.md.jinja"}:
            continue
        assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|removed|fixed)\.md", path.name), path.name
        text = path.read_text()
        assert re.fullmatch(r"[^#\s-][^\0]*\n", text), f"{path.name}: sentences, without heading or list"
        assert len(text) < 1000, path.name


def workflows() -> list[Path]:
    found = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    if not found:
        pytest.skip("an sdist has no workflows")
    return found


def test_actions_of_others_are_pinned_by_hash_and_nothing_is_allowed_unless_it_is_said() -> None:
    files = [*workflows(), *(ROOT / ".github").glob("actions/*/*.yml"), DOCS / "testing.md"]
    used = [each for path in files for each in re.findall(r"uses: (.*)", path.read_text())]
    assert len(used) > 20
    assert [
        each for each in used if not each.startswith("./") and not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each)
    ] == []
    for path in workflows():
        assert yaml.safe_load(path.read_text())["permissions"] == {}, path.name


def test_a_workflow_installs_what_it_tests_and_tools_by_hash() -> None:
    """What a release is made with is known to the byte, and is no code that runs while it is installed."""
    steps = [
        step["run"]
        for path in workflows()
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    installs = re.findall(r"pip install (.*)", "\n".join(steps))
    tools = "--require-hashes --only-binary :all: -r .github/tools.txt"
    assert installs.count(tools) == 2
    assert [each for each in installs if each != tools and not each.startswith(("-e ", "dist/"))] == []


def test_the_lock_of_the_tools_has_hashes_and_names_no_registry() -> None:
    workflows()
    wanted, locked = ((ROOT / ".github" / name).read_text() for name in ("tools.in", "tools.txt"))
    blocks = re.split(r"^(?=[a-z])", locked, flags=re.M)[1:]
    for block in blocks:
        assert re.match(r"[\w.-]+==\S+( ; .*)? \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+", block), block
    names = {block.partition("==")[0] for block in blocks}
    assert names >= {each.lower() for each in re.findall(r"^([\w-]+)", wanted, re.M)}
    assert "://" not in locked
    (needs,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert set(re.findall(r'"([^"]+)"', needs)) <= set(wanted.splitlines())


@pytest.mark.parametrize("name", ENTRIES)
def test_every_link_leads_to_something(name: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = ROOT / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_navigation_and_in_llms_txt() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages | GENERATED == set(re.findall(r"[:-] ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert pages == set(re.findall(r"\(docs/([\w/-]+\.md)\)", (ROOT / "llms.txt").read_text()))


def test_the_overview_has_every_command() -> None:
    table = (DOCS / "overview.md").read_text().partition("## Command line")[2]
    assert set(re.findall(r"`nsq-fast ([\w-]+)", table)) == set(main.list_commands(click.Context(main)))


def test_what_one_is_told_to_open_is_there() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("### To change X, open Y")[2].partition("\n## ")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 20
    for _, code, tests in rows:
        for path in re.findall(r"`([\w/]+(?:\.\w+|/)?)`", code):
            assert (ROOT / "nsq_fast" / path).exists() or (ROOT / path).exists(), path
        for path in re.findall(r"`([\w/]+(?:\.py)?)`", tests):
            assert (ROOT / "tests" / path).exists(), path


def test_the_files_that_the_tour_names_are_there() -> None:
    text = (DOCS / "internals.md").read_text().partition("## A tour")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.pyx?)`", text)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / "nsq_fast" / name).exists()] == []


class Stand:
    """As much of a consumer as a give-up policy asks for."""

    topic, channel = "topic", "channel"

    def apart(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@pytest.mark.parametrize(
    "id", [b"../../../escaped", b"/tmp/escaped\0\0\0\0", b"..\\..\\..\\escaped", b"0123456789abcdef"]
)
def test_an_id_that_looks_like_a_path_stays_in_the_folder_of_what_was_given_up(id: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where" / "deep" / "given-up"
    WriteToFolder(folder)(Stand(), Message(1700000000000000000, 6, id, b"body"))  # type: ignore[arg-type]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent for path in written} == {folder}
    assert {path.suffix: path.read_bytes() for path in written}[".body"] == b"body"
