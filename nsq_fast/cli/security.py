"""Whom a command trusts and how it proves itself: the same options for every command that talks to servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click

from nsq_fast.config import LookupConfig
from nsq_fast.runtime import client_context

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_GROUP = (
    ("--tls", {"is_flag": True, "help": "Talk TLS to nsqd; the other --tls options say so too."}),
    ("--tls-ca", {"type": _FILE, "metavar": "FILE", "help": "Who may sign certificates.  [default: the system's]"}),
    ("--tls-cert", {"type": _FILE, "metavar": "FILE", "help": "The certificate of this client."}),
    ("--tls-key", {"type": _FILE, "metavar": "FILE", "help": "Its key, where it is not in the same file."}),
    ("--tls-server-name", {"metavar": "NAME", "help": "The name in the servers' certificates.  [default: the host]"}),
    ("--auth-secret-file", {"type": _FILE, "metavar": "FILE", "help": "The secret for nsqds that ask for AUTH."}),
)  # fmt: skip


class Security(NamedTuple):
    """What the options of a command say.

    Attributes:
        is_tls: whether connections to nsqd are upgraded to TLS; addresses with ``https://`` say so themselves.
        tls_options: as ``tls_options`` of a Consumer; for HTTP as well.
        auth_secret: for AUTH, which HTTP does not have.
    """

    is_tls: bool = False
    tls_options: dict[str, Any] | None = None
    auth_secret: str | None = None

    @property
    def of_client(self) -> dict[str, Any]:
        """Options of a Consumer or Producer."""
        options: dict[str, Any] = {"lookupd_tls_options": self.tls_options}
        if self.is_tls:
            options |= {"tls_v1": True, "tls_options": self.tls_options}
        return options if self.auth_secret is None else {**options, "auth_secret": self.auth_secret}

    @property
    def of_http(self) -> dict[str, Any]:
        """Options of an HTTP client of nsqd or nsqlookupd."""
        return {"tls_options": self.tls_options}

    def of_lookup(self, timeout: float) -> LookupConfig:
        """The options of a LookupPoller that waits ``timeout`` seconds for an answer."""
        return LookupConfig(lookupd_timeout=timeout, lookupd_tls_options=self.tls_options)


UNSECURED = Security()


def security_options() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--tls``, ``--tls-ca`` and so on, as one parameter, ``security``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            taken = {flag: options.pop(flag.strip("-").replace("-", "_")) for flag, _ in _GROUP}
            return function(*arguments, security=_security(taken), **options)

        for flag, settings in reversed(_GROUP):
            wrapped = click.option(flag, **settings)(wrapped)
        return wrapped

    return decorate


def _security(taken: dict[str, Any]) -> Security:
    """Raises UsageError for a key without a certificate, ConfigError for files that cannot be used."""
    if taken["--tls-key"] and not taken["--tls-cert"]:
        raise click.UsageError("--tls-key needs --tls-cert")
    named = {
        "cafile": taken["--tls-ca"],
        "certfile": taken["--tls-cert"],
        "keyfile": taken["--tls-key"],
        "server_hostname": taken["--tls-server-name"],
    }
    options = {name: str(value) for name, value in named.items() if value}
    if options:
        client_context(options)
    return Security(taken["--tls"] or bool(options), options or None, _secret(taken["--auth-secret-file"]))


def _secret(path: Path | None) -> str | None:
    """The content of the file without the line end that editors put there."""
    if path is None:
        return None
    try:
        secret = path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--auth-secret-file {path}: {error}") from error
    if not secret:
        raise click.UsageError(f"--auth-secret-file {path}: it is empty")
    return secret
