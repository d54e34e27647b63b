"""One publisher or consumer that uses a client as its documents do; go_nsq/main.go is the same in Go.

``program.py LIBRARY publish|consume HOST:PORT TOPIC WORKERS PAUSE``. A line of standard input ends it; then it writes
``[number, outcome, seconds since the epoch]`` of each publish, or of each message that its handler got.
"""

from gevent import monkey

monkey.patch_all()

import importlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

import gevent  # noqa: E402
from gevent.fileobject import FileObject  # noqa: E402


def main(library, role, address, topic, workers, pause):
    package = importlib.import_module(library)
    lines = []

    def write(number, outcome):
        lines.append(json.dumps([number, outcome, time.time()]))

    def publish(producer, numbers, is_over):
        while not is_over:
            gevent.sleep(float(pause))  # sleep: the rate
            number = next(numbers)
            try:
                producer.publish(topic, b"%d" % number)
            except Exception as error:
                write(number, f"{type(error).__name__}: {error}")
            else:
                write(number, "OK")

    def handle(consumer, message):
        write(int(message.body), "handled")

    stdin, is_over = FileObject(sys.stdin), []
    if role == "publish":
        producer = package.Producer([address])
        producer.start()
        numbers = itertools.count(1)
        callers = [gevent.spawn(publish, producer, numbers, is_over) for _ in range(int(workers))]
        stdin.readline()
        is_over.append(True)
        gevent.joinall(callers, timeout=60)
        producer.close()
    else:
        consumer = package.Consumer(
            topic, "channel", nsqd_tcp_addresses=[address], message_handler=handle, max_in_flight=50, max_tries=0
        )
        consumer.start(block=False)
        stdin.readline()
        consumer.close()
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
