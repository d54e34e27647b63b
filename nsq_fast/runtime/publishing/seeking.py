"""Looking for a link, or a leader, that publishes wait for: again and again, more and more rarely."""

from __future__ import annotations

import random
from collections.abc import Callable

from nsq_fast.protocol.retry import RetryPolicy, retry_delay

from .destination import Queue


class Seeker:
    """Keeps queues that are stranded from being forgotten.

    Args:
        policy: of it, the pauses between attempts.
        later: calls a function after some seconds.
        hurry: makes links connect soon.
        refresh: asks lookup about a topic; None where there is none.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        later: Callable[[float, Callable[[], object]], object],
        hurry: Callable[[], object],
        refresh: Callable[[str], object] | None,
    ) -> None:
        self._policy = policy
        self._later = later
        self._hurry = hurry
        self._refresh = refresh

    def seek(self, queue: Queue) -> None:
        """Publishes wait in a queue, and no link takes them."""
        self._hurry()
        if self._refresh is not None and not queue.is_sought:
            queue.is_sought = True
            queue.seeks += 1
            delay = retry_delay(queue.seeks, self._policy, random.random, for_leader=True)
            self._later(delay, lambda: self._seek_on(queue))

    def _seek_on(self, queue: Queue) -> None:
        queue.is_sought = False
        if queue.is_stranded and self._refresh is not None:
            self._refresh(queue.topic)
            self.seek(queue)
        else:
            queue.seeks = 0
