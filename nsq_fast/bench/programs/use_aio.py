"""nsq_fast.aio as a measured client: consume, publish, roundtrip, idle."""

import asyncio
from time import time_ns

from meter import STAMP_BYTES, Alarm, Meter, connection_options, seconds_until, settings, stamp_of, stamped, ticks

from nsq_fast.aio import Consumer, Producer

job = settings()
meter = Meter(job)
topic = job["topic"]
body = b"x" * job["size"]
padding = b"x" * max(0, job["size"] - STAMP_BYTES)
NSQDS = [tuple(address) for address in job["nsqds"]]
OPTIONS = connection_options(job)


def make_consumer(handle):
    options = dict(OPTIONS)
    if job["kind"] == "consume" and job["concurrency"] > 1:
        options["concurrency"] = job["concurrency"]
    return Consumer(topic, job["channel"], NSQDS, message_handler=handle, max_in_flight=job["max_in_flight"], **options)


def plain_handler(take=meter.take, marks=meter.marks):
    async def handle(consumer, message):
        if take() in marks and meter.mark():
            await consumer.close(drain=False)

    return handle


def handler():
    plain, pause = plain_handler(), job["handler_sleep"]
    if pause:

        async def handle(consumer, message):
            await asyncio.sleep(pause)
            await plain(consumer, message)

        return handle
    if job["rate"]:

        async def handle(consumer, message):
            meter.seen(stamp_of(message.body))
            await plain(consumer, message)

        return handle
    return plain


async def consume():
    async with make_consumer(handler()) as consumer:
        await consumer.join()


async def publish():
    async with Producer(NSQDS[:1], **OPTIONS) as producer:
        await publish_some(producer, job["warmup"])
        meter.start()
        await publish_some(producer, job["count"])
        meter.report(job["count"])


async def publish_some(producer, count):
    if job["rate"]:
        await at_rate(producer, count)
    elif job["mode"] == "single":
        for _ in range(count):
            start = time_ns()
            await producer.publish(topic, body)
            meter.seen(start)
    elif job["mode"] == "concurrent":
        share = count // job["concurrency"]
        await asyncio.gather(*(one_by_one(producer, share) for _ in range(job["concurrency"])))
    else:
        batch = [body] * job["batch"]
        for _ in range(count // job["batch"]):
            await producer.multipublish(topic, batch)


async def one_by_one(producer, count):
    for _ in range(count):
        await producer.publish(topic, body)


async def punctual_ticks(rate, count):
    """``ticks``, each when it is due; tasks run meanwhile."""
    try:
        alarm = Alarm()
    except OSError:
        for due, many in ticks(rate, count):
            await asyncio.sleep(seconds_until(due))
            yield due, many
        return
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


async def at_rate(producer, count):
    async for due, many in punctual_ticks(job["rate"], count):
        for _ in range(many):
            result = producer.publish_nowait(topic, body)
            result.add_done_callback(lambda _, due=due: meter.seen(due))
    await result


async def roundtrip():
    window = asyncio.Semaphore(job["concurrency"])
    plain = plain_handler()

    async def handle(consumer, message):
        meter.seen(stamp_of(message.body))
        window.release()
        await plain(consumer, message)

    async with Producer(NSQDS[:1], **OPTIONS) as producer, make_consumer(handle) as consumer:
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


async def idle():
    async with make_consumer(plain_handler()):
        await asyncio.sleep(job["settle"])
        meter.start()
        await asyncio.sleep(job["duration"])
        meter.report(0)


asyncio.run({"consume": consume, "publish": publish, "roundtrip": roundtrip, "idle": idle}[job["kind"]]())
