"""Instructions per message, where valgrind can count them.

They are those of the program, without the system's. Other programs on the machine do not change them, so two clients
can be told apart where CPU time varies by more than they differ. The program takes some thirty times as long, so a
server is always ahead of a consumer, which finds as much as it can read.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from .counting import Counter

INSTRUCTIONS = "instructions"
NEEDED = "instructions are counted by valgrind, which is not installed"


def counter() -> Counter | None:
    """What counts them here; None where nothing can."""
    if not shutil.which("valgrind"):
        return None
    return Counter(what=INSTRUCTIONS, wrapper=_valgrind, read=read_report, share=0.1, is_slow=True)


def _valgrind(report: Path) -> list[str]:
    # What it finds of the caches is not wanted, and takes as long again.
    return ["valgrind", "-q", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={report}"]


def read_report(text: str) -> int | None:
    """The number of instructions in what cachegrind wrote."""
    found = re.search(r"^summary:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None
