"""The version of what is built here: the tag's, or one between two tags. `python version.py` prints it.

At a tag v1.2.3 it is 1.2.3. Elsewhere the newest heading of CHANGELOG.md says which version comes next, and the commit
says how far that is: 1.2.3.dev45+g0123abc. A heading with a date is a release that has been: what follows it is
1.2.3.post45+g0123abc. Without a repository (an archive of the sources) it is 1.2.3 or 1.2.3.dev0. An sdist has its own
written down.

The package has it from `nsq_fast/_built.py`, which every build writes.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import NamedTuple

ROOT = os.path.dirname(os.path.abspath(__file__))
BUILT = os.path.join(ROOT, "nsq_fast", "_built.py")
TAGS = "v[0-9]*"


class Heading(NamedTuple):
    """The newest version in CHANGELOG.md, and whether it has been released."""

    version: str
    is_released: bool


class Commit(NamedTuple):
    """The tag below what is checked out (None without one), the commits since, the commit, whether files differ."""

    tag: str | None
    distance: int
    name: str
    is_dirty: bool


def find_version(root: str = ROOT) -> str:
    """Raises SystemExit where tag and CHANGELOG.md contradict each other, and where there is neither."""
    recorded = _of_sdist(root)
    if recorded is not None:
        return recorded
    return version_of(_commit(root), _heading(root))


def version_of(commit: Commit | None, heading: Heading) -> str:
    if commit is None:
        return heading.version if heading.is_released else f"{heading.version}.dev0"
    if commit.tag is not None and commit.distance == 0 and not commit.is_dirty:
        if commit.tag != f"v{heading.version}" or not heading.is_released:
            date = "with" if heading.is_released else "without"
            raise SystemExit(
                f"version.py: the tag is {commit.tag}, and the newest heading of CHANGELOG.md is {heading.version}"
                f" {date} a date: tag the commit whose heading is '## {commit.tag[1:]} (date)'"
            )
        return heading.version
    kind = "post" if heading.is_released else "dev"
    return f"{heading.version}.{kind}{commit.distance}+g{commit.name}{'.dirty' if commit.is_dirty else ''}"


def _of_sdist(root: str) -> str | None:
    text = _read(os.path.join(root, "PKG-INFO"))
    found = re.search(r"^Version: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def _heading(root: str) -> Heading:
    found = re.search(r"^## (\d+(?:\.\d+)+) \((.*)\)$", _read(os.path.join(root, "CHANGELOG.md")), re.MULTILINE)
    if not found:
        raise SystemExit(f"version.py: CHANGELOG.md in {root} has no heading such as '## 1.2.3 (unreleased)'")
    return Heading(found[1], found[2] != "unreleased")


def _commit(root: str) -> Commit | None:
    # A repository around this folder says nothing of it.
    if not os.path.exists(os.path.join(root, ".git")):
        return None
    described = _git(root, "describe", "--tags", "--long", "--always", "--dirty", "--match", TAGS)
    found = re.fullmatch(r"(?:(v.+)-(\d+)-g)?([0-9a-f]+)(-dirty)?", described)
    if not found:
        return None
    distance = found[2] or _git(root, "rev-list", "--count", "HEAD")
    return Commit(found[1], int(distance), found[3], found[4] is not None)


def _git(root: str, *arguments: str) -> str:
    command = ["git", "-C", root, *arguments]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def write_version(version: str, path: str = BUILT) -> None:
    """Write the module that the package has it from, unless it says the same already."""
    text = f'"""Written by each build (version.py): do not edit, do not commit."""\n\nVERSION = "{version}"\n'
    if _read(path) != text:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    print(find_version())
