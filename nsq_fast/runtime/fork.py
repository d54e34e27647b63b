"""What a fork leaves in the child: copies of sockets and greenlets that belong to the parent.

gevent lets greenlets survive a fork, and the kernel lets file descriptors; so
without this the child would go on with the parent's conversations. Here every
socket is closed in the child before it runs anything (which the parent and the
server do not notice), our greenlets and timers end, and Consumer and Producer
begin anew. All of it happens at the fork; messages and publishes are not
checked for anything.
"""

from __future__ import annotations

import os
from socket import close as close_descriptor  # unlike os.close this one is never patched
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

from gevent import Greenlet as _Greenlet
from gevent import GreenletExit, get_hub, getcurrent, reinit

T = TypeVar("T")


if TYPE_CHECKING:

    class Forkable(Protocol):
        """Something of which a child must not use the parent's."""

        def forked(self) -> None:
            """Called in the child, before anything else runs there. It must not switch to another greenlet."""


_known: WeakSet[Any] = WeakSet()
# Greenlets of the program that were waiting for one of our objects: they must neither be woken nor collected, which
# would run their ``finally`` clauses in the child.
_kept: list[object] = []


def tell_forks(thing: Forkable) -> None:
    """Call ``thing.forked()`` in every child that is forked while ``thing`` lives."""
    _known.add(thing)


def known(kind: type[T]) -> list[T]:
    """The things of this kind that are told of forks."""
    while True:
        try:
            return [thing for thing in _known if isinstance(thing, kind)]
        except RuntimeError:  # noqa: PERF203  # another thread has added one in the middle
            continue


def keep(*parts: object) -> None:
    """In the child: hold on to what greenlets of the program may be waiting for."""
    _kept.extend(parts)


class CopyEnded(GreenletExit):
    """Raised in the copy of a greenlet that belongs to the parent."""


class _ParentsOnly(_Greenlet):  # type: ignore[type-arg]  # not subscriptable when it runs
    """A greenlet whose copy ends in the child, unless it is the one that forked."""

    is_copy = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tell_forks(self)

    def forked(self) -> None:
        """In the child of a fork: end."""
        # Greenlets of other threads are not running any more: the fork left their threads behind.
        if self and self is not getcurrent() and self.parent is get_hub():
            self.is_copy = True
            self.kill(CopyEnded, block=False)


if TYPE_CHECKING:
    from gevent import Greenlet as Greenlet  # which is generic
else:
    Greenlet = _ParentsOnly


def end_copy() -> None:
    """In the child: end the calling greenlet if it is the copy of one that belongs to the parent.

    What it waited for may wake it before it is killed. Then its sockets are closed already, and the error that it
    finds is nobody's.
    """
    if getattr(getcurrent(), "is_copy", False):
        raise CopyEnded


def drop_socket(sock: Any) -> None:
    """In the child: close the copy of a socket at once, without a word to the peer."""
    descriptor = sock.detach()
    if descriptor >= 0:
        close_descriptor(descriptor)


def _in_child() -> None:
    known = list(_known)
    if known:
        reinit()  # for those who fork with an os.fork that gevent has not patched; twice does no harm
        for thing in known:
            thing.forked()


os.register_at_fork(after_in_child=_in_child)
