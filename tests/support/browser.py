"""A page as a real browser shows it: pictures, and what of it cannot be read."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

LIMIT = 90
# What is looked at, in the frame of the width that is asked for. Each finding is a sentence.
_AUDIT = """
const page = document.querySelector("iframe").contentDocument, view = page.defaultView, found = [];
const box = (each) => each.getBoundingClientRect();
const name = (each) => `${each.tagName} ${each.className.baseVal ?? each.className} "${each.textContent.slice(0, 40)}"`;
const channels = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
const luminance = (colour) => {
  const [r, g, b] = channels(colour).slice(0, 3).map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (each) => {
  for (; each; each = each.parentElement) {
    const colour = view.getComputedStyle(each).backgroundColor;
    if (channels(colour)[3] !== 0 && colour !== "transparent") return colour;
  }
  return "rgb(255, 255, 255)";
};
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.5;
const visible = (each) => box(each).width > 0;

if (page.documentElement.scrollWidth > view.innerWidth) {
  const outside = (each) => box(each).right > view.innerWidth && !each.closest(".wide");
  const wide = [...page.body.querySelectorAll("*")].filter(outside);
  found.push(`the page is ${page.documentElement.scrollWidth} wide: ${name(wide[0] ?? page.body)}`);
}
for (const each of page.querySelectorAll("h1,h2,h3,p,figcaption,.legend,.bar,.bar > *,.tiles div,table.words td"))
  if (each.scrollWidth > each.clientWidth + 4 && each.clientWidth) found.push(`cut off: ${name(each)}`);
for (const bar of page.querySelectorAll(".bar"))
  for (const mark of bar.querySelectorAll("i"))
    for (const words of bar.querySelectorAll(".label,.value"))
      if (meet(box(mark), box(words))) found.push(`a mark crosses ${name(words)}`);
for (const svg of page.querySelectorAll("svg.chart")) {
  const texts = [...svg.querySelectorAll("text")].filter(visible), frame = box(svg);
  for (const each of texts) {
    if (box(each).left < frame.left - 0.5 || box(each).right > frame.right + 0.5 || box(each).top < frame.top - 0.5
        || box(each).bottom > frame.bottom + 0.5) found.push(`outside of its chart: ${name(each)}`);
    if (texts.some((other) => other !== each && meet(box(each), box(other)))) found.push(`overlaps: ${name(each)}`);
    const size = parseFloat(view.getComputedStyle(each).fontSize) * frame.width / svg.viewBox.baseVal.width;
    if (size < 10) found.push(`text of ${size.toFixed(1)} pixels: ${name(each)}`);
  }
}
const walker = page.createTreeWalker(page.body, view.NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const each = node.parentElement, style = view.getComputedStyle(each);
  if (!node.data.trim() || !visible(each) || each.closest("title,style")) continue;
  const ink = each.closest("svg") ? style.fill : style.color, ratio = contrast(ink, behind(each));
  if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(1)}: ${name(each)}`);
}
for (const each of page.querySelectorAll("svg.chart path,svg.chart circle")) {
  const stroke = view.getComputedStyle(each).stroke;
  if (each.querySelector("title") && contrast(stroke, behind(each)) < 3) found.push(`a faint line: ${name(each)}`);
}
for (const each of page.querySelectorAll(".track i")) {
  const style = view.getComputedStyle(each);
  const stripes = style.backgroundImage.match(/rgba?\\([^)]*\\)/);
  const ratio = contrast(stripes ? stripes[0] : style.backgroundColor, behind(each.parentElement));
  if (ratio < 3) found.push(`a faint bar: ${name(each.closest(".bar"))}`);
}
const words = page.querySelector("main")?.innerText.length ?? 0;
const result = document.createElement("script");
result.type = "application/json";
result.id = "audit";
result.textContent = JSON.stringify({found: [...new Set(found)], words, background: behind(page.body)});
document.body.append(result);
"""


class Audit(NamedTuple):
    """What is wrong with a page, in sentences; and how much text there was, on what colour."""

    found: list[str]
    words: int
    background: str


class Browser:
    """Chromium, told how wide a page is and whether its reader likes it dark."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._folder = folder

    def dom(self, page: Path) -> str:
        return self._run(False, "--dump-dom", page.as_uri())

    def audit(self, page: Path, width: int, dark: bool) -> Audit:
        """Look for what is cut off, overlaps, or is too faint or too small to be read."""
        frame = self._framed(page, width, 4000, f"<script>addEventListener('load',()=>{{{_AUDIT}}})</script>")
        shown = self._run(dark, "--dump-dom", f"--window-size={width + 40},1000", frame.as_uri())
        found = re.search(r'<script type="application/json" id="audit">(.*?)</script>', shown, re.DOTALL)
        assert found, shown[-2000:]
        return Audit(**json.loads(found[1]))

    def picture(self, page: Path, width: int, dark: bool, target: Path) -> bytes:
        height = 1800
        frame = self._framed(page, width, height)
        size = f"--window-size={max(width, 500)},{height}"
        self._run(dark, "--hide-scrollbars", size, f"--screenshot={target}", frame.as_uri())
        return target.read_bytes()

    def _framed(self, page: Path, width: int, height: int, script: str = "") -> Path:
        """A page with the other in a frame, because a window cannot be as narrow as a telephone."""
        outer = self._folder / "outer.html"
        inner = html.escape(page.read_text(encoding="utf-8"))
        style = f"border:0;width:{width}px;height:{height}px"
        body = f'<body style="margin:0">{script}<iframe style="{style}" srcdoc="{inner}"></iframe></body>'
        outer.write_text(f'<!doctype html><meta charset="utf-8">{body}', encoding="utf-8")
        return outer

    def _run(self, dark: bool, *arguments: str) -> str:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += [
            f"--user-data-dir={self._folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        ]
        command = [str(self._program), *flags, *arguments]
        return subprocess.run(command, capture_output=True, timeout=LIMIT, check=True).stdout.decode()


def check_readable(browser: Browser, page: Path, width: int, dark: bool, target: Path) -> None:
    """Assert that nothing of a page is cut off, overlaps, or is too faint or small, and that the picture shows it."""
    audit = browser.audit(page, width, dark)
    assert audit.found == []
    assert audit.words > 500
    red, green, blue = map(int, re.findall(r"\d+", audit.background)[:3])
    assert (red + green + blue < 150) if dark else (red + green + blue > 700)
    picture = browser.picture(page, width, dark, target)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000  # of an empty page it has a few thousand bytes
