"""How pages for people look: colours, durations; and that what cannot be read is found."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from support.browser import Browser

from nsq_fast.page import COLOURS, DASHES, duration

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
        <div class="bar"><span class="track"><i style="position:absolute;width:200px;height:9px"></i></span>
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


def test_durations_of_charts_have_a_unit() -> None:
    assert [duration(value) for value in (0.1, 1, 999, 1000, 1e6)] == ["100 ns", "1 µs", "999 µs", "1 ms", "1 s"]
