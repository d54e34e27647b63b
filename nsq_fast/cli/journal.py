"""`nsq-fast journal`: what a journal of Spark holds that was acknowledged and not committed, and what to do with it."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.box import SIMPLE_HEAD

from nsq_fast.printable import counted

from . import console, options

if TYPE_CHECKING:
    from nsq_fast.spark.journal.files import Storage
    from nsq_fast.spark.journal.query import Orphan

Command = Callable[..., Any]


@click.group("journal", short_help="What a journal of Spark holds that no query has committed.")
def command() -> None:
    """Look into the journal of queries of Spark: what the option ``journal`` of the source names.

    Each query (each checkpoint) has a folder of its own there. What it holds was acknowledged, so no server has it any
    more, and not committed: it is of the last batch of a query that runs, or of one that has ended.
    """


def _place(function: Command) -> Command:
    """The argument and options that say where the journal is."""
    for wrap in (
        click.option("--region", default=None, help="Of the object store: journalRegion."),
        click.option("--endpoint", default=None, metavar="URL", help="Of the object store: journalEndpoint."),
        click.argument("journal"),
    ):
        function = wrap(function)
    return function


@command.command("ls")
@_place
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each folder.")
def ls(journal: str, endpoint: str | None, region: str | None, as_json: bool) -> None:
    """List the folders of JOURNAL, with the rows of each that are not committed, and their age."""
    found = [(each, each.journal.committed()) for each in _folders(_open(journal, endpoint, region))]
    if as_json:
        for each, done in found:
            click.echo(
                json.dumps(
                    {
                        **_shown(each),
                        "committed": done,
                        "batch": each.last,
                        "rows": each.rows,
                        "age": each.age and round(each.age, 1),
                    }
                )
            )
        return
    rows = [
        [*map(str, (*_shown(each).values(), done, each.last)), f"{each.rows:,}", f"{each.age or 0:,.0f} s"]
        for each, done in found
    ]
    head = ("folder", "topic", "channel", "committed", "batch", "rows", "age")
    output = console.output()
    output.print(console.grid(head, rows, output.width, names=3, box=SIMPLE_HEAD))
    if not rows:
        console.progress(f"{journal} has no folder of a stream; a batch reads its own again, by the same journal")


@command.command("read")
@_place
@click.argument("folder")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each row instead of its body.")
def read(journal: str, folder: str, endpoint: str | None, region: str | None, as_json: bool) -> None:
    """Print the rows of FOLDER in JOURNAL that are not committed, one a line. Nothing is changed.

    With --json a body that is no text is given as "body_base64"; "timestamp" is in nanoseconds.
    """
    orphan = _find(_open(journal, endpoint, region), folder)
    for body, known in _rows(orphan):
        click.echo(json.dumps({**known, **_body(body)}) if as_json else body)


@command.command("adopt")
@_place
@click.argument("folder")
@click.option("--by", default=None, metavar="FOLDER", help="The folder of the query that is to read them.")
@click.option(
    "--checkpoint", default=None, type=options.FOLDER, metavar="DIR", help="The same, by its checkpointLocation."
)
def adopt(
    journal: str, folder: str, by: str | None, checkpoint: Path | None, endpoint: str | None, region: str | None
) -> None:
    """Have another query read what FOLDER in JOURNAL holds and has not committed.

    The other query reads it as its next batch when it is started again. Do this only when the query of FOLDER has
    ended for good: nothing tells one that runs from one that is dead.
    """
    parent = _open(journal, endpoint, region)
    orphan = _find(parent, folder)
    if (by is None) == (checkpoint is None):
        raise click.UsageError("--by or --checkpoint: one of them has to name the query that is to read them")
    heir = _find(parent, _in_checkpoint(checkpoint) if by is None else by)
    if heir.id == orphan.id:
        raise click.UsageError(f"{folder}: is that query's own: start it again from its checkpoint")
    if not orphan.rows:
        _fail(f"{orphan.journal.path}: has no rows that are not committed")
    if heir.about.channel != orphan.about.channel:
        _fail(f"{folder} is of channel {orphan.about.channel}, and {heir.id} of channel {heir.about.channel}")
    heir.journal.ask_to_adopt(orphan.id)
    click.echo(f"the query of {heir.id} reads {counted(orphan.rows, 'row')} of {orphan.id} when it is started again")


def _open(journal: str, endpoint: str | None, region: str | None) -> Storage:
    try:
        from nsq_fast.spark.journal.files import check_path, open_storage
        from nsq_fast.spark.options import ObjectStore
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    path = check_path(journal if "://" in journal else str(Path(journal).absolute()))
    if path.startswith("/") and not Path(path).is_dir():
        _fail(f"there is no folder {path}")
    return open_storage(path, ObjectStore(endpoint, region))


def _folders(parent: Storage) -> list[Orphan]:
    from nsq_fast.spark.journal.query import folders, uncommitted

    return [uncommitted(parent, id, about) for id, about in folders(parent)]


def _find(parent: Storage, folder: str) -> Orphan:
    for each in _folders(parent):
        if each.id == folder:
            return each
    _fail(f"{parent.path} has no folder {folder} of a query; nsq-fast journal ls shows those that it has")


def _fail(text: str) -> NoReturn:
    raise click.ClickException(text)


def _in_checkpoint(checkpoint: Path | None) -> str:
    from nsq_fast.spark.lag import read_checkpoint

    assert checkpoint is not None
    found = [str(each.planned["j"]) for each in read_checkpoint(checkpoint) if "j" in each.planned]
    if len(found) != 1:
        raise click.UsageError(f"--checkpoint: it has {len(found)} sources with a journal; name the folder with --by")
    return found[0]


def _shown(each: Orphan) -> dict[str, Any]:
    return {"folder": each.id, "topic": each.about.topic, "channel": each.about.channel}


def _rows(orphan: Orphan) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The body of each row, and what else is known of it."""
    from nsq_fast._codec import MESSAGE_ID_SIZE as SIZE
    from nsq_fast.spark.journal.query import parse_adopted

    for name in orphan.slots:
        slot = parse_adopted(name)
        assert slot is not None
        for stored in orphan.journal.chain(slot.batch, slot.slot).read():
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


def _body(body: bytes) -> dict[str, str]:
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}
