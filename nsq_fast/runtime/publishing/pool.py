"""The connections of a producer: to each nsqd a few, always connected or trying to be.

The pool knows which links take publishes; what is sent over them, and what
happens to publishes whose link breaks, is for the ``LinkHandler`` to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from gevent import joinall

from nsq_fast.config import ConnectionConfig, ProducerConfig
from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from nsq_fast.runtime.net.connection import Connection

from .link import Link
from .publish import Command

if TYPE_CHECKING:
    from .link import LinkHandler


class Pool:
    """The links to all nsqds that a producer uses.

    Attributes:
        open: the links that take publishes now: connected, and not stalled. The list object stays the same.
    """

    def __init__(self, connection: ConnectionConfig, config: ProducerConfig, handler: LinkHandler) -> None:
        self.open: list[Link] = []
        self._links: dict[Address, list[Link]] = {}
        self._needs: Counter[Address] = Counter()  # nsqd -> how many need it: the options, and routes
        self._connection_config = connection
        self._config = config
        self._handler = handler

    def __iter__(self) -> Iterator[Link]:
        for links in list(self._links.values()):
            yield from links

    def add(self, addresses: Collection[Address]) -> None:
        """Have links to these nsqds."""
        for address in addresses:
            if address not in self._links:
                links = [
                    Link(address, self._connection_config, self._config, self._handler)
                    for _ in range(self._config.connections_per_nsqd)
                ]
                self._links[address] = links
                for link in links:
                    link.start()

    def exchange(self, before: AbstractSet[Address], after: AbstractSet[Address]) -> None:
        """Somebody who needed some nsqds needs others now; costs what changed, however many there are."""
        self._needs.update(after - before)
        for address in before - after:
            self._needs[address] -= 1
            if not self._needs[address]:
                del self._needs[address]
        self.add(after)

    def retain_needed(self) -> None:
        """Close the idle links to nsqds that nobody needs; the busy ones stay until this is called again."""
        for address in [known for known in self._links if known not in self._needs]:
            if not any(link.conn is not None and link.conn.session.pending_count for link in self._links[address]):
                for link in self._links.pop(address):
                    link.stop()

    def hurry(self) -> None:
        """Publishes wait for a connection."""
        for link in self:
            link.hurry()

    def link_of(self, conn: Connection) -> Link | None:
        """The link whose connection this is now."""
        return next((link for link in self if link.conn is conn), None)

    def owe(self, command: Command | None) -> None:
        """A publish has ended while a reply to ``command`` is due; None: none is."""
        if command is not None and not command.is_overdue and command.conn is not None:
            command.is_overdue = True
            link = self.link_of(command.conn)
            if link is not None:
                link.overdue += 1

    def has_replied_late(self, conn: Connection) -> None:
        """The reply to a command that was overdue has come, or will not come any more."""
        link = self.link_of(conn)
        if link is not None and link.overdue:
            link.overdue -= 1

    def are_down(self, addresses: Collection[Address]) -> bool:
        """Whether none of these nsqds takes publishes, as far as has been tried."""
        links = [link for address in addresses for link in self._links.get(address, ())]
        return all(link.error is not None for link in links)

    def are_tried(self, addresses: Collection[Address]) -> bool:
        """Whether each of these nsqds is connected, or could not be."""
        links = [link for address in addresses for link in self._links.get(address, ())]
        return all(link.conn is not None or link.error is not None for link in links)

    def errors(self) -> list[tuple[Address, NsqError]]:
        """Why nsqds take no publishes: the last error of each of those."""
        return [(link.address, link.error) for link in self if link.error is not None]

    @property
    def connected(self) -> list[Link]:
        """The links with a connection, the stalled ones among them."""
        return [link for link in self if link.conn is not None]

    def close(self, timeout: float | None) -> None:
        """Close every connection after flushing what was written to it."""
        links = list(self)
        for link in links:
            link.stop()
        self._links.clear()
        joinall([link.greenlet for link in links], timeout)
