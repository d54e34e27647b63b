"""Names and addresses: the rules both server families enforce, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from .errors import ConfigError, ConnectFailed, NameInvalid, TypeInvalid

# nsqio/nsq and youzan/nsq: internal/protocol/names.go, isValidName
MAX_NAME_LENGTH = 64
EPHEMERAL_SUFFIX = "#ephemeral"
# nsqio/nsq: nsqd/options.go and nsqlookupd/options.go, NewOptions
DEFAULT_NSQD_TCP_PORT = 4150
DEFAULT_NSQD_HTTP_PORT = 4151
DEFAULT_LOOKUPD_HTTP_PORT = 4161

_HOST = re.compile(r"[^\s/@?#\[\]]+")  # what a URL would end at, or an address in brackets holds, is in no host

NAME_PATTERN = re.compile(r"[.a-zA-Z0-9_-]+(#ephemeral)?\Z")


def is_valid_name(name: str) -> bool:
    """Whether ``name`` may be a topic or channel: 1..64 characters including an ``#ephemeral`` suffix."""
    return 1 <= len(name) <= MAX_NAME_LENGTH and NAME_PATTERN.match(name) is not None


def is_ephemeral(name: str) -> bool:
    """Whether a topic or channel vanishes with its last user."""
    return name.endswith(EPHEMERAL_SUFFIX)


def check_topic(name: str) -> str:
    """Return ``name``; raise NameInvalid unless it is a legal topic name."""
    return _check_name("topic", name)


def check_channel(name: str) -> str:
    """Return ``name``; raise NameInvalid unless it is a legal channel name."""
    return _check_name("channel", name)


def _check_name(kind: str, name: str) -> str:
    if not isinstance(name, str):
        raise NameInvalid(f"{kind} name must be str, not {type(name).__name__}: {name!r}")
    if not is_valid_name(name):
        raise NameInvalid(
            f"invalid {kind} name {name!r}: 1 to {MAX_NAME_LENGTH} of letters, digits, '.', '_', '-',"
            f" with an optional '{EPHEMERAL_SUFFIX}' at the end"
        )
    return name


class Address(NamedTuple):
    """Host and port of a server, IPv6 hosts without brackets; of a Unix socket the path, and port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if self.host.startswith("/"):
            return f"unix:{self.host}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return self.host.startswith("/")


def parse_address(text: str | tuple[str, int], default_port: int) -> Address:
    """Read ``host``, ``host:port``, ``[v6]``, ``[v6]:port``, a bare IPv6 address, or a (host, port) pair.

    Or a Unix socket: ``/path``, ``unix:/path`` or ``unix:///path``.
    """
    port: int | str
    if isinstance(text, str) and is_unix_address(text):
        return _unix_address(text.strip())
    if isinstance(text, Address) and text.is_unix:
        return text
    if isinstance(text, tuple) and len(text) == 2:
        host, port = text
    elif isinstance(text, str) and "@" in text:
        raise ConfigError("an address must hold no user name or password")  # and is not shown: it may hold one
    elif isinstance(text, str) and "://" in text:
        raise ConfigError(
            f"invalid address {text!r}: must be host:port, without a scheme: what listens there is no URL"
        )
    elif isinstance(text, str):
        host, port = _split_address(text.strip(), default_port)
    else:
        raise ConfigError(f"address must be 'host:port' or a (host, port) pair, not {text!r}")
    try:
        number = int(port)
    except (TypeError, ValueError):
        raise ConfigError(f"invalid port {port!r} in address {text!r}") from None
    if not host or not 0 < number < 65536:
        raise ConfigError(f"invalid address {text!r}: a host and a port of 1 to 65535 are needed")
    _check_host(host, text)
    return Address(host, number)


def is_unix_address(text: str) -> bool:
    """Whether it names a Unix socket, well or not."""
    return text.strip().startswith(("/", "unix:"))


def _unix_address(text: str) -> Address:
    path = text.removeprefix("unix:")
    if path.startswith("//"):  # what follows is the host of a URL, which has none
        path = path[2:]
    if not path.startswith("/") or path.endswith("/") or not path.isprintable():
        raise ConfigError(f"invalid address {text!r}: a Unix socket is /path, unix:/path or unix:///path")
    return Address(path, 0)


def _check_host(host: str, text: object) -> None:
    if not isinstance(host, str):
        raise ConfigError(f"invalid address {text!r}: the host must be a string")
    if not _is_host(host):
        raise ConfigError(f"invalid address {text!r}: {host!r} is neither a host name nor an IP address")


def _is_host(host: str) -> bool:
    if not _HOST.fullmatch(host):
        return False
    if ":" in host:
        from ipaddress import IPv6Address  # most programs name no such host

        try:
            IPv6Address(host)
        except ValueError:
            return False
    return True


def check_resolvable(host: str) -> None:
    """Raise ConnectFailed for a host that no resolver can be asked for: a label that is empty or too long."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConnectFailed(f"{host!r} is no host name: {error}") from error


def _split_address(text: str, default_port: int) -> tuple[str, int | str]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        return host if bracket else "", rest[1:] if rest.startswith(":") else default_port
    if text.count(":") > 1:
        return text, default_port
    host, colon, port = text.partition(":")
    return host, port if colon else default_port


def parse_listen_address(text: str, name: str = "address") -> tuple[str, int]:
    """Read ``host:port`` or ``:port``, with an empty host for all interfaces; port 0: one that is free.

    ``name`` is what the argument is called in an error.
    """
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isdecimal() or int(port) > 65535 or (host and not _is_host(host)):
        raise ConfigError(f"{name}={text!r}: must be host:port, or :port for all interfaces")
    return host, int(port)


Addresses: TypeAlias = str | tuple[str, int] | Iterable[str | tuple[str, int]]
"""What programs give as addresses: one, or several."""


def parse_addresses(value: Addresses, default_port: int, name: str = "") -> list[Address]:
    """Read one address or several, without repeats, in the order given. A string may hold a comma separated list.

    ``name`` is what the argument is called in an error, where the caller does not say it.
    """
    with naming(name):
        return list(dict.fromkeys(parse_address(item, default_port) for item in listed(value, name or "addresses")))


@contextmanager
def naming(name: str) -> Iterator[None]:
    """A ConfigError of what is read within begins with ``name``."""
    try:
        yield
    except ConfigError as error:
        if not name or isinstance(error, TypeInvalid):  # what is no address at all is named as it is read
            raise
        raise ConfigError(f"{name}: {error}") from None


def listed(value: Addresses, name: str) -> list[str | tuple[str, int]]:
    """Several addresses as a list, not yet read; a string may hold a comma separated list. Raises TypeInvalid.

    One (host, port) pair, an Address say, is one address.
    """
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (bytes, bytearray)) or not isinstance(value, Iterable):
        hint = "; a handler is passed as message_handler=" if callable(value) else ""
        raise TypeInvalid(f"{name} must be a string or a list, tuple or set of them, not {value!r}{hint}")
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
        return [(value[0], value[1])]
    return list(value)
