"""The beginning of every conversation with an nsqd: limited in time, negotiated, upgraded, authenticated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from gevent import Timeout

from nsq_fast.errors import AuthFirst, ConfigError, ConnectFailed, ConnectionLost, NsqError
from nsq_fast.names import Address
from nsq_fast.printable import printable
from nsq_fast.protocol.events import CommandFailed, Heartbeat, Ready, ServerFailed, UpgradeNeeded
from nsq_fast.protocol.session import Session

from .transport import Transport


@contextmanager
def connecting(address: Address, seconds: float) -> Iterator[None]:
    """Limit what is done inside, and make every reason why it failed the cause of a ConnectFailed.

    Whatever a peer sends, or a resolver makes of a host name, is one more failed connection for the caller. ConfigError
    goes through as it is: trying again would not help.
    """
    limit = Timeout(seconds)
    limit.start()
    try:
        yield
    except Timeout as timeout:
        if timeout is not limit:
            raise
        raise ConnectFailed(f"{address}: not connected within {seconds} s") from timeout
    except ConfigError:
        raise
    except (NsqError, OSError) as error:
        raise ConnectFailed(f"{address}: cannot connect: {error}") from error
    except Exception as error:  # UnicodeError, RecursionError...
        raise ConnectFailed(f"{address}: cannot connect: {printable(repr(error))}") from error
    finally:
        limit.close()


def shake_hands(transport: Transport, session: Session, on_heartbeat: Callable[[], None] | None = None) -> Ready:
    """Take a new session to the point where commands are allowed; blocks. The caller closes ``transport``.

    Raises what the server, the session or the transport raises, AuthFirst when a secret is missing.
    """
    transport.send_all(session.connect())
    ready: Ready | None = None
    while ready is None:
        data = transport.recv()
        for event in session.receive(data, monotonic()):
            if event.send:
                transport.send_all(event.send)
            if isinstance(event, UpgradeNeeded):
                transport.upgrade(event.kind, event.leftover)
                session.upgraded()
            elif isinstance(event, (CommandFailed, ServerFailed)):
                raise event.error
            elif isinstance(event, Ready):
                ready = event
            elif isinstance(event, Heartbeat) and on_heartbeat is not None:
                on_heartbeat()
        if not data:
            raise ConnectionLost("closed by the server during the handshake")
        if session.failure is not None:
            raise session.failure
    # The server would say so at the next command only. nsqio/nsq: nsqd/protocol_v2.go, CheckAuth
    if session.info.auth_required and ready.auth is None:
        raise AuthFirst("the server demands AUTH, and auth_secret is not set")
    return ready
