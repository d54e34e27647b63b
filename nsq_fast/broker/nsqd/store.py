"""What of an nsqd survives its process: the names of topics and channels, and how far each channel has come.

In the data path::

    nsqd.dat                        topics and channels, with what is paused: the original's file
    topics/t.<topic>/*.log          the topic's messages (log.py)
    topics/t.<topic>/checkpoint     where each channel goes on, and what it had not finished before that place

A checkpoint is written every ``sync_timeout`` seconds while something happens,
when channels come and go, and at the end. Messages finished after the last
checkpoint come again after a SIGKILL; none is lost, because a checkpoint never
names as finished what was not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from nsq_fast.broker.diskqueue.log import SegmentLog
from nsq_fast.broker.errors import DataPathError
from nsq_fast.broker.message import Message
from nsq_fast.names import is_ephemeral

from .channel import Channel
from .topic import Topic

_METADATA = "nsqd.dat"
_CHECKPOINT = "checkpoint"


class ChannelMetadata(msgspec.Struct):
    """A channel in nsqd.dat."""

    name: str
    paused: bool = False


class TopicMetadata(msgspec.Struct):
    """A topic in nsqd.dat."""

    name: str
    paused: bool = False
    channels: list[ChannelMetadata] | None = None


class Metadata(msgspec.Struct):
    """The content of nsqd.dat."""

    topics: list[TopicMetadata] | None = None
    version: str = ""


class ChannelCheckpoint(msgspec.Struct, array_like=True):
    """Where a channel was.

    ``next``: first record not yet read. ``fresh``: ranges of unfinished records before it that were
    never delivered. ``tried``: the other unfinished ones, as (record, attempts, due).
    """

    next: int
    fresh: list[tuple[int, int]]
    tried: list[tuple[int, int, float]]

    def first(self) -> int:
        """The first record that is still needed."""
        return min([self.next, *(start for start, _ in self.fresh[:1]), *(record for record, _, _ in self.tried)])


class Checkpoint(msgspec.Struct):
    """Where a topic was: the number of the next record, the first one held back, and its channels."""

    end: int
    held_at: int | None
    channels: dict[str, ChannelCheckpoint]

    def first(self) -> int:
        """The first record that is still needed."""
        held = [] if self.held_at is None else [self.held_at]
        return min([self.end, *held, *(channel.first() for channel in self.channels.values())])


class Store:
    """The data path of an nsqd, locked against others; without one nothing is kept and nothing found."""

    def __init__(self, data_path: str | None) -> None:
        self._path = None if data_path is None else Path(data_path)
        self._lock = None if self._path is None else _lock(self._path)

    @property
    def is_durable(self) -> bool:
        """Whether anything survives."""
        return self._path is not None

    def log(self, topic: str, segment_size: int) -> SegmentLog:
        """Open the log of a topic."""
        if self._path is None or is_ephemeral(topic):
            return SegmentLog(None, segment_size)
        # The prefix keeps a topic called ".." where it belongs.
        return SegmentLog(self._path / "topics" / f"t.{topic}", segment_size)

    def load_metadata(self) -> Metadata:
        """Read nsqd.dat; raises DataPathError when it is broken."""
        if self._path is None:
            return Metadata()
        path = self._path / _METADATA
        try:
            return msgspec.json.decode(path.read_bytes(), type=Metadata)
        except FileNotFoundError:
            return Metadata()
        except msgspec.MsgspecError as error:
            raise DataPathError(f"failed to parse metadata in {path}: {error}") from error

    def save_metadata(self, metadata: Metadata) -> None:
        """Write nsqd.dat."""
        if self._path is not None:
            _replace(self._path / _METADATA, msgspec.json.encode(metadata), sync=True)

    def load_checkpoint(self, log: SegmentLog) -> Checkpoint | None:
        """Read a topic's checkpoint; None if it has none, or a broken one: then all of its log is unfinished."""
        if log.folder is None:
            return None
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            return msgspec.json.decode((log.folder / _CHECKPOINT).read_bytes(), type=Checkpoint)
        return None

    def save_checkpoint(self, topic: Topic) -> None:
        """Write a topic's checkpoint, and remove the segments that nobody needs any more."""
        folder = topic.log.folder
        if folder is None or not topic.is_durable:
            topic.log.remove_before(topic.oldest_needed())
            return
        checkpoint = take_checkpoint(topic)
        folder.mkdir(parents=True, exist_ok=True)
        # Not synced: one that a power loss breaks only makes messages come again.
        _replace(folder / _CHECKPOINT, msgspec.json.encode(checkpoint), sync=False)
        topic.log.remove_before(checkpoint.first())

    def close(self) -> None:
        """Give the folder up."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take_checkpoint(topic: Topic) -> Checkpoint:
    """Where a topic is now. Ephemeral channels leave no trace."""
    held_at = topic.log.held_at
    return Checkpoint(
        end=topic.log.end.sequence,
        held_at=None if held_at is None else held_at.sequence,
        channels={
            channel.name: _channel_checkpoint(channel, topic.log.readable_end)
            for channel in topic.channels.values()
            if not channel.is_ephemeral
        },
    )


def _channel_checkpoint(channel: Channel, end: int) -> ChannelCheckpoint:
    cursor = channel.backlog.cursor
    fresh: list[int] = []
    tried: list[tuple[int, int, float]] = []
    for message in channel.unfinished():
        if message.attempts or message.due:
            tried.append((message.sequence, message.attempts, message.due))
        else:
            fresh.append(message.sequence)
    return ChannelCheckpoint(end if cursor is None else cursor.sequence, _ranges(sorted(fresh)), tried)


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as ranges of (first, one after the last)."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


def restore(topic: Topic, checkpoint: Checkpoint | None) -> None:
    """Bring a topic back to where it was. Its channels have been created, and it has not been started.

    A channel that the checkpoint does not know gets everything that the log has.
    """
    log = topic.log
    if checkpoint is None:
        checkpoint = Checkpoint(log.end.sequence, log.first, {})
    if log.last_id:
        topic.ids.skip(log.last_id)
    log.start_at(checkpoint.end)
    held_at = log.end if checkpoint.held_at is None else log.seek(checkpoint.held_at)
    log.held_at = None
    for channel in topic.channels.values():
        known = checkpoint.channels.get(channel.name)
        if known is not None:
            channel.restore(_unfinished(log, known), log.seek(known.next), log.end)
        elif not channel.is_ephemeral:
            channel.restore([], log.seek(log.first), log.end)
    log.held_at = held_at


def _unfinished(log: SegmentLog, checkpoint: ChannelCheckpoint) -> list[Message]:
    """Read the messages that a channel had not finished, in their order."""
    tried = {sequence: (attempts, due) for sequence, attempts, due in checkpoint.tried}
    wanted = {*tried, *(number for first, end in checkpoint.fresh for number in range(first, end))}
    messages: list[Message] = []
    position = log.seek(min(wanted, default=checkpoint.next))
    while position.sequence < checkpoint.next and len(messages) < len(wanted):
        read, position = log.read(position, checkpoint.next - position.sequence)
        messages += [message for message in read if message.sequence in wanted]
    for message in messages:
        message.attempts, message.due = tried.get(message.sequence, (0, message.due))
    return messages


def _replace(path: Path, data: bytes, *, sync: bool) -> None:
    """Write a file so that it is the old one or the new one, whatever happens."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, data)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)


def _lock(path: Path) -> int:
    if not path.is_dir():
        raise DataPathError(f"data_path {str(path)!r} is not a folder")
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise DataPathError(f"data_path {str(path)!r} is in use by another nsqd") from error
    return fd
