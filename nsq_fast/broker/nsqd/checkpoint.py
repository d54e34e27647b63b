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
from .gaps import Gap, ranges_of
from .topic import Topic

logger = logging.getLogger("nsq_fast.broker.nsqd.checkpoint")


class ChannelCheckpoint(msgspec.Struct, array_like=True):
    """Where a channel was.

    ``next``: first record not yet read, like all behind it. ``fresh``: ranges of unfinished records before it that were
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
    unread = channel.backlog.backend.unread()
    fresh: list[int] = []
    tried: list[tuple[int, int, float]] = []
    for message in (*channel.backlog.in_memory(), *channel.in_flight):
        if message.attempts or message.due:
            tried.append((message.sequence, message.attempts, message.due))
        else:
            fresh.append(message.sequence)
    next = unread.pop()[0] if unread and unread[-1][1] == end else end
    return ChannelCheckpoint(next, sorted([*ranges_of(fresh), *unread]), tried)


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
    log.held_at = held_at
    for channel in topic.channels.values():
        known = checkpoint.channels.get(channel.name)
        if known is not None:
            _restore_channel(channel, log, known)
        elif not channel.is_ephemeral:
            channel.backlog.restore(log.seek(log.first), [], [])


def _restore_channel(channel: Channel, log: SegmentLog, checkpoint: ChannelCheckpoint) -> None:
    delivered = _delivered(log, checkpoint)
    fresh = _fresh(log, checkpoint, {message.sequence for message in delivered})
    starts = [*(first for first, _ in fresh), checkpoint.next]
    cursor = at = log.seek(starts[0])
    gaps: list[Gap] = []
    for (_, end), start in zip(fresh, starts[1:], strict=True):
        if end < start:
            at = log.seek(start, at)
            gaps.append(Gap(end, at))
    channel.backlog.restore(cursor, gaps, delivered)


def _delivered(log: SegmentLog, checkpoint: ChannelCheckpoint) -> list[Message]:
    """Read the messages that had been delivered and not finished, in their order.

    All unfinished ones are read up to where the channel was: what of them is damaged is known then.
    """
    tried = {sequence: (attempts, due) for sequence, attempts, due in checkpoint.tried}
    last = max([*tried, *(end - 1 for _, end in checkpoint.fresh)], default=-1)
    position = log.seek(checkpoint.first())
    messages: list[Message] = []
    unsure = min(log.inexact_numbers(), default=None)
    if unsure is not None:
        position = log.seek(min(checkpoint.first(), unsure))
    while position.sequence < checkpoint.next and (unsure is not None or position.sequence <= last):
        read, position = log.read(position, checkpoint.next - position.sequence)
        if not read:
            break
        unsure = min(log.inexact_numbers(), default=None)
        messages += [message for message in read if message.sequence in tried]
    for message in messages:
        message.attempts, message.due = tried[message.sequence]
    return messages


def _fresh(log: SegmentLog, checkpoint: ChannelCheckpoint, delivered: set[int]) -> list[tuple[int, int]]:
    """The ranges of messages that had never been delivered, and of those of which that is not known."""
    unsure = {number for number in log.inexact_numbers() if number < checkpoint.next} - delivered
    if not unsure:
        return checkpoint.fresh
    return ranges_of(unsure.union(*(range(first, end) for first, end in checkpoint.fresh)))
