"""What of an nsqd survives its process: topics, channels, and how far each channel has come.

In the data path::

    nsqd.dat                        topics and channels, with what is paused: the original's file
    topics/t.<topic>/*.log          the topic's messages (journal.py)
    topics/t.<topic>/kept           messages that are not finished while all around them are
    topics/t.<topic>/checkpoint     where each channel goes on, and what it had not finished before that place
    *.bad                           what was damaged, as it was found

A checkpoint is written every ``sync_timeout`` seconds while something happens, when channels come and go, and at the
end. Messages finished after the last checkpoint come again after a SIGKILL; none is lost, because a checkpoint never
names as finished what was not.

Nothing that is damaged keeps an nsqd from starting. A topic that nsqd.dat does not name is found by its folder, its
channels by its checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import shutil
import struct
import zlib
from collections import deque
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import msgspec

from nsq_fast._lazy import get_logger
from nsq_fast.broker.channel import Channel, add_to_runs, joined
from nsq_fast.broker.journal import Journal, read_all, read_file, read_json, read_patiently, replace_file, write_json
from nsq_fast.broker.message import DataPathError, Message, id_of
from nsq_fast.broker.topic import Topic, oldest_needed
from nsq_fast.errors import counted
from nsq_fast.log_events import BROKER_DATA_DAMAGED, BROKER_METADATA_INVALID
from nsq_fast.names import is_ephemeral, is_valid_name

logger: logging.Logger = get_logger("nsq_fast.broker.store")

_KEPT = struct.Struct(">QI")
_LEAST_FREED = 256 * 1024
_SHARE_FREED = 4
"""Segments are let go for copies that are not more than a fourth of them: else a copy costs more than it frees."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class ChannelCheckpoint(msgspec.Struct, array_like=True):
    """Where a channel was.

    ``next``: first record not yet read, like all behind it. ``fresh``: ranges of unfinished records before it that were
    never delivered. ``tried``: the other unfinished ones, as (record, attempts, due).
    """

    next: int
    fresh: list[tuple[int, int]]
    tried: list[tuple[int, int, float]]

    def first(self, kept: Container[int] | None) -> int:
        """The first record that is still needed in the log, without those that are kept elsewhere; None: all tried."""
        needed = [self.next, *(start for start, _ in self.fresh[:1])]
        if kept is not None:
            needed += [record for record, _, _ in self.tried if record not in kept]
        return min(needed)


class Checkpoint(msgspec.Struct):
    """Where a topic was: the number of the next record, the first one held back, and its channels."""

    end: int
    held_at: int | None
    channels: dict[str, ChannelCheckpoint]

    def first(self, kept: Container[int] | None) -> int:
        """The first record that is still needed in the log, as ``ChannelCheckpoint.first``."""
        held_at = self.end if self.held_at is None else self.held_at
        return min([self.end, held_at, *(channel.first(kept) for channel in self.channels.values())])


def take_checkpoint(topic: Topic) -> Checkpoint:
    held_at = topic.log.held_at
    return Checkpoint(
        end=topic.log.end,
        held_at=None if held_at is None else held_at.sequence,
        channels={
            channel.name: _channel_checkpoint(channel, topic.log.readable_end)
            for channel in topic.channels.values()
            if not channel.is_ephemeral
        },
    )


def frames_to_keep(topic: Topic, checkpoint: Checkpoint) -> dict[int, bytes]:
    """What ``log.kept`` should be: itself, unless there is much to gain by another.

    A message that was delivered, or deferred, and is not finished keeps its segment and all behind it: one that is
    deferred by an hour kept 93 MB, where nsqd has less than 1 MB. Where such messages are few beside what they hold,
    copies of them let the segments go.
    """
    log, first_fresh = topic.log, checkpoint.first(None)
    freed = log.bytes_before(first_fresh) - log.bytes_before(checkpoint.first(log.kept))
    if freed < _LEAST_FREED and not log.kept:
        return log.kept
    frames = {
        message.sequence: message.frame
        for channel in topic.channels.values()
        if not channel.is_ephemeral
        for message in (*channel.in_memory(), *channel.messages_in_flight())
        if (message.attempts or message.due) and message.sequence < first_fresh
    }
    if freed >= _LEAST_FREED and freed >= _SHARE_FREED * sum(map(len, frames.values())):
        return frames
    still = {number: frame for number, frame in log.kept.items() if number in frames}
    return still if 2 * len(still) <= len(log.kept) else log.kept


def encode_kept(frames: Mapping[int, bytes]) -> bytes:
    data = b"".join(_KEPT.pack(number, len(frame)) + frame for number, frame in frames.items())
    return zlib.crc32(data).to_bytes(4, "big") + data


def decode_kept(content: bytes) -> dict[int, bytes]:
    """Read the content of that file; raises ValueError when it is damaged."""
    data = memoryview(content)[4:]
    if zlib.crc32(data).to_bytes(4, "big") != content[:4]:
        raise ValueError("its checksum is wrong")
    frames, at = {}, 0
    while at < len(data):
        number, size = _KEPT.unpack_from(data, at)
        at += _KEPT.size + size
        frames[number] = bytes(data[at - size : at])
    return frames


def _channel_checkpoint(channel: Channel, end: int) -> ChannelCheckpoint:
    unread = channel.backend.unread()
    # The loop stands still meanwhile: of a million that wait in memory, only what has come and gone is walked.
    runs = deque(channel.runs.of(channel.memory))
    for message in itertools.chain(channel.besides_memory(), channel.messages_in_flight()):
        add_to_runs(runs, message)
    fresh = [(first, stop) for first, stop, one in runs if one is None]
    tried = [(first, one.attempts, one.due) for first, _, one in runs if one is not None]
    next = unread.pop()[0] if unread and unread[-1][1] == end else end
    return ChannelCheckpoint(next, joined([*fresh, *unread]), tried)


def restore(topic: Topic, checkpoint: Checkpoint | None) -> None:
    """Bring a topic back to where it was. Its channels have been created, and it has not been started.

    A channel that the checkpoint does not know gets everything that the log has.
    """
    log = topic.log
    is_known = checkpoint is not None
    if checkpoint is None:
        checkpoint = Checkpoint(log.end, log.first, {})
    if log.last_id:
        topic.ids.skip(log.last_id)
    # Where the log made room for a checkpoint that was not written, a number of ``kept`` would be given once more.
    log.start_at(max(checkpoint.end, *(number + 1 for number in log.kept), 0))
    if (first := checkpoint.first(log.kept)) < min(log.first, checkpoint.end):
        missing = min(log.first, checkpoint.end) - first
        logger.error(
            "missing in the log of topic %s: the first %s not finished",
            topic.name,
            counted(missing, "message"),
            extra=BROKER_DATA_DAMAGED,
        )
    log.held_at = log.at(log.end if checkpoint.held_at is None else checkpoint.held_at)
    for channel in topic.channels.values():
        known = checkpoint.channels.get(channel.name)
        if known is not None:
            _restore_channel(channel, log, known)
        elif not channel.is_ephemeral:
            channel.restore(log.at(log.first), [], [] if is_known else _kept(log, log.kept))


def _restore_channel(channel: Channel, log: Journal, checkpoint: ChannelCheckpoint) -> None:
    starts = [*(first for first, _ in checkpoint.fresh), checkpoint.next]
    ends = [end for _, end in checkpoint.fresh]
    left_out = itertools.chain.from_iterable(map(range, ends, starts[1:]))
    channel.restore(log.at(starts[0]), left_out, _delivered(log, checkpoint))


def _delivered(log: Journal, checkpoint: ChannelCheckpoint) -> list[Message]:
    """The messages that had been delivered, or deferred, and not finished, in their order."""
    tried = {sequence: (attempts, due) for sequence, attempts, due in checkpoint.tried}
    messages = _kept(log, tried.keys() & log.kept.keys())
    wanted = tried.keys() - log.kept.keys()
    if wanted:
        everything = min(wanted), max(wanted) + 1
        messages += read_patiently(
            log.folder, lambda: [each for each in read_all(log, *everything) if each.sequence in wanted]
        )
    for message in messages:
        message.attempts, message.due = tried[message.sequence]
    return messages


def _kept(log: Journal, numbers: Iterable[int]) -> list[Message]:
    """The messages of records that are kept beside the log."""
    return [Message(id_of(log.kept[number]), log.kept[number], number) for number in sorted(numbers)]


# --- the data path ---------------------------------------------------------------------------------------------------

_METADATA = "nsqd.dat"
_CHECKPOINT = "checkpoint"
_KEPT_FILE = "kept"
_TOPICS = "topics"
_PREFIX = "t."
"""Keeps a topic called ".." where it belongs."""

_DELETED = "deleted."

_REAL = {"*.diskqueue.*.dat": "the original nsqd", "*/*.diskqueue.meta.writer.dat": "the redesigned nsqd"}
_OF_SEVERAL = {"nsqd0/nsqd.dat": "several embedded nsqds", "nsqd0/cluster.json": "an embedded cluster"}
NOT_OF_ONE: Mapping[str, str] = {**_REAL, **_OF_SEVERAL, "cluster.json": "a node of an embedded cluster"}
NOT_OF_SEVERAL: Mapping[str, str] = {_METADATA: "one embedded nsqd", "nsqd0/cluster.json": "an embedded cluster"}
NOT_OF_CLUSTER: Mapping[str, str] = {**_REAL, _METADATA: "an embedded nsqd", "nsqd0/nsqd.dat": "several embedded nsqds"}
"""Files whose messages would be ignored in the data path of one nsqd, of several, of a cluster; and whose they are."""


class ChannelMetadata(msgspec.Struct):
    name: str
    paused: bool = False


class TopicMetadata(msgspec.Struct):
    name: str
    paused: bool = False
    channels: list[ChannelMetadata] | None = None


class Metadata(msgspec.Struct):
    topics: list[TopicMetadata] | None = None
    version: str = ""


class Store:
    """The data path of an nsqd, locked against others; without one nothing is kept and nothing found.

    Raises DataPathError when it is no folder, is in use, has what ``others`` names, or nothing can be written there.
    """

    def __init__(self, data_path: str | None, others: Mapping[str, str] = NOT_OF_ONE) -> None:
        self._path = None if data_path is None else Path(data_path)
        if self._path is not None:
            refuse_others(self._path, others)
        self._lock = None if self._path is None else _lock(self._path)

    @property
    def is_durable(self) -> bool:
        return self._path is not None

    def log(self, topic: str, segment_size: int) -> Journal:
        if self._path is None or is_ephemeral(topic):
            return Journal(None, segment_size)
        return Journal(self._path / _TOPICS / f"{_PREFIX}{topic}", segment_size)

    def delete(self, log: Journal) -> None:
        """Remove the log of a topic, so that it is never found half removed."""
        log.close()
        if log.folder is not None and log.folder.is_dir():
            deleted = log.folder.with_name(_DELETED + log.folder.name)
            shutil.rmtree(deleted, ignore_errors=True)
            try:
                log.folder.rename(deleted)
            except OSError:
                deleted = log.folder
            shutil.rmtree(deleted, ignore_errors=True)

    # --- topics and channels -----------------------------------------------------------------------------------------

    def load_metadata(self) -> Metadata:
        """The topics and channels that there are: those in nsqd.dat, and topics that it should name and does not."""
        if self._path is None:
            return Metadata()
        path = self._path / _METADATA
        is_there = path.exists()
        metadata = read_file(path, msgspec.json.Decoder(Metadata).decode, "topics are found by their folders")
        topics = (metadata and metadata.topics) or []
        known = {topic.name for topic in topics}
        found = [name for name in self._topics_on_disk() if name not in known]
        if found and (metadata is not None or not is_there):
            logger.error(
                "%s does not name the topics %s, which have messages in %s: they are there again, not paused",
                path, ", ".join(found), self._path / _TOPICS, extra=BROKER_METADATA_INVALID,
            )  # fmt: skip
        return Metadata([*topics, *map(TopicMetadata, found)])

    def _topics_on_disk(self) -> list[str]:
        assert self._path is not None
        folders = sorted(path for path in (self._path / _TOPICS).glob("*") if path.is_dir())
        for folder in folders:
            if folder.name.startswith(_DELETED):
                shutil.rmtree(folder, ignore_errors=True)
        names = (path.name.removeprefix(_PREFIX) for path in folders if path.name.startswith(_PREFIX))
        return [name for name in names if is_valid_name(name)]

    def save_metadata(self, metadata: Metadata) -> None:
        if self._path is not None:
            replace_file(self._path / _METADATA, msgspec.json.encode(metadata), sync=True)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def load_checkpoint(self, log: Journal) -> Checkpoint | None:
        """Read a topic's checkpoint; None if it has none, or a broken one: then all of its log is unfinished.

        Raises OSError when the disk does not give it.
        """
        if log.folder is None:
            return None
        log.kept = read_file(log.folder / _KEPT_FILE, decode_kept, "the messages in it are lost") or {}
        path = log.folder / _CHECKPOINT
        if not path.exists() and (log.first < log.end or log.kept):
            logger.error("%s is missing: every message of the topic comes again", path, extra=BROKER_METADATA_INVALID)
        return read_json(path, Checkpoint, "every message of the topic comes again")

    def save_checkpoint(self, topic: Topic) -> None:
        """Write a topic's checkpoint, and remove the segments that no channel needs any more. Raises OSError."""
        folder = topic.log.folder
        if folder is None or not topic.is_durable:
            topic.log.remove_before(oldest_needed(topic))
            return
        checkpoint = take_checkpoint(topic)
        try:
            self._write_checkpoint(folder, topic, checkpoint)
        except OSError as error:
            # What is consumed makes room for the checkpoint that says so. If the process ends before that is written,
            # the one on disk goes on at the first segment there is. It may not know what is kept beside the log: so
            # every segment with an unfinished message stays.
            done = checkpoint.first(())
            if error.errno not in _NO_ROOM or not topic.log.bytes_before(done):
                raise
            topic.log.remove_before(done)
            self._write_checkpoint(folder, topic, checkpoint)
        topic.log.remove_before(checkpoint.first(topic.log.kept))

    def _write_checkpoint(self, folder: Path, topic: Topic, checkpoint: Checkpoint) -> None:
        kept = frames_to_keep(topic, checkpoint)
        if kept is not topic.log.kept:
            # Synced: what it replaces is removed. Before the checkpoint, which would name what is nowhere.
            replace_file(folder / _KEPT_FILE, encode_kept(kept), sync=True)
            topic.log.kept = kept
        # Not synced: one that a power loss breaks only makes messages come again.
        write_json(folder / _CHECKPOINT, checkpoint, sync=False)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def refuse_others(path: Path, others: Mapping[str, str]) -> None:
    """Raise DataPathError where a folder has a file of ``others``, whose messages would be left out without a word."""
    for pattern, whose in others.items():
        if found := next(path.glob(pattern), None):
            raise DataPathError(
                f"data_path {str(path)!r} is of {whose}, as {found.relative_to(path)} in it shows: its messages cannot"
                " be delivered here. Start what wrote it to deliver them, or give another folder"
            )


def _lock(path: Path) -> int:
    if not path.is_dir():
        raise DataPathError(f"data_path {str(path)!r} is not a folder")
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        raise DataPathError(f"data_path {str(path)!r}: nothing can be written there, by its permissions or its mount")
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise DataPathError(f"data_path {str(path)!r} is in use by another nsqd") from error
    return fd
