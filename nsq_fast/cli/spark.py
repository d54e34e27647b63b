"""Commands about queries of Spark: `nsq-fast journal`, what a journal holds that was acknowledged and not committed,
and what to do with it; `nsq-fast lag`, how far a query is behind, by its checkpoint and what the servers say."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD

from nsq_fast.errors import NsqError, counted
from nsq_fast.exporter import CHANNEL, CHANNEL_LABELS

from . import console, options
from .options import argument, flag, option, say, several, text_or_base64

if TYPE_CHECKING:
    from nsq_fast.spark.journal.files import Storage
    from nsq_fast.spark.journal.query import Orphan
    from nsq_fast.spark.lag import Lag


@click.group("journal", short_help="What a journal of Spark holds that no query has committed.")
def journal() -> None:
    """Look into the journal of queries of Spark: what the option ``journal`` of the source names.

    Each query (each checkpoint) has a folder of its own there. What it holds was acknowledged, so no server has it any
    more, and not committed: it is of the last batch of a query that runs, or of one that has ended.
    """


def _open(journal: str, endpoint: str | None, region: str | None) -> Storage:
    try:
        from nsq_fast.spark.journal.files import check_path, open_storage
        from nsq_fast.spark.options import ObjectStore
    except ImportError as error:
        raise NsqError(str(error)) from error
    path = check_path(journal if "://" in journal else str(Path(journal).absolute()))
    if path.startswith("/") and not Path(path).is_dir():
        raise NsqError(f"there is no folder {path}")
    return open_storage(path, ObjectStore(endpoint, region))


_JOURNAL: Any = options.together(
    _open,
    journal=argument(),
    endpoint=option(metavar="URL", help="Of the object store: journalEndpoint."),
    region=option(help="Of the object store: journalRegion."),
)
_FOLDER: Any = argument()


@options.command("ls", group=journal)
def ls(
    parent: Storage = _JOURNAL, as_json: bool = flag("--json", help="Print one line of JSON for each folder.")
) -> None:
    """List the folders of JOURNAL, with the rows of each that are not committed, and their age."""
    rows = []
    for each in _folders(parent):
        names = {"folder": each.id, "topic": each.about.topic, "channel": each.about.channel}
        state = {"committed": each.journal.committed(), "batch": each.last}
        if as_json:
            age = each.age and round(each.age, 1)
            click.echo(json.dumps({**names, **state, "rows": each.rows, "age": age}))
        rows.append([*map(str, (*names.values(), *state.values())), f"{each.rows:,}", f"{each.age or 0:,.0f} s"])
    if not rows:
        say(f"{parent.path} has no folder of a stream; a batch reads its own again, by the same journal")
    elif not as_json:
        head = ("folder", "topic", "channel", "committed", "batch", "rows", "age")
        console.show(head, rows, names=3, box=SIMPLE_HEAD)


@options.command("read", group=journal)
def read(
    parent: Storage = _JOURNAL,
    folder: str = _FOLDER,
    as_json: bool = flag("--json", help="Print a line of JSON for each row instead of its body."),
) -> None:
    """Print the rows of FOLDER in JOURNAL that are not committed, one a line. Nothing is changed.

    With --json a body that is no text is given as "body_base64"; "timestamp" is in nanoseconds.
    """
    for body, known in _rows(_find(parent, folder)):
        click.echo(json.dumps({**known, **text_or_base64("body", body)}) if as_json else body)


@options.command("adopt", group=journal)
def adopt(
    parent: Storage = _JOURNAL,
    folder: str = _FOLDER,
    by: str | None = option(metavar="FOLDER", help="The folder of the query that is to read them."),
    checkpoint: Path | None = option(type=options.FOLDER, metavar="DIR", help="The same, by its checkpointLocation."),
) -> None:
    """Have another query read what FOLDER in JOURNAL holds and has not committed.

    The other query reads it as its next batch when it is started again. Do this only when the query of FOLDER has
    ended for good: nothing tells one that runs from one that is dead.
    """
    orphan = _find(parent, folder)
    if (by is None) == (checkpoint is None):
        raise click.UsageError("--by or --checkpoint: one of them has to name the query that is to read them")
    heir = _find(parent, by or _in_checkpoint(checkpoint))
    if heir.id == orphan.id:
        raise click.UsageError(f"{folder}: is that query's own: start it again from its checkpoint")
    if not orphan.rows:
        raise NsqError(f"{orphan.journal.path}: has no rows that are not committed")
    if heir.about.channel != orphan.about.channel:
        raise NsqError(f"{folder} is of channel {orphan.about.channel}, and {heir.id} of channel {heir.about.channel}")
    heir.journal.ask_to_adopt(orphan.id)
    click.echo(f"the query of {heir.id} reads {counted(orphan.rows, 'row')} of {orphan.id} when it is started again")


def _folders(parent: Storage) -> list[Orphan]:
    from nsq_fast.spark.journal.query import folders, uncommitted

    return [uncommitted(parent, id, about) for id, about in folders(parent)]


def _find(parent: Storage, folder: str) -> Orphan:
    for each in _folders(parent):
        if each.id == folder:
            return each
    raise NsqError(f"{parent.path} has no folder {folder} of a query; nsq-fast journal ls shows those that it has")


def _in_checkpoint(checkpoint: Path | None) -> str:
    from nsq_fast.spark.lag import read_checkpoint

    assert checkpoint is not None
    found = [str(each.planned["j"]) for each in read_checkpoint(checkpoint) if "j" in each.planned]
    if len(found) != 1:
        raise click.UsageError(f"--checkpoint: it has {len(found)} sources with a journal; name the folder with --by")
    return found[0]


def _rows(orphan: Orphan) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The body of each row, and what else is known of it."""
    from nsq_fast._codec import MESSAGE_ID_SIZE as SIZE
    from nsq_fast.spark.journal.query import parse_adopted

    for name in orphan.slots:
        slot = parse_adopted(name)
        assert slot is not None
        for stored in orphan.journal.segment_log(slot.batch, slot.slot).read():
            if stored.head.is_seal:
                continue
            columns = stored.columns()
            ends, times = array("i", bytes(columns.body_offsets)), array("q", bytes(columns.timestamps))
            attempts = array("H", bytes(columns.attempts))
            for row in range(columns.count):
                known = {
                    "topic": slot.topic,
                    "nsqd": stored.head.nsqd,
                    "partition": stored.head.partition,
                    "message_id": bytes(columns.ids[SIZE * row : SIZE * row + SIZE]).hex(),
                    "timestamp": times[row],
                    "attempts": attempts[row],
                }
                yield bytes(columns.body[ends[row] : ends[row + 1]]), known


# Lag

PREFIX = "nsq_fast_channel"
FIGURES = {
    **{name: CHANNEL[name] for name in ("depth", "in_flight", "deferred")},
    "planned": "Messages of a batch of Spark that is planned and not committed.",
    "behind_bytes": "Bytes of the log behind what Spark has committed.",
}


@options.command("lag", "How far a query of Spark is behind, by its checkpoint.")
def lag(
    checkpoint: Path = option(
        type=options.FOLDER, required=True, metavar="DIR", help="The query's checkpointLocation."
    ),
    given: Sequence[tuple[str, str]] = several(
        "--option", type=options.pair, help="An option of the source, as the query has it. Any number of times."
    ),
    as_json: bool = flag("--json", help="Print one line of JSON for each place."),
    as_metrics: bool = flag("--metrics", help="Print metrics for Prometheus, named as the exporter does."),
) -> None:
    """Show what waits for a query of Spark, of either reader. The query need not run.

    The checkpoint of the replayable reader says which topics, channel and nsqlookupds it reads. For the journalled
    reader give topic, channel and lookupd_http_addresses by --option.
    """
    if as_json and as_metrics:
        raise click.UsageError("--json and --metrics: only one of them may be given")
    try:
        from nsq_fast.spark import lags
    except ImportError as error:
        raise NsqError(str(error)) from error
    found = lags(checkpoint, dict(given))
    if as_metrics:
        for line in _metrics(found):
            click.echo(line)
    elif as_json:
        for each in found:
            click.echo(json.dumps(each._asdict()))
    else:
        rows = [[_text(getattr(each, name)) for name in (*CHANNEL_LABELS, *FIGURES)] for each in found]
        head = [name.replace("_", " ") for name in (*CHANNEL_LABELS, *FIGURES)]
        console.show(head, rows, names=len(CHANNEL_LABELS), box=SIMPLE_HEAD)


def _metrics(found: Sequence[Lag]) -> Iterator[str]:
    """Names of NSQ have no quotes and no backslashes."""
    for name, help in FIGURES.items():
        shown = [each for each in found if getattr(each, name) is not None]
        if shown:
            yield f"# HELP {PREFIX}_{name} {help}"
            yield f"# TYPE {PREFIX}_{name} gauge"
        for each in shown:
            labels = ",".join(f'{label}="{_label(getattr(each, label))}"' for label in CHANNEL_LABELS)
            yield f"{PREFIX}_{name}{{{labels}}} {getattr(each, name)}"


def _label(value: object) -> str:
    return "" if value is None else str(value)


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else _label(value)
