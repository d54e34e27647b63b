"""A topic: takes what is published and hands it to its channels (nsqio/nsq: nsqd/topic.go).

While it is paused, or has no channel, what is published goes to its log only,
and channels read it from there afterwards. With a data path the log holds every
message; otherwise only those that some channel has no room for in memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nsq_fast.broker.channel import Channel, have_room, put_in_memory
from nsq_fast.broker.journal import Journal, read_all
from nsq_fast.broker.message import Exiting, Message, NotFound, SnowflakeIds, encode_frames
from nsq_fast.broker.queue import LatencyWindow
from nsq_fast.names import is_ephemeral

Changed = Callable[[str, "Topic", "Channel | None"], None]


class Topic:
    """One topic.

    Args:
        log: where messages go that are not, or not only, in memory.
        is_durable: whether every message goes to the log.
        mem_queue_size: messages that each channel keeps in memory.
        preserve_order: see ``Channel``.
        on_logged: called after messages went into a durable log; may block its greenlet.
        make_latency: makes what measures the latency of a channel.
        on_change: called with ``create``, ``delete`` or ``change``, the topic, and the channel it is about; with
            ``unused`` when it is ephemeral and has no channel any more.

    Attributes:
        channels: by name.
        message_count, message_bytes: published so far.
        is_exiting: closed or deleted.
        log: where what is not, or not only, in memory stands.
        ids: where its messages get their ids.
        gathered: what connections publish in this turn of the hub.
    """

    def __init__(
        self,
        name: str,
        ids: SnowflakeIds,
        log: Journal,
        *,
        is_durable: bool,
        mem_queue_size: int,
        preserve_order: bool = False,
        on_change: Changed,
        on_logged: Callable[[Journal], None] = lambda log: None,
        make_latency: Callable[[], LatencyWindow | None] = lambda: None,
    ) -> None:
        self.name = name
        self.is_ephemeral: bool = is_ephemeral(name)
        self.is_durable: bool = is_durable and not self.is_ephemeral
        self.is_paused: bool = False
        self.is_exiting: bool = False
        self.channels: dict[str, Channel] = {}
        self.message_count: int = 0
        self.message_bytes: int = 0
        self.log = log
        self.ids = ids
        self.gathered: list[tuple[Any, list[bytes]]] = []
        self._capacity = mem_queue_size
        self._preserve_order = preserve_order
        self._on_change = on_change
        self._on_logged = on_logged
        self._make_latency = make_latency
        # Of the messages that it holds back: how many have room in its memory, and those that are deferred, as far as
        # that is known: of those from before a restart it is not.
        self._held_in_memory = 0
        self._held_deferred: list[Message] = []
        self._is_starting = True
        self._hold()

    @property
    def depth(self) -> int:
        """Messages that no channel has got yet."""
        held_at = self.log.held_at
        return 0 if held_at is None else self.log.count(held_at.sequence, self.log.end)

    @property
    def backend_depth(self) -> int:
        """How many of them memory has no room for."""
        return max(0, self.depth - self._held_in_memory)

    def unfinished(self) -> list[Message]:
        """The messages that no channel has got yet. Reads them from the disk."""
        held_at = self.log.held_at
        return [] if held_at is None else list(read_all(self.log, held_at.sequence, self.log.end))

    # --- publishing --------------------------------------------------------------------------------------------------

    def put(self, body: bytes, defer_ms: int = 0) -> None:
        """Publish one message, to be delivered after ``defer_ms`` milliseconds. Raises as ``put_many``."""
        if defer_ms:
            self._put_deferred(body, time.time() + defer_ms / 1000)
        else:
            self.put_many((body,))

    def put_many(self, bodies: Sequence[bytes]) -> None:
        """Publish messages: all, or none when it raises Exiting, or OSError of the disk."""
        if self.is_exiting:
            raise Exiting("exiting")
        count = len(bodies)
        ids = self.ids.take(count)
        frames = encode_frames(ids, bodies, time.time_ns())
        if self.log.held_at is not None:
            self._hold_back(frames)
        else:
            self._fan_out(ids, frames)
        self.message_count += count
        self.message_bytes += sum(map(len, bodies))
        if self.is_durable:
            self._on_logged(self.log)

    def _fan_out(self, ids: list[bytes], frames: list[bytes]) -> None:
        channels = self.channels.values()
        numbers: Iterator[int] = itertools.repeat(-1)
        has_room = have_room(channels, len(ids), are_logged=self.is_durable)
        if self.is_durable or not has_room:
            start = self.log.append(frames)
            numbers = itertools.count(start.sequence)
        messages = list(map(Message, ids, frames, numbers))
        if len(channels) > 1:
            for message in messages:
                message.is_shared = True
        if has_room:
            put_in_memory(channels, messages)
        else:
            for channel in channels:
                channel.put(messages, start)

    def _put_deferred(self, body: bytes, due: float) -> None:
        if self.is_exiting:
            raise Exiting("exiting")
        [id] = self.ids.take(1)
        [frame] = encode_frames([id], [body], time.time_ns())
        if self.log.held_at is not None:
            number = self.log.end
            self._hold_back([frame], due)
            if self.log.end != number:
                self._held_deferred.append(Message(id, frame, number, due))
        else:
            self._defer(Message(id, frame, due=due))
        self.message_count += 1
        self.message_bytes += len(body)
        if self.is_durable:
            self._on_logged(self.log)

    def _defer(self, message: Message) -> None:
        if self.is_durable:
            message.sequence = self.log.append([message.frame], message.due).sequence
        for channel in self.channels.values():
            channel.message_count += 1
            channel.defer(message.copy())
            if self.is_durable:
                channel.backend.leave_out(message.sequence, message.sequence + 1)

    def _hold_back(self, frames: Sequence[bytes], due: float = 0.0) -> None:
        if self.is_ephemeral:
            frames = frames[: max(0, self._capacity - self.depth)]
        if frames:
            self.log.append(frames, due)
            self._held_in_memory = min(self._capacity, self._held_in_memory + len(frames))

    # --- holding back ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to hand messages to the channels that are there."""
        self._is_starting = False
        self._hold_or_release()

    def _hold(self) -> None:
        if self.log.held_at is None:
            self.log.held_at = self.log.at(self.log.end)

    def _hold_or_release(self) -> None:
        if self._is_starting or self.is_paused or not self.channels:
            self._hold()
            return
        held_at = self.log.held_at
        if held_at is None:
            return
        count = self.log.count(held_at.sequence, self.log.end)
        now = time.time()
        deferred = [message for message in self._held_deferred if message.due > now]
        self._forget_held()
        self.log.held_at = None
        for channel in self.channels.values():
            channel.release(held_at, count, deferred)

    def _forget_held(self) -> None:
        self._held_in_memory = 0
        self._held_deferred = []

    # --- channels ----------------------------------------------------------------------------------------------------

    def get_channel(self, name: str) -> Channel:
        channel = self.channels.get(name)
        if channel is None:
            channel = self._create_channel(name)
            self._on_change("create", self, channel)
            self._hold_or_release()
        return channel

    def existing_channel(self, name: str) -> Channel:
        channel = self.channels.get(name)
        if channel is None:
            raise NotFound("CHANNEL_NOT_FOUND")
        return channel

    def delete_channel(self, name: str) -> None:
        """Disconnect a channel's clients and drop its messages; raises NotFound.

        An ephemeral topic goes with its last channel (nsqio/nsq: nsqd/topic.go, DeleteExistingChannel).
        """
        channel = self.existing_channel(name)
        channel.close()
        channel.empty()
        del self.channels[name]
        self._hold_or_release()
        self._on_change("delete", self, channel)
        if self.is_ephemeral and not self.channels and not self.is_exiting:
            self._on_change("unused", self, None)

    def _create_channel(self, name: str) -> Channel:
        channel = Channel(
            self.name,
            name,
            self.log,
            self._capacity,
            lambda: self.delete_channel(name),
            self._make_latency(),
            preserve_order=self._preserve_order,
        )
        channel.on_change = lambda: self._on_change("change", self, channel)
        self.channels[name] = channel
        return channel

    # --- administration ----------------------------------------------------------------------------------------------

    def set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self._hold_or_release()
        self._on_change("change", self, None)

    def empty(self) -> None:
        if self.log.held_at is not None:
            dropped, self.log.held_at = self.log.held_at, self.log.at(self.log.end)
            self._forget_held()
            for channel in self.channels.values():
                channel.backend.leave_out(dropped.sequence, self.log.end)
        self._on_change("change", self, None)

    def close(self) -> None:
        self.is_exiting = True
        for channel in self.channels.values():
            channel.close()


def oldest_needed(topic: Topic) -> int:
    """The number of the first record that some channel, or the topic itself, has yet to read."""
    cursors = [topic.log.held_at, *(channel.backend.cursor for channel in topic.channels.values())]
    return min([topic.log.end, *(cursor.sequence for cursor in cursors if cursor is not None)])
