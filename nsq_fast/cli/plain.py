"""What commands say on stderr, and what they write without tables."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click


def say(line: str) -> None:
    """Say something on stderr: standard output is for what was asked for."""
    click.echo(line, err=True)


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def warnings_shown(quiet: bool = False) -> Iterator[None]:
    """Write what the library warns of to stderr, so that no wait is silent; ``-v`` shows it otherwise."""
    if quiet or click.get_current_context().find_root().params.get("verbose"):
        yield
        return
    handler, logger = _ToStderr(logging.WARNING), logging.getLogger("nsq_fast")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def text_or_base64(name: str, body: bytes) -> dict[str, str]:
    """Bytes for JSON: under their name where they are text, else under NAME_base64."""
    try:
        return {name: body.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(body).decode()}


def write_file(path: Path, text: str) -> None:
    """Write what a command was asked to leave in a file, whose folder is made. Raises ClickException."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror or error}") from error
