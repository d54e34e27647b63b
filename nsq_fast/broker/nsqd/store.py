"""What of an nsqd survives its process: the names of topics and channels, and how far each channel has come.

In the data path::

    nsqd.dat                        topics and channels, with what is paused: the original's file
    topics/t.<topic>/*.log          the topic's messages (diskqueue/log.py)
    topics/t.<topic>/checkpoint     where each channel goes on, and what it had not finished before that place
    *.bad                           a file that was damaged, as it was found

A checkpoint is written every ``sync_timeout`` seconds while something happens,
when channels come and go, and at the end. Messages finished after the last
checkpoint come again after a SIGKILL; none is lost, because a checkpoint never
names as finished what was not.

Nothing that is damaged keeps an nsqd from starting. A topic that nsqd.dat does
not name is found by its folder, its channels by its checkpoint.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path

import msgspec

from nsq_fast.broker.diskqueue.files import replace_file, set_aside
from nsq_fast.broker.diskqueue.log import SegmentLog
from nsq_fast.broker.errors import DataPathError
from nsq_fast.log_events import BROKER_METADATA_INVALID
from nsq_fast.names import is_ephemeral, is_valid_name

from .checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint, take_checkpoint
from .topic import Topic, oldest_needed

logger = logging.getLogger("nsq_fast.broker.nsqd.store")

_METADATA = "nsqd.dat"
_CHECKPOINT = "checkpoint"
_TOPICS = "topics"
_PREFIX = "t."
"""Keeps a topic called ".." where it belongs."""

_DELETED = "deleted."


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
        return SegmentLog(self._path / _TOPICS / f"{_PREFIX}{topic}", segment_size)

    def delete(self, log: SegmentLog) -> None:
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
        metadata = _read_metadata(self._path / _METADATA)
        topics = [] if metadata is None else metadata.topics or []
        known = {topic.name for topic in topics}
        found = [name for name in self._topics_on_disk() if name not in known]
        if found and metadata is not None:
            logger.error(
                "%s does not name the topics %s, which have messages in %s: they are there again, not paused",
                self._path / _METADATA,
                ", ".join(found),
                self._path / _TOPICS,
                extra=BROKER_METADATA_INVALID,
            )
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
        """Write nsqd.dat. Raises OSError."""
        if self._path is not None:
            replace_file(self._path / _METADATA, msgspec.json.encode(metadata), sync=True)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def load_checkpoint(self, log: SegmentLog) -> Checkpoint | None:
        """Read a topic's checkpoint; None if it has none, or a broken one: then all of its log is unfinished."""
        if log.folder is None:
            return None
        path = log.folder / _CHECKPOINT
        try:
            return decode_checkpoint(path.read_bytes())
        except FileNotFoundError:
            if log.first < log.end.sequence:
                logger.error(
                    "%s is missing: every message of the topic comes again", path, extra=BROKER_METADATA_INVALID
                )
        except (ValueError, OSError) as error:
            logger.error(
                "%s cannot be read: %s; every message of the topic comes again; %s",
                path,
                error,
                set_aside(path),
                extra=BROKER_METADATA_INVALID,
            )
        return None

    def save_checkpoint(self, topic: Topic) -> None:
        """Write a topic's checkpoint, and remove the segments that no channel needs any more. Raises OSError."""
        folder = topic.log.folder
        if folder is None or not topic.is_durable:
            topic.log.remove_before(oldest_needed(topic))
            return
        checkpoint = take_checkpoint(topic)
        folder.mkdir(parents=True, exist_ok=True)
        # Not synced: one that a power loss breaks only makes messages come again.
        replace_file(folder / _CHECKPOINT, encode_checkpoint(checkpoint), sync=False)
        topic.log.remove_before(checkpoint.first())

    def close(self) -> None:
        """Give the folder up."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _read_metadata(path: Path) -> Metadata | None:
    """The content of nsqd.dat; None when it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Metadata)
    except FileNotFoundError:
        return Metadata()
    except (ValueError, OSError) as error:
        what = set_aside(path)
        logger.error(
            "failed to parse metadata in %s: %s; topics are found by their folders; %s",
            path,
            error,
            what,
            extra=BROKER_METADATA_INVALID,
        )
        return None


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
