"""A broker of FastStream on ``nsq_fast.aio``: subscribers and publishers as decorators.

    from faststream import FastStream
    from nsq_fast.integrations.faststream import NSQBroker

    broker = NSQBroker("127.0.0.1:4150")
    app = FastStream(broker)

    @broker.subscriber("orders", "billing")
    async def bill(order: dict) -> None: ...

It is built on parts of FastStream that FastStream calls internal, so the extra asks for the versions that it was
tested with. docs/integrations.md says what is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

try:
    import faststream as _faststream  # noqa: F401  # says which extra is missing before anything below needs it
except ImportError as error:
    raise ImportError(
        "nsq_fast.integrations.faststream needs FastStream: pip install 'nsq-fast[faststream]'"
    ) from error

import anyio
from fast_depends import dependency_provider
from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.configs import BrokerConfig
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream.middlewares import AckPolicy
from faststream.specification.schema import BrokerSpec

from nsq_fast import Message
from nsq_fast.aio import Consumer, Producer

from .faststream_parts import (
    NSQMessage,
    NSQProducer,
    NSQPublisher,
    NSQPublisherSpecification,
    NSQSubscriber,
    NSQSubscriberSpecification,
    PublisherDescription,
    PublisherOptions,
    SubscriberDescription,
    SubscriberOptions,
    new_command,
)

__all__ = ["NSQBroker", "NSQMessage", "NSQRouter"]


Addresses = str | Iterable[str | tuple[str, int]]
PING_PAUSE = 0.05
"""Seconds between two looks at whether an nsqd is connected."""


@dataclass(kw_only=True)
class NSQBrokerConfig(BrokerConfig):  # type: ignore[misc]
    """What all parts of a broker use."""

    servers: tuple[Any, Any] = field(default=((), ()), repr=False)
    consumer: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def new_consumer(self, topic: str, channel: str, **options: Any) -> Consumer:
        """A consumer of the servers of the broker."""
        return Consumer(topic, channel, *self.servers, **{**self.consumer, **options})


class NSQRegistrator(Registrator[Message, NSQBrokerConfig]):  # type: ignore[misc]
    """What brokers and routers have in common: the decorators."""

    def subscriber(
        self,
        topic: str,
        channel: str = "faststream",
        *,
        max_workers: int = 1,
        consumer: Mapping[str, Any] | None = None,
        ack_policy: AckPolicy = EMPTY,
        dependencies: Sequence[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> NSQSubscriber:
        """Call the decorated function with each message of a channel.

        Args:
            max_workers: messages that are handled, and held, at once.
            consumer: more options of ``nsq_fast.aio.Consumer``. ``max_tries`` is 0: no message is given up.
            ack_policy: NACK_ON_ERROR by default: what fails comes again.
        """
        calls: CallsCollection[Message] = CallsCollection()
        described = SubscriberDescription(
            topic=topic, title_=title, description_=description, include_in_schema=include_in_schema
        )
        options = SubscriberOptions(
            topic=topic,
            channel=channel,
            max_workers=max_workers,
            consumer=consumer or {},
            no_reply=True,
            _ack_policy=ack_policy,
            _outer_config=self.config,
        )
        subscriber = NSQSubscriber(options, NSQSubscriberSpecification(self.config, described, calls), calls)
        super().subscriber(subscriber, persistent=persistent)
        added: NSQSubscriber = subscriber.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )
        return added

    def publisher(
        self,
        topic: str,
        *,
        delay: float | None = None,
        persistent: bool = True,
        schema: Any = None,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> NSQPublisher:
        """Publish what the decorated function returns; ``delay``: seconds that it waits in nsqd (original servers)."""
        described = PublisherDescription(
            topic=topic, schema_=schema, title_=title, description_=description, include_in_schema=include_in_schema
        )
        options = PublisherOptions(topic=topic, delay=delay, _outer_config=self.config)
        publisher = NSQPublisher(options, NSQPublisherSpecification(self.config, described))
        super().publisher(publisher, persistent=persistent)
        return publisher


class NSQRouter(NSQRegistrator):
    """Subscribers and publishers of one module, for ``NSQBroker.include_router``; ``prefix`` begins their topics."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(config=NSQBrokerConfig(prefix=prefix), routers=())


class NSQBroker(NSQRegistrator, BrokerUsecase[Message, Producer, NSQBrokerConfig]):  # type: ignore[misc]
    """A broker of FastStream.

    Args:
        nsqd_tcp_addresses, lookupd_http_addresses: of the servers, as for ``nsq_fast.aio.Producer``.
        producer: more options of the producer.
        consumer: more options of all consumers.
        graceful_timeout: seconds that handlers may take when the broker stops.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: Addresses = (),
        lookupd_http_addresses: Addresses = (),
        *,
        producer: Mapping[str, Any] | None = None,
        consumer: Mapping[str, Any] | None = None,
        graceful_timeout: float | None = 15.0,
        ack_policy: AckPolicy = EMPTY,
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        routers: Iterable[NSQRegistrator] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        description: str | None = None,
        logger: Any = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
    ) -> None:
        servers = nsqd_tcp_addresses, lookupd_http_addresses
        self._nsq = Producer(*servers, **dict(producer or {}))
        config = NSQBrokerConfig(
            servers=servers,
            consumer=consumer or {},
            producer=NSQProducer(self._nsq),
            broker_middlewares=middlewares,
            broker_parser=parser,
            broker_decoder=decoder,
            broker_codec=codec,
            broker_dependencies=dependencies,
            graceful_timeout=graceful_timeout,
            ack_policy=ack_policy,
            logger=make_logger_state(logger=logger, log_level=log_level, default_storage_cls=_LoggerStorage),
            fd_config=FastDependsConfig(
                use_fastdepends=apply_types, provider=dependency_provider, context=ContextRepo()
            ),
            extra_context={"broker": self},
        )
        urls = [f"nsq://{address}" for address in sorted(self._nsq.nsqd_tcp_addresses)] or ["nsq://"]
        specification = BrokerSpec(
            url=urls, protocol="nsq", protocol_version="V2", description=description, tags=(), security=None
        )
        super().__init__(config=config, specification=specification, routers=routers)

    async def _connect(self) -> Producer:
        self.config.producer.serializer = self.config.fd_config._serializer
        await self._nsq.start()
        return self._nsq

    async def start(self) -> None:
        """Connect, and have every subscriber begin."""
        await self.connect()
        await super().start()

    async def stop(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        """Wait for the handlers and for what is published; close the connections. A broker is started once."""
        await super().stop(exc_type, exc_val, exc_tb)
        await self._nsq.close()

    async def ping(self, timeout: float | None = None) -> bool:
        """Whether an nsqd is connected, now or within ``timeout`` seconds."""
        with anyio.move_on_after(timeout or 0):
            while not self._nsq.is_connected:
                await anyio.sleep(PING_PAUSE)
        return self._nsq.is_connected

    async def publish(self, message: Any, topic: str, **options: Any) -> Any:
        """Publish a message, and return when a server has it.

        ``delay`` is how many seconds it waits in nsqd (original servers), ``headers`` are extended headers (redesigned
        servers). Raises what ``nsq_fast.aio.Producer.publish`` raises.
        """
        return await self._basic_publish(new_command(message, topic, **options), producer=self.config.producer)

    async def request(self, message: Any, topic: str, **options: Any) -> Any:
        """NSQ has no replies."""
        return await self.config.producer.request(new_command(message, topic))


class _LoggerStorage(DefaultLoggerStorage):  # type: ignore[misc]
    """Makes the logger of a broker when it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self._level = logging.INFO

    def set_level(self, level: int) -> None:
        self._level = level

    def register_subscriber(self, params: dict[str, Any]) -> None:
        """Nothing is aligned."""

    def get_logger(self, *, context: ContextRepo) -> Any:
        found = self._get_logger_ref()
        if not found:
            line = "%(asctime)s %(levelname)-8s - %(topic)s | %(channel)s | %(message_id)s - %(message)s"
            found = get_broker_logger(
                name="nsq",
                default_context={"topic": "", "channel": ""},
                message_id_ln=16,
                fmt=line,
                context=context,
                log_level=self._level,
            )
            self._logger_ref.add(found)
        return found
