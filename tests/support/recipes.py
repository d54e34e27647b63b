"""The programs of the cookbook."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs"


def files_of(page: str) -> dict[str, str]:
    """The blocks of a page that begin with the name of a file, by that name; of two with one name, the later."""
    text = (PAGES / f"{page}.md").read_text()
    found = re.findall(r"^```\w+\n# (\w+\.\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return dict(found)
