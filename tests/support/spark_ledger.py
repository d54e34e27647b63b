"""What was published against what was delivered: lost, duplicated, unexpected; and whether replays were the same."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse


@dataclass(frozen=True)
class Account:
    """The outcome, in bodies. ``lost`` and ``unexpected`` are empty, and ``duplicated`` if that was promised."""

    published: int
    delivered: int
    lost: frozenset[bytes]
    duplicated: dict[bytes, int]
    unexpected: frozenset[bytes]

    @property
    def extra(self) -> int:
        """How many deliveries were one too many."""
        return sum(self.duplicated.values()) - len(self.duplicated)

    def __str__(self) -> str:
        return (
            f"{self.published} published, {self.delivered} delivered, {len(self.lost)} lost {_some(self.lost)},"
            f" {self.extra} duplicates {_some(self.duplicated)}, {len(self.unexpected)} unexpected"
        )

    def check(self, *, duplicates: int = 0) -> None:
        """Raise AssertionError unless nothing was lost or unexpected, with at most so many duplicates."""
        assert not self.lost, str(self)
        assert not self.unexpected, str(self)
        assert self.extra <= duplicates, str(self)


def _some(bodies: Iterable[bytes]) -> list[bytes]:
    return sorted(bodies)[:5]


def account(published: Iterable[bytes], delivered: Iterable[bytes], uncertain: Iterable[bytes] = ()) -> Account:
    """Compare. ``uncertain`` bodies were published with an unknown outcome: they may have come, once."""
    expected, possible = set(published), set(uncertain)
    seen = Counter(delivered)
    return Account(
        published=len(expected),
        delivered=seen.total(),
        lost=frozenset(expected - seen.keys()),
        duplicated={body: count for body, count in seen.items() if count > 1},
        unexpected=frozenset(seen.keys() - expected - possible),
    )


class Delivered:
    """What a ``Collector`` kept in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def column(self, name: str) -> list[Any]:
        """The values of a column, batch after batch."""
        values = []
        for path in sorted(self._folder.glob("batch-*.arrow"), key=_number):
            values += _read(path)[name].to_pylist()
        return values

    def bodies(self) -> list[bytes]:
        return self.column("body")

    def runs(self) -> list[dict[str, Any]]:
        """Every time that a batch was run: batch, rows, hash of the content, pid."""
        try:
            lines = (self._folder / "runs.jsonl").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def replays(self) -> dict[int, list[str]]:
        """The batches that were run more than once: the hash of each run."""
        hashes = defaultdict(list)
        for run in self.runs():
            hashes[run["batch"]].append(run["hash"])
        return {batch: found for batch, found in hashes.items() if len(found) > 1}

    def check_replays(self) -> None:
        """Raise AssertionError unless each replay had the same content."""
        different = {batch: found for batch, found in self.replays().items() if len(set(found)) > 1}
        assert not different, different


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _read(path: Path) -> Any:
    import pyarrow as pa

    with pa.OSFile(str(path), "rb") as file:
        return pa.ipc.open_file(file).read_all()


def read_sink(folder: Path) -> Any:
    """The table in a folder that Spark's parquet sink wrote: only the files that its own log of batches names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [pq.read_table(path) for path in _committed(folder)]
    return pa.concat_tables(tables) if tables else None


def _committed(folder: Path) -> list[str]:
    logs = [path for path in (folder / "_spark_metadata").glob("[0-9]*") if path.suffix in ("", ".compact")]
    compacts = [int(path.stem) for path in logs if path.suffix]
    start = max(compacts, default=-1)
    used = [path for path in logs if int(path.stem) > start or (path.suffix and int(path.stem) == start)]
    lines = [line for path in used for line in path.read_text().splitlines()[1:]]
    return sorted({unquote(urlparse(json.loads(line)["path"]).path) for line in lines})
