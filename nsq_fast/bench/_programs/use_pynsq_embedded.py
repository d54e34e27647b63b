"""pynsq with the parser of nsq_fast in it, as a measured client: consume.

pynsq's Reader, with its RDY, backoff and handler rules, stays as it is. Its connection class is the place where a
parser is put in: here it reads chunks instead of a size and a body for each frame, takes messages from FrameReader,
and sends the FINs of one turn of the loop together.
"""

import sys
import time
from pathlib import Path

import nsq
import nsq.reader
from nsq import event, protocol
from tornado.ioloop import IOLoop

sys.path.append(str(Path(__file__).parents[3]))  # an interpreter that has pynsq need not have nsq_fast

from nsq_fast import _codec
from nsq_fast._codec import Message
from nsq_fast._frame import HEARTBEAT, ErrorFrame, FrameReader


class EmbeddedConn(nsq.AsyncConn):
    """A connection of pynsq around nsq_fast's reader; it is the responder of its messages."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._frames = FrameReader(responder=self)
        self._finished = []

    def _start_read(self):
        if self.stream is not None:
            IOLoop.current().add_future(self.stream.read_bytes(65536, partial=True), self._on_chunk)

    def _on_chunk(self, future):
        try:
            frames = self._frames.feed(future.result())
        except Exception as error:
            self.close()
            self.trigger(event.ERROR, conn=self, error=error)
            return
        self.last_recv_timestamp = time.time()
        if self._frames.message_count:
            self.last_msg_timestamp = self.last_recv_timestamp
            self.in_flight += self._frames.message_count
        for frame in frames:
            if frame.__class__ is Message:
                self.trigger(event.MESSAGE, conn=self, message=frame)
            elif frame is HEARTBEAT:
                self.send(protocol.nop())
                self.trigger(event.HEARTBEAT, conn=self)
            elif isinstance(frame, ErrorFrame):
                self.trigger(event.ERROR, conn=self, error=frame.error)
            else:
                self.trigger(event.RESPONSE, conn=self, data=frame.data)
        self._start_read()

    # What messages call

    def finish(self, message):
        self.trigger(event.RESUME, conn=self)
        self.in_flight -= 1
        if not self._finished:
            IOLoop.current().add_callback(self._send_finished)
        self._finished.append(message)

    def requeue(self, message, time_ms=None, backoff=True):
        self._on_message_requeue(message, backoff=backoff, time_ms=-1 if time_ms is None else time_ms)

    def touch(self, message):
        self._on_message_touch(message)

    def _send_finished(self):
        finished, self._finished = self._finished, []
        self.send(_codec.fin_many(finished))


nsq.reader.AsyncConn = EmbeddedConn

import use_reader  # noqa: E402, F401  # the same program, on the other connection
