"""Count the messages in a recording of what an nsqd sent: ``python count.py FILE``."""

import sys

from counter import Counter

counter = Counter()
with open(sys.argv[1], "rb") as stream:
    while chunk := stream.read(65536):
        counter.feed(chunk)
print(counter.messages, counter.retried, counter.bytes, counter.oldest, len(counter.errors))
