"""The state of an nsqd: its topics, what of them survives a restart, and the scan for timeouts.

No sockets: the TCP and HTTP servers work on it. What survives what, with a data
path: a message whose publish was answered OK survives the end of the process,
SIGKILL included; after a power loss up to ``sync_every`` messages a topic, or
those of the last ``sync_timeout`` seconds, may be missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from gevent import Greenlet, get_hub, sleep, spawn

from nsq_fast._lazy import get_logger
from nsq_fast.broker.channel import Channel
from nsq_fast.broker.journal import Journal, Trouble
from nsq_fast.broker.message import Exiting, NotFound, SnowflakeIds
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.broker.queue import make_window
from nsq_fast.broker.store import ChannelMetadata, Metadata, Store, TopicMetadata, restore
from nsq_fast.broker.topic import Topic
from nsq_fast.log_events import BROKER_METADATA_INVALID
from nsq_fast.names import is_ephemeral, is_valid_name

logger: logging.Logger = get_logger("nsq_fast.broker.nsqd")


class Host(ABC):
    """What the TCP and HTTP servers of an nsqd need of its state, original or redesigned.

    Attributes:
        options: replaced as a whole by ``set_options``.
        clients: every TCP connection.
        started_at: seconds since the epoch.
        error: the last error of the disk, until a write succeeds again.

    Args:
        publishing: what the log says when publishes cannot be written, and when they can again.
    """

    def __init__(self, options: NsqdOptions, publishing: Trouble) -> None:
        self.options: NsqdOptions = options
        self.clients: set[Any] = set()
        self.started_at: float = time.time()
        self.error: OSError | None = None
        self._publishing = publishing
        self._failures = 0

    def refused(self, error: OSError) -> None:
        """What was to be published could not be written."""
        self._failed(self._publishing, error)

    def _failed(self, trouble: Trouble, error: OSError) -> None:
        self.error = error
        self._failures += 1
        trouble.failed(error)

    def stored(self) -> None:
        """Something was published."""
        self.error = None
        self._publishing.succeeded()

    @abstractmethod
    def start(self) -> None:
        """Begin to work."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect everybody and write down where everything is."""

    @abstractmethod
    def kill(self) -> None:
        """Stop as SIGKILL would: nothing more is written."""

    def set_options(self, **changes: Any) -> None:
        """Change options; those of topics that exist already stay as they were. Raises ConfigError."""
        self.options = self.options.replace(**changes)


CHANNELS_PER_WORKER = 4
_MANY_TOPICS = 500
_SAVE_SHARE = 0.1
"""From so many topics on, writing nsqd.dat, which names them all, takes this share of the time while more are made."""
_TURN = 0.005
"""Seconds after which whoever looks at all topics gives way to others."""
_SYNC_THREADS = 16
_SYNC_FILES = 128
"""So many files have a second descriptor while they are synced at the end."""

Listener = Callable[[str, str, "str | None"], None]


class Nsqd(Host):
    """The topics of one nsqd.

    Attributes:
        topics: by name.
        lookup_channels: asked, when a topic is new, which channels it has elsewhere; may block.
    """

    def __init__(self, options: NsqdOptions) -> None:
        # Apart from ``_writing``: a checkpoint may be written where a message has no room.
        super().__init__(options, Trouble(logger, "publishes are refused: %s", "publishes are taken again"))
        self.topics: dict[str, Topic] = {}
        self.lookup_channels: Callable[[str], list[str]] | None = None
        self._store: Store | None = None
        self._listeners: list[Listener] = []
        self._greenlets: list[Greenlet[..., None]] = []
        self._is_loading = False
        self._are_channels_new = True
        self._is_metadata_saved = True
        self._saves_at = 0.0
        path = str(options.data_path)
        self._writing = Trouble(
            logger,
            f"failed to write to {path.replace('%', '%%')}: %s; what is in memory is served, and writing is tried every"
            f" {options.sync_timeout:g} s",
            f"writing to {path} succeeds again",
        )

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load what the data path has, and begin to scan. Raises DataPathError; ConfigError for a missing package."""
        make_window(self.options)  # what it needs is there, or nothing starts
        self._store = Store(self.options.data_path)
        self._load()
        self._greenlets = [spawn(self._scan_loop), spawn(self._persist_loop)]
        for greenlet, name in zip(self._greenlets, ("nsqd-scan", "nsqd-persist"), strict=True):
            greenlet.name = name

    def close(self) -> None:
        self._end(save=True)

    def kill(self) -> None:
        self._end(save=False)

    def _end(self, *, save: bool) -> None:
        for greenlet in self._greenlets:
            greenlet.kill()
        self._greenlets = []
        if self._store is None:
            return
        for topic in self.topics.values():
            topic.close()
            if save and topic.is_durable:
                with self._disk():
                    self._store.save_checkpoint(topic)
        if save:
            _sync_together([topic.log for topic in self.topics.values() if topic.is_durable], self._disk)
            with self._disk():
                self._store.save_metadata(self._metadata())
        for topic in self.topics.values():
            topic.log.close()
        self.topics.clear()
        self._store.close()
        self._store = None

    # --- topics ------------------------------------------------------------------------------------------------------

    def get_topic(self, name: str) -> Topic:
        """The topic of that name; it is created if there is none, with the channels that it has elsewhere."""
        topic = self.topics.get(name)
        if topic is not None:
            return topic
        topic = self._create_topic(name)
        self._changed("create", topic, None)
        for channel in self.lookup_channels(name) if self.lookup_channels else ():
            if not is_ephemeral(channel) and not topic.is_exiting:
                topic.get_channel(channel)
        topic.start()
        return topic

    def existing_topic(self, name: str) -> Topic:
        topic = self.topics.get(name)
        if topic is None:
            raise NotFound("TOPIC_NOT_FOUND")
        return topic

    def delete_topic(self, name: str) -> None:
        """Drop a topic with its channels and messages; raises NotFound."""
        topic = self.existing_topic(name)
        topic.close()
        for channel in list(topic.channels):
            topic.delete_channel(channel)
        del self.topics[name]
        if self._store is not None:
            self._store.delete(topic.log)
        self._changed("delete", topic, None)

    def _create_topic(self, name: str) -> Topic:
        if self._store is None:
            raise Exiting("exiting")
        topic = Topic(
            name,
            SnowflakeIds(self.options.node_id),
            self._store.log(name, self.options.max_bytes_per_file),
            is_durable=self._store.is_durable,
            mem_queue_size=self.options.mem_queue_size,
            preserve_order=self.options.preserve_order,
            on_change=self._changed,
            on_logged=self._logged,
            make_latency=lambda: make_window(self.options),
        )
        self.topics[name] = topic
        return topic

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener(event, topic, channel)`` for "create" and "delete"; channel None means the topic itself."""
        self._listeners.append(listener)

    def _changed(self, event: str, topic: Topic, channel: Channel | None) -> None:
        if event == "unused":
            self.delete_topic(topic.name)
            return
        self._are_channels_new = True
        lasts = not topic.is_ephemeral and not (channel is not None and channel.is_ephemeral)
        if self._store is not None and lasts and not self._is_loading:
            self._persist(topic, may_wait=event == "create" and len(self.topics) >= _MANY_TOPICS)
        if event != "change":
            for listener in self._listeners:
                listener(event, topic.name, None if channel is None else channel.name)

    # --- what survives -----------------------------------------------------------------------------------------------

    def _load(self) -> None:
        assert self._store is not None
        self._is_loading = True
        for saved in self._store.load_metadata().topics or ():
            if is_valid_name(saved.name) and saved.name not in self.topics:
                self._load_topic(saved, self._store)
            else:
                logger.warning("skipping creation of invalid topic %r", saved.name, extra=BROKER_METADATA_INVALID)
        self._is_loading = False

    def _load_topic(self, saved: TopicMetadata, store: Store) -> None:
        topic = self._create_topic(saved.name)
        topic.is_paused = saved.paused
        for channel in saved.channels or ():
            if is_valid_name(channel.name):
                topic.get_channel(channel.name).is_paused = channel.paused
        checkpoint = store.load_checkpoint(topic.log)
        for name in checkpoint.channels if checkpoint is not None else ():
            # The checkpoint is written first: it can know one that nsqd.dat does not.
            topic.get_channel(name)
        restore(topic, checkpoint)
        topic.start()

    def _metadata(self) -> Metadata:
        topics = []
        for topic in self.topics.values():
            if not topic.is_ephemeral:
                lasting = [channel for channel in topic.channels.values() if not channel.is_ephemeral]
                channels = [ChannelMetadata(channel.name, channel.is_paused) for channel in lasting]
                topics.append(TopicMetadata(topic.name, topic.is_paused, channels))
        return Metadata(topics, self.options.version)

    def _persist(self, topic: Topic, *, may_wait: bool) -> None:
        """Write down that a topic is another; a new one is found by its checkpoint until nsqd.dat names it."""
        self._is_metadata_saved = False
        with self._disk():
            if self._store is not None and topic.name in self.topics:
                # First where a channel is, then that it is there: a channel without a place gets the whole log.
                self._store.save_checkpoint(topic)
            if not may_wait or time.monotonic() >= self._saves_at:
                self._save_metadata()

    def _save_metadata(self) -> None:
        if self._store is not None and self._store.is_durable and not self._is_metadata_saved:
            begin = time.monotonic()
            self._store.save_metadata(self._metadata())
            self._is_metadata_saved = True
            end = time.monotonic()
            self._saves_at = end + (end - begin) / _SAVE_SHARE

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """Keep an error of the disk for ``error``: a broker that cannot write goes on serving what it has."""
        failures = self._failures
        try:
            yield
        except OSError as error:
            self._failed(self._writing, error)
        else:
            if failures == self._failures:  # else it began before the disk was full, as a sync in a thread may
                self.error: OSError | None = None
                self._writing.succeeded()

    def waits_for_disk(self, topic: Topic, count: int) -> bool:
        """Whether it may take some time to publish so many messages to a topic."""
        return topic.is_durable and topic.log.unsynced + count >= self.options.sync_every

    def _logged(self, log: Journal) -> None:
        if log.unsynced >= self.options.sync_every:
            _sync_in_thread(log)

    def _persist_loop(self) -> None:
        marks: WeakKeyDictionary[Topic, object] = WeakKeyDictionary()
        while True:
            sleep(self.options.sync_timeout)
            if not self._is_metadata_saved:
                with self._disk():
                    self._save_metadata()
            for topic, mark in _not_as_marked(list(self.topics.values()), marks):
                if self._store is not None:
                    with self._disk():
                        self._store.save_checkpoint(topic)
                        _sync_in_thread(topic.log)
                        marks[topic] = mark

    # --- timeouts ----------------------------------------------------------------------------------------------------

    # Redis's probabilistic expiration (nsqio/nsq: nsqd/nsqd.go, queueScanLoop): in each interval a few channels are
    # chosen at random. One that had something to give back is dirty; if too many were, others are chosen at once.

    def _scan_loop(self) -> None:
        refresh_at = 0.0
        channels: list[Channel] = []
        while True:
            sleep(self.options.queue_scan_interval)
            if self._are_channels_new or time.monotonic() >= refresh_at:
                # nsqd has a channel that is new wait for the next refresh: tests have no time for that.
                self._are_channels_new = False
                refresh_at = time.monotonic() + self.options.queue_scan_refresh_interval
                channels = [channel for topic in self.topics.values() for channel in topic.channels.values()]
            while self.scan_some(channels):
                pass

    def scan_some(self, channels: Sequence[Channel]) -> bool:
        """Scan some channels; whether too many were dirty."""
        chosen = random.sample(channels, min(self.options.queue_scan_selection_count, len(channels)))
        # How many are scanned before others have their turn (nsqd: in parallel; resizePool).
        workers = min(max(1, len(channels) // CHANNELS_PER_WORKER), self.options.queue_scan_worker_pool_max)
        dirty = 0
        for start in range(0, len(chosen), workers):
            now, wall_now = time.monotonic(), time.time()
            dirty += sum(channel.scan(now, wall_now) for channel in chosen[start : start + workers])
            sleep(0)
        return bool(chosen) and dirty / len(chosen) > self.options.queue_scan_dirty_percent


def _not_as_marked(topics: Sequence[Topic], marks: Mapping[Topic, object]) -> Iterator[tuple[Topic, object]]:
    """Those whose activity is not as it was, with what it is now. Gives way to others again and again."""
    yields_at = time.monotonic() + _TURN
    for topic in topics:
        if time.monotonic() >= yields_at:
            sleep(0)
            yields_at = time.monotonic() + _TURN
        # One that is deleted meanwhile is left out: a checkpoint would bring it back.
        if not topic.is_exiting and marks.get(topic) != (mark := _activity(topic)):
            yield topic, mark


def _activity(topic: Topic) -> object:
    """Something that is another whenever a checkpoint of the topic would be another."""
    channels = [
        (each.depth, each.in_flight_count, len(each.deferred), each.message_count, each.requeue_count)
        for each in topic.channels.values()
    ]
    return topic.message_count, topic.depth, channels


def _sync_in_thread(log: Journal) -> None:
    fd = log.take_unsynced()
    if fd is not None:
        get_hub().threadpool.apply(_sync_and_close, (fd,))


def _sync_together(logs: Sequence[Journal], disk: Callable[[], AbstractContextManager[None]]) -> None:
    """Bring what was written to logs to the disk itself. Blocks. ``disk`` takes the OSError of each.

    Several at a time take a tenth of the time: the file system writes what they have in common once.
    """
    with ThreadPoolExecutor(_SYNC_THREADS) as threads:
        for at in range(0, len(logs), _SYNC_FILES):
            syncing = []
            for log in logs[at : at + _SYNC_FILES]:
                with disk():
                    fd = log.take_unsynced()
                    if fd is not None:
                        syncing.append(threads.submit(_sync_and_close, fd))
            for each in syncing:
                with disk():
                    each.result()


def _sync_and_close(fd: int) -> None:
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
