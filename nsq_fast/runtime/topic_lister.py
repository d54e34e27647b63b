"""Which topics there are, by what all lookupds say."""

from __future__ import annotations

import msgspec
from gevent import joinall

from nsq_fast.errors import LookupFailed, NsqError

from .lookupd import Lookupd
from .lookupd_list import LookupdList
from .supervised import JobGroup


class TopicListing(msgspec.Struct, frozen=True):
    """Names of topics, and whether every lookupd has said which it knows: then there are no others."""

    names: frozenset[str]
    is_whole: bool


class TopicLister:
    """The answers to /topics.

    Args:
        jobs: run the questions; they end with the poller.
    """

    def __init__(self, lookupds: LookupdList, jobs: JobGroup) -> None:
        self._lookupds = lookupds
        self._jobs = jobs

    def ask(self) -> TopicListing:
        """Ask all lookupds at once, and wait for their answers. Raises LookupFailed when none comes."""
        asked = [self._jobs.start(_topics_of, lookupd) for lookupd in self._lookupds]
        joinall(asked)
        good = [job.value for job in asked if isinstance(job.value, tuple)]
        if not good:
            reason = self._lookupds.failure() or "no reply yet"
            raise LookupFailed(f"no lookupd answered for the list of topics: {reason}")
        return TopicListing(frozenset().union(*good), is_whole=len(good) == len(asked))


def _topics_of(lookupd: Lookupd) -> tuple[str, ...] | None:
    try:
        return lookupd.topics()
    except NsqError as error:
        lookupd.last_error = str(error)
        return None
    finally:
        lookupd.close()
