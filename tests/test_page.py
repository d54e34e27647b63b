"""What pages for people are made of: colours, bars, lines; and that what cannot be read is found."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from support.browser import Browser

from nsq_fast.page import COLOURS, DASHES, Bar, Line, Piece, bars, by_share, duration, over_time

# Linear RGB as people see it who lack one kind of cone: Machado, Oliveira and Fernandes (2009), severity 1.
SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
# In CIELAB, where about 2 can just be told apart side by side.
APART = 20.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_be_read_is_found(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        """<!doctype html><main><p style="color:#bbb;background:#fff">faint</p><p style="width:900px">wide</p>
        <p style="width:50px;overflow:hidden;white-space:nowrap">a line that is longer than its place</p>
        <div class="bar"><span class="track"><u style="position:absolute;width:200px;height:9px"></u></span>
        <b class="value">crossed</b></div>
        <svg class="chart" viewBox="0 0 1000 100" width="300"><text x="5" y="50" font-size="12">tiny</text>
        <text x="8" y="52" font-size="40">over</text><text x="990" y="50" font-size="40">out</text></svg></main>"""
    )
    found = browser.audit(page, 400, False).found
    for words in (
        "contrast",
        "the page is",
        "cut off",
        "a mark crosses",
        "text of",
        "overlaps",
        "outside of its chart",
    ):
        assert any(line.startswith(words) for line in found), (words, found)


def lab(colour: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """A colour in CIELAB, as somebody sees it."""
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in shares]
    seen = [min(1.0, max(0.0, sum(map(math.prod, zip(row, linear, strict=True))))) for row in matrix]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = (sum(map(math.prod, zip(row, seen, strict=True))) for row in to_xyz)
    f = [
        each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116
        for each in (value / white for value, white in zip(xyz, (0.9505, 1.0, 1.089), strict=True))
    ]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


@pytest.mark.parametrize("shade", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN)
def test_colours_are_told_apart_by_all_eyes(eyes: str, shade: int) -> None:
    names = ["bad", *(f"colour{number}" for number in range(1, 5))]
    seen = {name: lab(COLOURS[name][shade], SEEN[eyes]) for name in names}
    close = {
        (one, other): round(math.dist(seen[one], seen[other]))
        for one, other in itertools.combinations(names, 2)
        if math.dist(seen[one], seen[other]) < APART
    }
    assert close == {}


def test_lines_are_told_apart_without_colour() -> None:
    looks = {(number % 4, DASHES[number % len(DASHES)]) for number in range(20)}
    assert len(looks) == 20
    assert len(set(DASHES)) == len(DASHES)


def test_charts_are_well_formed_and_to_scale() -> None:
    rows = [Bar("a<b", [Piece(4, 50)], "50", 40, 60), Bar("b", [Piece(1, 100)], "100", 90, 120, True)]
    first, second = (float(width) for width in re.findall(r"max\(2px,([\d.]+)%\)", bars("t", rows)))
    assert second == pytest.approx(2 * first, rel=0.01)
    for lines in ([Line("a", [(0, 10.0), (50, 100.0), (99, 5000.0), (100, 20000.0)])], []):
        xml.etree.ElementTree.fromstring(by_share("Latency", lines))


def test_durations_of_charts_have_a_unit() -> None:
    assert [duration(value) for value in (0.1, 1, 999, 1000, 1e6)] == ["100 ns", "1 µs", "999 µs", "1 ms", "1 s"]


def test_points_that_stand_alone_are_whole_rings_of_different_sizes() -> None:
    """Dashes break a ring; of rings of one size at one place all but the last are hidden."""
    lines = [Line(name, ((0.0, 1.0), (1.0, None), (2.0, 3.0), (3.0, 4.0))) for name in ("p50", "p95", "max")]
    shown = over_time("End to end", lines)
    rings = re.findall(r"<circle [^>]*>", shown)
    assert all("stroke-dasharray:none" in ring for ring in rings)
    assert len({re.search(r'r="(\d+)"', ring)[1] for ring in rings}) == len(rings) == 3


@pytest.mark.parametrize("span", [0.0, 0.05, 0.3, 0.7, 3.0, 60.0, 7200.0, 86_400.0 * 3])
def test_the_words_below_an_axis_of_time_do_not_overlap(span: float) -> None:
    """Neither in small letters, on a wide screen, nor in large ones, for which fewer words are shown."""
    begin = 1_700_000_000.0
    shown = over_time("End to end", [Line("p50", ((begin, 1.0), (begin + span, 3.0)))])
    pattern = r'<text x="([\d.]+)" y="254.0" text-anchor="(\w+)"( class="every-other")?>([^<]+)</text>'
    found = re.findall(pattern, shown)
    assert found
    for size, hidden in ((11, ()), (15, (' class="every-other"',))):
        places = []
        for x, anchor, name, words in found:
            width = 0.55 * size * len(words)
            if name not in hidden:
                left = float(x) - (width if anchor == "end" else width / 2)
                places.append((left, left + width))
        places.sort()
        assert all(before[1] < after[0] for before, after in pairwise(places)), places
