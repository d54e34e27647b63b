"""The report of a run as a browser shows it; and the figures of README, docs/performance.md and docs/tuning.md, which
are those of the file of the run: none by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.browser import Browser, check_readable

from nsq_fast.bench.report import FIGURES, docs, html, readme_block, tuning_block
from nsq_fast.bench.results import Run, load

ROOT = Path(__file__).parents[2]
HOW = (
    "nsq-fast bench report docs/performance.json --docs docs/performance.md --readme README.md --tuning docs/tuning.md"
    " --svg docs/charts"
)


@pytest.fixture(scope="module")
def run() -> Run:
    return load(ROOT / "docs" / "performance.json")


def test_the_page_is_that_of_the_run(run: Run) -> None:
    assert (ROOT / "docs" / "performance.md").read_text() == docs(run), f"write it again: {HOW}"


@pytest.mark.parametrize(("page", "block"), [("README.md", readme_block), ("docs/tuning.md", tuning_block)])
def test_figures_of_other_pages_are_those_of_the_run(run: Run, page: str, block: Callable[[Run], str]) -> None:
    found = FIGURES.search((ROOT / page).read_text())
    assert found is not None
    assert block(run) in found[0], f"write them again: {HOW}"


def test_the_run_was_made_with_other_clients_on_a_real_server(run: Run) -> None:
    consume = run.scenario("consume")
    assert consume is not None
    assert consume.server.startswith("nsqd v")
    assert {"nsq_fast", "go-nsq", "gnsq"} <= {each.client for each in consume.clients if each.rounds}


@pytest.fixture(scope="module")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(run), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_can_be_read_on_any_screen(page: Path, browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    check_readable(browser, page, width, dark, tmp_path / "picture.png")


def test_the_conclusion_comes_first_and_the_method_last(page: Path) -> None:
    text = page.read_text()
    places = [
        text.index(each) for each in ('id="conclusion"', "<h2>Goals", "<h2>Consume", "<h2>Made with", "<h2>Method")
    ]
    assert places == sorted(places)
