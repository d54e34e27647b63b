"""ColumnProducer: a Producer that also takes messages as columns.

For programs that hold messages in Arrow's layout and publish them by the
hundred thousand. What a publish goes through is the producer's own: queues,
order, retries, deadlines, back-pressure.
"""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from gevent.event import AsyncResult

from nsq_fast._codec import Records
from nsq_fast.client.gevent_loop import run
from nsq_fast.client.publishes import PublishOptions
from nsq_fast.client.routing import TopicRoute
from nsq_fast.errors import BodyInvalid, ConfigError, NoNsqd
from nsq_fast.protocol.publishing import RowsForm
from nsq_fast.protocol.publishing import StoredRows as StoredRows

from .producer import Headers, Producer

# Lookup is asked again so often (s) while it does not say where a topic lives.
_ASK_AGAIN = 0.25
_ANY_COUNT = 2**31 - 1


class TopicLayout(NamedTuple):
    """What is known of a topic before anything is published to it.

    Attributes:
        is_partitioned: whether its servers have partitions.
        partition_num: how many the topic has, available or not; 0: it has none, or, without lookup, nobody says.
        is_ext: whether messages may have headers; None: nobody says.
    """

    is_partitioned: bool
    partition_num: int
    is_ext: bool | None


class ColumnProducer(Producer):
    """Publishes columns; otherwise a Producer.

    The order that a Producer promises for one partition holds for ``publish_rows`` with ``partition`` too.
    """

    def layout(self, topic: str, timeout: float | None = None) -> TopicLayout:
        """Wait until it is known what servers take a topic, and each of them is connected or could not be.

        So rows that take turns find all of them. Without lookup one nsqd that is connected stands for all.
        Args:
            timeout: seconds; None: the option ``publish_timeout``.
        Raises NameInvalid; NoNsqd when that does not become known in time.
        """
        deadline = self._deadline(timeout)
        route = self._route(topic)
        sender = self._sender
        while (found := self._known(route)) is None:
            left = deadline - monotonic()
            if left <= 0:
                text = f"no nsqd is known to take topic {topic!r}"
                raise sender.nowhere(NoNsqd, text, topic)
            sender.pool.hurry()
            sender.routing.refresh(topic)
            sender.news.clear()
            run(sender.news.wait(min(left, _ASK_AGAIN)))
        return found

    def _known(self, route: TopicRoute) -> TopicLayout | None:
        addresses = set(self.nsqd_addresses) if route.addresses is None else route.addresses
        if not self._sender.pool.are_tried(addresses):
            return None
        if route.has_lookup:
            is_known = route.is_partitioned or route.is_plain
            return TopicLayout(route.is_partitioned, route.partition_num, route.is_ext) if is_known else None
        for link in self._sender.pool.open:
            if link.conn is not None:
                return TopicLayout(link.conn.session.dialect.has_partitions, 0, None)
        return None

    def header(self, topic: str, headers: Headers, tag: str | None, trace_id: int | None) -> bytes:
        """The JSON of an ext header, as ``Records`` takes it. Raises ConfigError, BodyInvalid, TypeError."""
        return self._composer.message_form(self._route(topic), trace_id, headers, tag, is_batch=True).header

    def publish_rows(
        self,
        topic: str,
        records: Records,
        rows: bytes | None = None,
        start: int = 0,
        stop: int | None = None,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        is_trace_optional: bool = False,
    ) -> AsyncResult[StoredRows]:
        """Publish rows with one command, which the server stores as a whole or not at all.

        Blocks while there is no room below ``max_pending``, not for the reply. The rows must make a command that the
        server takes: see ``Records.find_misfit`` and ``Records.cut``.

        Args:
            records: the messages, with trace ids or headers where they have any. Its buffers must not change.
            rows, start, stop: which of them, see ``Records``.
            partition: its number. Those to one partition are stored in the order of the calls; None: in turn.
            timeout: seconds for all of it, retries included; None: the option ``publish_timeout``.
            is_trace_optional: servers that cannot trace take the rows without their trace ids.

        The result, or the error: as those of ``publish``; ConfigError for rows that there are not.
        """
        route = self._route(topic)
        deadline = self._deadline(timeout)
        end = (records.count if rows is None else len(rows) // 4) if stop is None else stop
        try:
            parts = records.cut(_ANY_COUNT, self.config.max_body_size, rows, start, end)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rows, start, stop: {error}") from error
        if len(parts) != 1:
            raise BodyInvalid(f"rows[{start}:{end}]: empty, or above max_body_size={self.config.max_body_size}")
        form = RowsForm(records, rows, start, end, is_optional=is_trace_optional)
        publish = self._bound(route, b"", form, deadline, PublishOptions(partition=partition), end - start)
        result: AsyncResult[StoredRows] = AsyncResult()
        publish.promised = result
        run(self._enter(publish, True))
        return result
