"""A client on asyncio, the first argument says which: aio (consume, publish, roundtrip, idle), ansq or asyncnsq
(consume, publish). That of nsq_fast is aio."""

import asyncio
import os
import sys
from time import time_ns

from meter import STAMP_BYTES, Alarm, Meter, connection_options, settings, stamp_of, stamped, ticks

job = settings()
meter = Meter(job)
topic = job["topic"]
body = b"x" * job["size"]
padding = b"x" * max(0, job["size"] - STAMP_BYTES)
NSQDS = [tuple(address) for address in job["nsqds"]]
HOST, PORT = NSQDS[0]


async def publish(one, many, nowait=None):
    """The modes of publishing: ``await one(topic, body)``, ``await many(topic, bodies)``."""
    await publish_some(job["warmup"], one, many, nowait)
    meter.start()
    await publish_some(job["count"], one, many, nowait)
    meter.report(job["count"])


async def publish_some(count, one, many, nowait):
    if job["rate"]:
        await at_rate(count, nowait)
    elif job["mode"] == "single":
        for _ in range(count):
            start = time_ns()
            await one(topic, body)
            meter.seen(start)
    elif job["mode"] == "concurrent":
        share = count // job["concurrency"]
        await asyncio.gather(*(one_by_one(one, share) for _ in range(job["concurrency"])))
    else:
        batch = [body] * job["batch"]
        for _ in range(count // job["batch"]):
            await many(topic, batch)


async def one_by_one(one, count):
    for _ in range(count):
        await one(topic, body)


async def punctual_ticks(rate, count):
    """``ticks``, each when it is due; tasks run meanwhile."""
    alarm = Alarm()
    rung = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(alarm.descriptor, lambda: (alarm.clear(), rung.set()))
    for due, many in ticks(rate, count):
        if time_ns() < due:
            rung.clear()
            alarm.set(due)
            await rung.wait()
        else:
            await asyncio.sleep(0)
        yield due, many
    loop.remove_reader(alarm.descriptor)


async def at_rate(count, nowait):
    async for due, many in punctual_ticks(job["rate"], count):
        for _ in range(many):
            result = nowait(topic, body)
            result.add_done_callback(lambda _, due=due: meter.seen(due))
    await result


# nsq_fast.aio


def make_consumer(handle):
    from nsq_fast.aio import Consumer

    options = connection_options(job)
    if job["kind"] == "consume" and job["concurrency"] > 1:
        options["concurrency"] = job["concurrency"]
    return Consumer(topic, job["channel"], NSQDS, message_handler=handle, max_in_flight=job["max_in_flight"], **options)


def handler(take=meter.take, marks=meter.marks, answered=None):
    pause, is_timed = job["handler_sleep"], job["rate"] or answered

    async def plain(consumer, message):
        if take() in marks and meter.mark():
            await consumer.close(drain=False)

    async def handle(consumer, message):
        if pause:
            await asyncio.sleep(pause)
        if is_timed:
            meter.seen(stamp_of(message.body))
        if answered:
            answered()
        await plain(consumer, message)

    return handle if pause or is_timed else plain


async def aio():
    from nsq_fast.aio import Producer

    if job["kind"] == "consume":
        async with make_consumer(handler()) as consumer:
            await consumer.join()
    elif job["kind"] == "idle":
        async with make_consumer(handler()):
            await asyncio.sleep(job["settle"])
            meter.start()
            await asyncio.sleep(job["duration"])
            meter.report(0)
    elif job["kind"] == "publish":
        async with Producer(NSQDS[:1], **connection_options(job)) as producer:
            await publish(producer.publish, producer.multipublish, producer.publish_nowait)
    else:
        window = asyncio.Semaphore(job["concurrency"])
        producer = Producer(NSQDS[:1], **connection_options(job))
        async with producer, make_consumer(handler(answered=window.release)) as consumer:
            sending = asyncio.create_task(send_stamped(producer, window))
            await consumer.join()
            sending.cancel()


async def send_stamped(producer, window):
    total = job["count"] + job["beyond"]
    if not job["rate"]:
        for _ in range(total):
            await window.acquire()
            producer.publish_nowait(topic, stamped(time_ns(), padding))
        return
    async for due, many in punctual_ticks(job["rate"], total):
        for _ in range(many):
            producer.publish_nowait(topic, stamped(due, padding))


# Others


async def take_all(messages, take=meter.take, marks=meter.marks):
    """Take, count and finish what an asynchronous iterator brings."""
    is_timed = bool(job["rate"])
    async for message in messages:
        if is_timed:
            meter.seen(stamp_of(message.body))
        await message.fin()
        if take() in marks and meter.mark():
            return


async def ansq():
    import ansq

    if job["kind"] == "publish":
        writer = await ansq.create_writer([f"{HOST}:{PORT}"])
        await publish(writer.pub, lambda topic, bodies: writer.mpub(topic, *bodies))
    else:
        connection = await ansq.open_connection(HOST, PORT)
        await connection.subscribe(topic, job["channel"], job["max_in_flight"])
        await take_all(connection.messages())
    os._exit(0)  # its reconnecting tasks would outlive the measurement


async def asyncnsq():
    from asyncnsq import create_reader, create_writer

    if job["kind"] == "publish":
        writer = await create_writer(HOST, PORT)
        await publish(writer.pub, lambda topic, bodies: writer.mpub(topic, *bodies))
    else:
        reader = await create_reader([f"{HOST}:{PORT}"], max_in_flight=job["max_in_flight"])
        await reader.subscribe(topic, job["channel"])
        await take_all(reader.messages())
    os._exit(0)


asyncio.run({"aio": aio, "ansq": ansq, "asyncnsq": asyncnsq}[sys.argv[1]]())
