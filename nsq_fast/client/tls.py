"""The options of TLS, with verification unless it is switched off.

``ssl`` is imported when it is first used: most programs have no TLS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nsq_fast.config import ConnectionConfig, refuse_unknown
from nsq_fast.errors import ConfigError

if TYPE_CHECKING:
    from ssl import SSLContext

# gnsq's names: ca_certs and cert_reqs say what cafile and verify say; ssl_version is taken and not needed, since the
# two ends agree on the best version that both have.
_OPTIONS = frozenset(
    {"cafile", "certfile", "keyfile", "server_hostname", "verify", "ca_certs", "cert_reqs", "ssl_version"}
)


def client_context(options: Any = None) -> SSLContext:
    """Make the context for ``options``: None, an ``ssl.SSLContext``, or a mapping.

    The mapping may have ``cafile`` (default: the system's authorities), ``certfile`` and ``keyfile`` (a client
    certificate), ``verify`` (default True) and ``server_hostname``; gnsq's ``ca_certs``, ``cert_reqs`` and
    ``ssl_version`` are understood. Raises ConfigError for anything else and for files that cannot be read.
    """
    from ssl import CERT_NONE, CERT_REQUIRED, PROTOCOL_TLS_CLIENT, SSLContext

    if isinstance(options, SSLContext):  # gevent's is a subclass
        return options
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"TLS options must be an ssl.SSLContext or a mapping, not {type(options).__name__}")
    options = options or {}
    refuse_unknown(options, _OPTIONS)
    context = SSLContext(PROTOCOL_TLS_CLIENT)
    _load_files(context, options)
    if not options.get("verify", options.get("cert_reqs", CERT_REQUIRED) != CERT_NONE):
        context.check_hostname = False
        context.verify_mode = CERT_NONE
    return context


def check_tls_options(config: ConnectionConfig) -> None:
    """Raise ConfigError for ``tls_options`` that no connection could use."""
    if config.tls_v1 or config.tls_options is not None:
        try:
            client_context(config.tls_options)
        except ConfigError as error:
            raise ConfigError(f"tls_options: {error}") from error


def _load_files(context: SSLContext, options: Mapping[str, Any]) -> None:
    cafile = options.get("cafile") or options.get("ca_certs")
    if cafile:
        with _naming(f"cafile {cafile}"):
            context.load_verify_locations(cafile=cafile)
    else:
        context.load_default_certs()
    certificate, key = options.get("certfile"), options.get("keyfile")
    if certificate:
        with _naming(f"certfile {certificate}" + (f" with keyfile {key}" if key else "")):
            context.load_cert_chain(certificate, key)
    elif key:
        raise ConfigError(f"keyfile {key} has no effect without certfile: name the certificate too")


@contextmanager
def _naming(files: str) -> Iterator[None]:
    """What OpenSSL says of files, as a ConfigError that says of which."""
    try:
        yield
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"TLS files cannot be used: {files}: {error.strerror or error}") from error


def server_hostname(options: Any, host: str) -> str:
    """The name to send (SNI) and to verify: the one in the options, otherwise ``host``."""
    name = options.get("server_hostname") if isinstance(options, Mapping) else None
    return str(name or host)
