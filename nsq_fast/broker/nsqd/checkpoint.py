"""Where the channels of a topic are: taken while it runs, written down, and brought back after a restart.

A checkpoint is one line of JSON, and its CRC-32 in a line of its own: a number that has changed on the disk would
make messages count as finished that were not.
"""

from __future__ import annotations

import logging
import zlib

import msgspec

from nsq_fast.broker.diskqueue.log import SegmentLog
from nsq_fast.broker.message import Message
from nsq_fast.log_events import BROKER_DATA_DAMAGED

from .channel import Channel
from .topic import Topic

logger = logging.getLogger("nsq_fast.broker.nsqd.checkpoint")


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


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The content of the file."""
    text = msgspec.json.encode(checkpoint)
    return b"%b\n%08x\n" % (text, zlib.crc32(text))


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Read the content of the file; raises ValueError for one that is damaged."""
    text, _, rest = data.partition(b"\n")
    if rest != b"%08x\n" % zlib.crc32(text):
        raise ValueError("its checksum is wrong")
    return msgspec.json.decode(text, type=Checkpoint)


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
    for message in (*channel.backlog.unfinished(), *channel.in_flight):
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
    if checkpoint.first() < min(log.first, checkpoint.end):
        missing = min(log.first, checkpoint.end) - checkpoint.first()
        logger.error(
            "the first %d messages that topic %s had not finished are missing in its log",
            missing,
            topic.name,
            extra=BROKER_DATA_DAMAGED,
        )
    held_at = log.end if checkpoint.held_at is None else log.seek(checkpoint.held_at)
    log.held_at = None
    for channel in topic.channels.values():
        known = checkpoint.channels.get(channel.name)
        if known is not None:
            channel.backlog.restore(_unfinished(log, known), log.seek(known.next))
        elif not channel.is_ephemeral:
            channel.backlog.restore([], log.seek(log.first))
    log.held_at = held_at


def _unfinished(log: SegmentLog, checkpoint: ChannelCheckpoint) -> list[Message]:
    """Read the messages that a channel had not finished, in their order; and those of which it is not known."""
    tried = {sequence: (attempts, due) for sequence, attempts, due in checkpoint.tried}
    wanted = {*tried, *(number for first, end in checkpoint.fresh for number in range(first, end))}
    position = log.seek(min(wanted, default=checkpoint.next))
    messages: list[Message] = []
    # What reading finds out about damage counts already here.
    unsure = set(log.inexact_numbers())
    if unsure:
        position = log.seek(min(*wanted, *unsure, checkpoint.next))
    while position.sequence < checkpoint.next and (unsure or len(messages) < len(wanted)):
        read, position = log.read(position, checkpoint.next - position.sequence)
        if not read:
            break
        unsure = set(log.inexact_numbers())
        messages += [message for message in read if message.sequence in wanted or message.sequence in unsure]
    for message in messages:
        message.attempts, message.due = tried.get(message.sequence, (0, message.due))
    return messages
