"""CPU that one poll of lookup costs a consumer of many topics: ``python bench/lookup_poll.py --topics 3000``.

The answers of the lookupds are made beforehand, each in another order as the original's are; what is measured is
reading them, uniting them, and what the subscriptions do with the result. HTTP is left out, and so are connections:
the first poll makes the subscriptions, the others tell nothing new.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from time import process_time

import click

from nsq_fast import Consumer
from nsq_fast.client.lookup import PolledTopic
from nsq_fast.config import LookupConfig
from nsq_fast.protocol.topology import parse_lookup


def answer(nsqds: range, lookupd: int, chance: random.Random) -> bytes:
    """What a lookupd says of a topic that these nsqds have."""
    producers = [
        {
            "remote_address": f"10.0.0.{number}:{50000 + lookupd}",
            "hostname": f"host{number}",
            "broadcast_address": f"10.0.0.{number}",
            "tcp_port": 4150,
            "http_port": 4151,
            "version": "1.3.0",
        }
        for number in nsqds
    ]
    chance.shuffle(producers)
    return json.dumps({"channels": ["ch"], "producers": producers}).encode()


def polls(topics: list[str], nsqds: int, lookupds: int, count: int) -> list[tuple[float, float, float]]:
    """CPU seconds of each poll: reading, uniting, following."""
    chance = random.Random(1)
    consumer = Consumer(topics, "ch", message_handler=print, lookupd_http_addresses="127.0.0.1:1")
    polled = [PolledTopic(name, LookupConfig()) for name in topics]
    result = []
    for _ in range(count):
        bodies = [[answer(range(nsqds), number, chance) for number in range(lookupds)] for _ in topics]
        moments = [process_time()]
        answers = [[parse_lookup(body) for body in each] for each in bodies]
        moments.append(process_time())
        for topic, each in zip(polled, answers, strict=True):
            topic.answers = {number: (1, answer) for number, answer in enumerate(each)}  # type: ignore[misc]
            topic.take(topic.unite(), 0.0)
        found = [topic.topology for topic in polled]
        moments.append(process_time())
        for name, topology in zip(topics, found, strict=True):
            consumer._subscriptions.on_topology(name, topology)
        moments.append(process_time())
        read, united, followed = (after - before for before, after in pairwise(moments))
        result.append((read, united, followed))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=3000)
    parser.add_argument("--nsqds", type=int, default=1, help="of each topic")
    parser.add_argument("--lookupds", type=int, default=3)
    given = parser.parse_args()
    names = [f"t{number}" for number in range(given.topics)]
    click.echo("poll  reading  uniting  following   (ms of CPU)")
    for number, (read, united, followed) in enumerate(polls(names, given.nsqds, given.lookupds, 3), 1):
        click.echo(f"{number:4}  {read * 1e3:7.0f}  {united * 1e3:7.0f}  {followed * 1e3:9.0f}")


if __name__ == "__main__":
    main()
