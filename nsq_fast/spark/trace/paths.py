"""Which files the paths of trace logs name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from glob import glob
from pathlib import Path

from nsq_fast.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_url(path: str) -> bool:
    """Whether a path is no file of this machine."""
    return _URL.match(path) is not None


def expand(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files that paths on this machine name, each once; URLs as they are. Raises ConfigError for one with none."""
    found: dict[str, None] = {}
    for path in paths:
        name = os.fspath(path)
        found.update(dict.fromkeys([name] if is_url(name) else _files(name)))
    if not found:
        raise ConfigError("no trace log: give at least one path")
    return list(found)


def _files(name: str) -> list[str]:
    matches = [Path(name)] if Path(name).exists() else [Path(match) for match in sorted(glob(name, recursive=True))]
    files = [file for match in matches for file in ([match] if match.is_file() else sorted(match.rglob("*")))]
    if hidden := [file for file in files if file.is_file() and file.name.startswith(("_", ".")) and file in matches]:
        raise ConfigError(f"{hidden[0]}: Spark does not read files whose name begins with _ or a dot; rename it")
    found = [str(file.resolve()) for file in files if file.is_file() and not file.name.startswith(("_", "."))]
    if not found:
        raise ConfigError(f"no trace log: {name} names no file")
    return found
