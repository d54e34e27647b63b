"""Spark in this process, its JVM and its workers: rows out of a channel into the noop sink, or into a topic.

Modes: ``stream``, micro-batches of the journalled reader; ``read``, a table that takes messages out of the channel
through a journal; ``cold``, the first table that a session reads, which leaves the messages where they are; ``write``.
All but ``cold`` are warmed up by the same on other rows.

Variant ``ready rows`` is the floor: Arrow batches that were ready before, in place of the channel; for ``write``, two
processes without Spark that publish lists of bodies.

The figures are those of all processes together. Of a stream they begin with the end of its first micro-batch.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from meter import Meter, emit, settings

BATCHES = 8
PARTITIONS = 2
WARMUPS = 3
IN_FLIGHT, MPUB = 8, 500
POLL = 0.005

job = settings()
is_floor = job["variant"] == "ready rows"
body = b"x" * job["size"]


def main():
    if job["variant"] == "one of two":
        publish(job["count"], lambda: sys.stdin.readline())
    elif is_floor and job["mode"] == "write":
        work_on(publish_in_two, "two")
    else:
        with tempfile.TemporaryDirectory(prefix="nsq-fast-bench-") as folder:
            use_spark(f"{folder}/spark")


def work_on(work, folder):
    """Warm up, then measure: ``work`` gets the path of a place of its own, how many rows, and what measures."""
    if job["mode"] != "cold":
        for number in range(WARMUPS):
            work(f"{folder}_warmup{number}", job["count"] // 2, Warmup(job))
    work(f"{folder}_measured", job["count"], OfAll(job))


# Without Spark


def publish(count, wait=lambda: None):
    from gevent.pool import Pool

    from nsq_fast import Producer

    with Producer(address("nsqds")) as producer:
        producer.multipublish(job["topic"], [body])
        emit(event="ready")
        wait()
        pool = Pool(IN_FLIGHT)
        for _ in range(count // MPUB):
            pool.spawn(producer.multipublish, job["topic"], [body] * MPUB)
        pool.join(raise_error=True)


def publish_in_two(folder, rows, meter):
    topic = f"{job['topic']}_{folder}"
    half = json.dumps({**job, "variant": "one of two", "count": rows // 2, "topic": topic})
    both = [
        subprocess.Popen([sys.executable, __file__, half], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for each in both:
        each.stdout.readline()
    meter.start()
    for each in both:
        each.stdin.close()
    failed = [each for each in both if each.wait()]
    meter.report(rows)
    delete(topic)
    if failed:
        raise SystemExit("a producer failed")


# With Spark


def use_spark(folder):
    spark = session(folder)
    work_on(partial({"stream": stream, "read": read, "cold": read, "write": write}[job["mode"]], spark), folder)
    spark.stop()


def session(folder):
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

    import nsq_fast.spark
    from nsq_fast.spark.trace import local_session

    settings = {"spark.local.dir": folder, "spark.python.daemon.module": "spark_daemon"}
    spark = local_session(f"local[{PARTITIONS}]", settings=settings)
    nsq_fast.spark.register(spark)
    # By its name, so that workers import it rather than get a copy.
    spark.dataSource.register(importlib.import_module("ready_rows").ReadySource)
    return spark


def stream(spark, folder, rows, meter):
    size = job["count"] // BATCHES
    options = {"maxOffsetsPerTrigger": size, "journal": f"{folder}/journal"}
    reader = source(spark.readStream, rows, {"perbatch": size} if is_floor else options)
    writer = reader.load().writeStream.format("noop").option("checkpointLocation", f"{folder}/checkpoint")
    query = writer.trigger(availableNow=True).start()
    while not (done := sum(each["numInputRows"] for each in query.recentProgress)):
        time.sleep(POLL)
        if query.exception() is not None:
            raise SystemExit(str(query.exception()))
    meter.start()
    query.awaitTermination()
    found = sum(each["numInputRows"] for each in query.recentProgress)
    if found != rows:
        raise SystemExit(f"{found} rows of {rows} were read")
    meter.report(rows - done)


def read(spark, folder, rows, meter):
    through = {"consume": "true", "journal": f"{folder}/journal"} if job["mode"] == "read" else {}
    reader = source(spark.read, rows, {} if is_floor else through)
    meter.start()
    reader.load().write.format("noop").mode("append").save()
    meter.report(rows)


def write(spark, folder, rows, meter):
    frame = spark.range(0, rows, 1, PARTITIONS).selectExpr(f"cast(repeat('x', {job['size']}) as binary) body")
    topic = f"{job['topic']}_{Path(folder).name}"
    writer = frame.write.format("nsq").option("nsqd_tcp_addresses", address("nsqds")).option("topic", topic)
    meter.start()
    writer.mode("append").save()
    meter.report(rows)
    delete(topic)


def source(reader, rows, options):
    """A reader with its options, and so many rows to be read."""
    if is_floor:
        return reader.format("ready").options(rows=rows, **options)
    fill(rows)
    servers = {"nsqd_tcp_addresses": address("nsqds"), "nsqd_http_addresses": address("http")}
    where = {"topic": job["topic"], "channel": job["channel"], "reader": "journalled"}
    return reader.format("nsq").options(**servers, **where, **{name: str(value) for name, value in options.items()})


def fill(rows):
    """So many messages are in the channel."""
    from nsq_fast import Producer

    with Producer(address("nsqds")) as producer:
        for _ in range(rows // MPUB):
            producer.multipublish(job["topic"], [body] * MPUB)
    with http() as client:
        while client.stats(job["topic"])["topics"][0]["channels"][0]["depth"] < rows:
            time.sleep(POLL)


def http():
    from nsq_fast.client.admin import NsqdHTTPClient

    return NsqdHTTPClient(*job["http"][0])


def delete(topic):
    """What an earlier write has left in nsqd's memory would slow a later one down."""
    with http() as client:
        client.delete_topic(topic)


def address(of):
    host, port = job[of][0]
    return f"{host}:{port}"


# What is measured


def cpu_seconds():
    """User and system time of this process, and of all that came from it, those that have ended too."""
    found = {int(name): fields for name in os.listdir("/proc") if name.isdigit() and (fields := fields_of(name))}
    ours = {os.getpid()}
    while more := {pid for pid, fields in found.items() if pid not in ours and int(fields[1]) in ours}:
        ours |= more
    return sum(sum(map(int, found[pid][11:15])) for pid in ours) / os.sysconf("SC_CLK_TCK")


class OfAll(Meter):
    cpu = staticmethod(cpu_seconds)


class Warmup(Meter):
    emit = staticmethod(lambda **event: None)


def fields_of(pid):
    """What the system says of a process behind its name (proc(5), /proc/pid/stat); None when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


main()
