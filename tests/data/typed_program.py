"""A program for type checkers, never run: a line that ends with ``# wrong`` has a mistake that they must find."""

from blinker import Signal

import nsq_fast
from nsq_fast import (
    ConnectionConfig,
    Consumer,
    Message,
    NsqdHTTPClient,
    NsqError,
    Producer,
    Receipt,
    RequeueMessage,
    aio,
    threads,
)
from nsq_fast.broker import Broker
from nsq_fast.gnsq import Consumer as GnsqConsumer
from nsq_fast.metrics import ClientCollector
from nsq_fast.protocol import Session
from nsq_fast.worker import subscribe


def handle(consumer: Consumer, message: Message) -> None:
    body: bytes = message.body
    attempts: int = message.attempts
    text: str = message.body  # wrong
    if attempts > 3:
        raise RequeueMessage(5.0)
    message.finnish()  # wrong
    consumer.logger.info("%r %s", body, text)


consumer = Consumer("topic", "channel", ["127.0.0.1:4150"], message_handler=handle, concurrency=8, snappy=True)
consumer.start(block=False)
is_closed: bool = consumer.join(timeout=1.0)
consumer.join("soon")  # wrong
for each in consumer:
    identifier: bytes = each.id

Consumer("topic")  # wrong
Consumer("topic", "channel", lookupd_http_addresses="127.0.0.1:4161", concurency=8)  # wrong
Consumer("topic", "channel", lookupd_http_addresses="127.0.0.1:4161", heartbeat_interval="often")  # wrong

Consumer(
    ["a", "b"], "channel", ["127.0.0.1:4150"], histograms=True, config_source=nsq_fast.FileConfigSource("nsq.toml")
)
Consumer(["a", 5], "channel", ["127.0.0.1:4150"])  # wrong
Consumer("topic", "channel", ["127.0.0.1:4150"], config_source=5)  # wrong


def test_of_a_program(nsq_broker: Broker) -> None:
    aio.Producer(nsq_broker.nsqd.tcp_address, lookupd_http_addresses=nsq_broker.nsqd.http_address)
    threads.Consumer("topic", "channel", [nsq_broker.nsqd.tcp_address, "127.0.0.1:4150"])
    Producer(("127.0.0.1", 4150))
    Producer(4150)  # wrong


@subscribe("topic", "channel", max_in_flight=100, batch=True, nsqd_tcp_addresses="127.0.0.1:4150")
def work(consumer: Consumer, messages: list[Message]) -> None: ...


@subscribe("topic", "channel", max_in_fligth=100)  # wrong
def work_more(consumer: Consumer, message: Message) -> None: ...


with Producer("127.0.0.1:4150", linger=0.002, max_pending=10) as producer:
    producer.publish("topic", b"body", key="customer 7")
    receipt: Receipt = producer.publish("topic", b"body", trace_id=1)
    untraced: Receipt = producer.publish("topic", b"body")  # wrong
    producer.publsih("topic", b"body")  # wrong
    producer.publish("topic", 5)  # wrong
    producer.publish("topic", b"body", defer="later")  # wrong
    result = producer.publish_nowait("topic", b"body")
    result.get(timeout=1)
    producer.multipublish("topic", [b"a", b"b"])
    producer.multipublish("topic", [1, 2])  # wrong
Producer("127.0.0.1:4150", lingers=0.002)  # wrong


async def trace(producer: aio.Producer, session: Session) -> None:
    (await producer.publish("topic", b"body", trace_id=1)).trace_id.bit_length()
    (await producer.publish("topic", b"body")).trace_id.bit_length()  # wrong
    for event in session.receive(b""):
        session.fin(event)  # wrong
        session.fin(event) if isinstance(event, Message) else event.send.decode()


async def respond(consumer: aio.Consumer, message: Message) -> None:
    await message.finish()
    message.finish()
    await message.touch()
    await message.requeue(1000)
    await message.body  # wrong


async def respond_to_all(consumer: aio.Consumer, messages: list[Message]) -> None:
    for each in messages:
        await each.finish()


def respond_in_a_thread(consumer: threads.Consumer, message: Message) -> None:
    message.finish()


aio.Consumer("topic", "channel", "127.0.0.1:4150", message_handler=respond, concurrency=8)
aio.Consumer("topic", "channel", "127.0.0.1:4150", batch_handler=respond_to_all)
aio.Consumer("topic", "channel", "127.0.0.1:4150", message_handler=respond_in_a_thread)  # wrong
aio.Consumer("topic", "channel", "127.0.0.1:4150", batch_handler=respond)  # wrong
threads.Consumer("topic", "channel", "127.0.0.1:4150", message_handler=respond_in_a_thread, handler_threads=4)
threads.Consumer("topic", "channel", "127.0.0.1:4150", message_handler=handle)  # wrong
threads.Consumer("topic", "channel", "127.0.0.1:4150", handler_thread=4)  # wrong

drop_in = GnsqConsumer("topic", "channel", "127.0.0.1:4150")
signal: Signal = drop_in.on_giving_up
drop_in.on_finish.connect(handle)
drop_in.on_finnish.connect(handle)  # wrong
producer.on_error.disconnect(5, 6, 7)  # wrong
aio.Consummer("topic", "channel")  # wrong
threads.Consumer("topic", "channel", "127.0.0.1:4150", max_age=60.0, max_age_policy="give_up")
threads.Consumer("topic", "channel", "127.0.0.1:4150", max_age="a minute")  # wrong

metrics = ClientCollector()
metrics.add_consumer("billing", consumer)
metrics.add_consumer("threads", threads.Consumer("topic", "channel", "127.0.0.1:4150"))
metrics.add_consumer("aio", aio.Consumer("topic", "channel", "127.0.0.1:4150"))
metrics.add_consumer("billing", producer)  # wrong
metrics.add_consumer(consumer)  # wrong
metrics.add_producer("web", producer)
metrics.add_producer("threads", threads.Producer("127.0.0.1:4150"))
metrics.add_producer("aio", aio.Producer("127.0.0.1:4150"))
metrics.add_producer("web", consumer)  # wrong

config = ConnectionConfig(heartbeat_interval=10.0)
interval: float = config.heartbeat_interval
ConnectionConfig(heartbeat=10.0)  # wrong

with NsqdHTTPClient("127.0.0.1", 4151) as client:
    client.create_topic("topic")
    client.make_topic("topic")  # wrong

try:
    nsq_fast.Cnsumer("topic", "channel")  # wrong
except NsqError as error:
    consumer.logger.error("%s", error.args)
