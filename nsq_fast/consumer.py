"""Consumer: take the messages of some topics from all the nsqds that have them, and answer every one of them.

This is the face for gevent: calls block, handlers run in worker greenlets or on native threads. What every consumer is
stands in ``nsq_fast.client.consumer``.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gevent import GreenletExit, get_hub, getcurrent
from msgspec import UNSET

from nsq_fast._codec import Message
from nsq_fast.client.connection import Connection
from nsq_fast.client.consumer import ConsumerCore, warn_unclosed
from nsq_fast.client.gevent_loop import GeventLoop, run
from nsq_fast.client.give_up import message_name
from nsq_fast.client.greenlets import (
    CopyEnded,
    OwnerThread,
    SupervisedLoop,
    Waiters,
    check_can_wait,
    get_ident,
    is_interrupting,
    keep,
    known,
    loop_turns,
    may_wait,
    tell_forks,
)
from nsq_fast.client.loop import EndTimeout, check_close_timeout
from nsq_fast.client.signals import is_heard, receivers
from nsq_fast.client.workers import BatchHandler, Cursor, Handler, Worker, WorkerPool, check_handler
from nsq_fast.errors import CallInvalid
from nsq_fast.log_events import HANDLER_KILLED

if TYPE_CHECKING:
    from nsq_fast._dispatch import HandlerLimit, PromptFins
    from nsq_fast.client.start_position import StartPositions
    from nsq_fast.client.subscription import Subscription
    from nsq_fast.config import ConnectionConfig
    from nsq_fast.names import Address

    from .bridge import HandlerExecutor


class Consumer(ConsumerCore[Handler, BatchHandler]):
    """Consume one topic, or several, through a channel.

    A handler is called as ``message_handler(consumer, message)``. When it returns, the message is finished, unless
    the handler answered it (``message.finish()``, ``message.requeue()``) or called ``message.enable_async()`` to
    answer later. RequeueMessage requeues it; any other exception is logged and requeues it as a failure. By default
    one handler runs at a time for each nsqd, in the order of arrival; ``concurrency=N`` runs N over all.

    Instead of a handler, iterate: ``for message in consumer``. Asking for the next message finishes the one before.

    Args:
        topic: what to consume: the name of a topic, several names, or a compiled regular expression
            (``re.compile("orders_.*")``) that the whole name has to match. Topics that match later are taken up when
            lookup lists them. ``message.topic`` says where a message came from.
        channel: of each of these topics. ``#ephemeral`` channels vanish with their last consumer.
        nsqd_tcp_addresses: nsqds to connect to, always; 'host:port', or several. Default port 4150.
        lookupd_http_addresses: nsqlookupds that know which nsqds have the topic. Default port 4161.
        name: of the logger; default ``nsq_fast.consumer.<topic>.<channel>``; of several topics ``<first>+<others>``.
        message_handler: called with every message.
        max_tries: attempts before a message goes to ``give_up``; 0: no limit.
        max_in_flight: most messages held at once, over all topics and connections; None: one for each connection,
            and no fewer than handlers may run. With a number below that of the connections they take turns.
        requeue_delay: ms until a failed message is delivered again; None: computed from its attempts.
        lookupd_poll_interval, lookupd_poll_jitter: s, and the share that chance adds.
        low_ready_idle_timeout: s after which an idle connection passes its RDY on, when there are more
            connections than ``max_in_flight``.
        max_backoff_duration: longest pause of backoff in s; 0: no backoff.
        backoff_on_requeue: whether RequeueMessage counts as a failure for backoff.
        handler_threads: N runs handlers on N native threads, N over all connections at once: for handlers that block.
            There ``consumer.close()`` and the messages' own methods may be called, and no other method of ours.
        batch_handler: in place of ``message_handler``; called as ``batch_handler(consumer, messages)`` with at most
            ``batch_size`` messages of one topic, as many as are there. It may answer each by itself; the others are
            finished when it returns and requeued when it raises.
        give_up: called as ``give_up(consumer, message)`` for a message that exceeds ``max_tries``; see ``give_up``.
        blocked_policy: what becomes of an ordered message with more attempts than ``attempts_threshold``: ``pause``
            (its handler goes on trying, after pauses that grow), ``retry`` (without pauses), ``stop`` (the consumer),
            or a give-up policy, in place of the handler.
        max_age_policy: what becomes of a message older than the option ``max_age``: ``finish``, ``give_up`` (it goes
            where those go that exceed ``max_tries``), or another give-up policy.
        start_position: redesigned: where the channel begins, for everybody on it: 'end', a datetime,
            'timestamp:<unix seconds>', 'offset:<bytes>', 'count:<messages>', or a mapping of partition numbers to
            these. It is set where the channel does not exist yet or has never confirmed a message; a restart, or a
            second instance, goes on where the channel is. ``start_position_policy='each_start'`` sets it at each
            start of each instance: then what the others have not handled is skipped, or comes again. Needs lookup.
        trace: the trace log; default: the one that all share. Nothing is recorded unless it is switched on.
        options: any other option of ConsumerConfig, ConnectionConfig or LookupConfig.

    Raises ConfigError (a ValueError) or NameInvalid for an argument that is wrong.

    The signals ``on_...`` are blinker signals; the sender is the consumer.
    """

    loop: GeventLoop

    def _build(self, start: StartPositions | None) -> None:
        if not hasattr(self, "_thread"):
            self._thread = OwnerThread()
            tell_forks(self)
        self._executor: HandlerExecutor | None = None
        super()._build(start)

    def forked(self) -> None:
        """In the child of a fork: not started, whatever the parent's is; ``start`` makes connections of its own."""
        if not self._is_started:
            return
        keep(vars(self).copy())
        self._thread.release()
        was_closing = self._is_closing
        self.flow.stop()
        self.deadlines.stop()
        self._subscriptions.freeze()
        self.ordered.forked()
        self._build(None)
        self._is_closing = self._is_closed = was_closing

    # Running

    def start(self, block: bool = True) -> None:
        """Begin to consume. With ``block``, return only when the consumer is closed.

        Raises CallInvalid when there is neither a handler nor a receiver of ``on_message``, NotRunning after close;
        with ``block`` also what ``join`` raises.
        """
        self._thread.check("Consumer.start()")
        if not self.acknowledger.has_handler:
            raise CallInvalid("no receivers connected to on_message, and no message_handler or batch_handler")
        if block:
            check_can_wait("Consumer.start()", "; or start(block=False)")
        self._start(is_iterated=False)
        if block:
            self.join()

    def _start(self, is_iterated: bool) -> None:
        was_started = self._is_started
        if not self._is_closing and not was_started and is_heard(self, "on_message"):
            for receiver in receivers(self.on_message, self):
                check_handler("a receiver of on_message", receiver, "message")
        if not self._is_closing and not was_started:
            self._prepare(is_iterated)
        super()._start(is_iterated)
        if not was_started:
            run(self._subscribe())

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the consumer is closed; False if ``timeout`` seconds passed first.

        Raises NotRunning when it would wait for ever: without a timeout, before ``start`` and ``close``.

        ``raise_error`` is taken for gnsq's sake: lost connections are made again, so there is no error to raise.
        What no new attempt can cure is raised always, and closes the consumer: a subscription that the servers refuse
        (OrderedSubRequired, ExtendSubRequired, ConfigError...) when there is no other, OrderViolated and
        PartitionBlocked when a policy says ``stop``.
        """
        self._thread.check("Consumer.join()")
        return run(self._wait_closed(timeout))

    def __enter__(self) -> Consumer:
        self._thread.check("Consumer.start()")
        self._start(is_iterated=not self.acknowledger.has_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Message]:
        """Take messages one by one, until the consumer is closed; starts it if need be.

        Asking for the next message finishes the one before, unless it was answered or made asynchronous. A message
        at which the loop is left early is requeued, unless it was answered. The consumer goes on then, and holds what
        came meanwhile: ``close`` it, or use it in a ``with`` block.
        """
        self._thread.check("Consumer.iter()")
        check_can_wait("Consumer.iter()")
        if self.acknowledger.has_handler:
            raise CallInvalid("a consumer with a handler cannot be iterated")
        if not self._is_started:
            self._start(is_iterated=True)
        pool = self.pools.shared
        if pool is None:
            raise CallInvalid("a consumer that was started with a handler cannot be iterated")
        return self._messages(pool)

    def _messages(self, pool: WorkerPool) -> Iterator[Message]:
        cursor = Cursor(pool, getcurrent())
        try:
            while True:
                message = cursor.next()
                if message is not None:
                    yield message
                    continue
                inbound = pool.take()
                if inbound is None:
                    break
                cursor.begin(inbound)
        finally:
            cursor.close()
        if self.failure is not None:
            raise self.failure

    # Closing

    def close(self, drain: bool = True, timeout: EndTimeout = UNSET) -> None:
        """Stop consuming, gracefully: running handlers end, every answer is sent, what was not begun is given back.

        Called in a handler, in a receiver of a signal, in a handler of ``signal.signal`` or in the hub it only begins
        to close; ``join`` waits for the end. Later calls wait for the first.

        Args:
            drain: let running handlers and asynchronous messages be answered first.
            timeout: s that all of it may take; None: draining may take for ever. Default: the option ``close_timeout``.
        """
        is_in_handler = self._thread.is_served_here
        if not is_in_handler:
            self._thread.check("Consumer.close()")
        check_close_timeout(timeout)
        if is_in_handler:
            self._thread.hand_over(self.begin_closing, drain, timeout)
            return
        if is_interrupting():
            get_hub().loop.run_callback(self.begin_closing, drain, timeout)
            return
        self.begin_closing(drain, timeout)
        if may_wait(worker.runs_in for worker in self.pools.workers()) and self._has_closed is not None:
            run(self._has_closed.wait())

    def _stop_parts(self) -> None:
        super()._stop_parts()
        if self._executor is not None:
            self._executor.stop()

    def _change(self, call: str, function: Callable[[Any], None], value: Any) -> None:
        self._thread.check(call)
        function(value)

    # What is gevent's

    def new_loop(self) -> GeventLoop:
        return GeventLoop.here()

    def new_connection(self, address: Address, config: ConnectionConfig, owner: Subscription) -> Connection:
        connection = super().new_connection(address, config, owner)
        connection.reads_on = True
        return connection

    def _prepare(self, is_iterated: bool) -> None:
        """It is about to begin, in the calling thread."""
        self._thread.claim()
        threads = self.config.handler_threads
        self._executor = self._new_executor()
        if threads and self._executor is None and not is_iterated:
            from .bridge import HandlerThreads  # most handlers run in greenlets

            self._executor = HandlerThreads(min(threads, self.config.concurrency or threads), self._thread)

    def _new_executor(self) -> HandlerExecutor | None:
        """Where its handlers run, if that is another place than the options say."""
        return None

    def new_pool(self, limit: HandlerLimit, prompt: PromptFins) -> WorkerPool:
        waiters = Waiters()
        pool = WorkerPool(self.acknowledger, limit, prompt, loop_turns(), waiters.wait, waiters.release)
        tell_forks(pool)
        return pool

    def new_worker(self, pool: WorkerPool) -> Worker:
        if self._executor is None:
            return Worker(pool)
        from .bridge import ExecutorWorker

        return ExecutorWorker(pool, self._executor)

    def start_worker(self, worker: Worker, name: str) -> None:
        runner = worker.runs_in = SupervisedLoop(self.supervisor, name, worker.run)
        runner.runs_handlers = True
        runner.start()

    def is_failure(self, error: BaseException) -> bool:
        return not isinstance(error, (SystemExit, KeyboardInterrupt, GreenletExit))

    def escaped(self, error: BaseException, message: Message) -> None:
        if isinstance(error, CopyEnded):
            return
        if isinstance(error, GreenletExit):
            text = "handler of message %s was killed; requeuing it"
            self.logger.warning(text, message_name(message), extra=HANDLER_KILLED)
            return
        # KeyboardInterrupt and SystemExit go to the main greenlet, as from any greenlet; the worker goes on.
        get_hub().handle_error(getcurrent(), type(error), error, error.__traceback__)

    def apart(self, function: Callable[..., object], *arguments: Any) -> Any:
        def work() -> tuple[Any, BaseException | None]:
            try:
                return function(*arguments), None
            except BaseException as error:  # which a thread of the pool would print, too
                return None, error

        result, error = get_hub().threadpool.apply(work)
        if error is not None:
            raise error
        return result

    def dead_letters(self, options: dict[str, Any]) -> Any:
        from .producer import DeadLetters  # most consumers have no policy that publishes

        return DeadLetters(list(self.nsqd_addresses), list(self.lookupd_addresses), **options)

    def _count_orphaned(self) -> int:
        is_here = self._thread.ident in (0, get_ident())
        return self.pools.count_orphans() if is_here else self.pools.orphaned


@atexit.register
def _at_exit() -> None:
    for consumer in known(Consumer):
        if consumer.is_running and consumer.ident == get_ident():  # those of the hub thread are closed there
            warn_unclosed(consumer)
