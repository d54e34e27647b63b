"""How commands are declared, the kinds of values that several of them take, and what they say without tables. What
needs no client imports no more.

A command is a function whose parameters say by their defaults how they are read, each in one place::

    @options.command("pub", "Publish lines of files or of standard input.")
    def command(topic: str = argument(type=options.topic), count: int = number(default=2, help="How often.")) -> None:

Options keep the names of NSQ's own tools, with a shorter second name.
"""

from __future__ import annotations

import base64
import inspect
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from nsq_fast.config import Option
from nsq_fast.names import check_channel, check_topic, parse_address

# Declaring


class Parameter(NamedTuple):
    """How a command gets a parameter: what click reads for its name, and its value among all that click has read."""

    read: Callable[[str], list[click.Parameter]]
    value: Callable[[str, Mapping[str, Any]], Any] = lambda name, given: given[name]


def flag_of(name: str) -> str:
    """How an option of this name is given: ``max_in_flight`` as ``--max-in-flight``."""
    return f"--{name.replace('_', '-')}"


def option(*flags: str, cls: type[click.Option] = click.Option, **settings: Any) -> Any:
    """A parameter that is an option of click; its flag is its name where none is given."""
    default = settings.get("default")
    settings = {"show_default": bool(default) and default is not True, **settings}
    return Parameter(lambda name: [cls([name, *(flags or (flag_of(name),))], **settings)])


def argument(**settings: Any) -> Any:
    return Parameter(lambda name: [click.Argument([name], **settings)])


def together(make: Callable[..., Any], **parts: Any) -> Any:
    """A parameter that ``make`` makes of others."""
    return Parameter(
        lambda _: [each for name, part in parts.items() for each in part.read(name)],
        lambda _, given: make(**{name: part.value(name, given) for name, part in parts.items()}),
    )


def flag(*flags: str, help: str) -> Any:
    return option(*flags, is_flag=True, default=False, help=help)


def number(*flags: str, default: int | None = None, least: int = 1, most: int | None = None, help: str) -> Any:
    """A whole number within bounds."""
    return option(*flags, type=click.IntRange(least, most), default=default, help=help)


def several(*flags: str, help: str, **settings: Any) -> Any:
    """An option that may be given any number of times."""
    return option(*flags, multiple=True, help=help, **settings)


def of_config(declared: Option, flag: str = "", help: str = "", **settings: Any) -> Any:
    """An option of a command that is declared as one of a config, and has its name; ``help`` is said besides."""
    flag = flag or flag_of(declared.name)
    said = f"{declared.doc[0].upper()}{declared.doc[1:]}.{help}"
    if declared.kind is bool and "/" not in flag:
        flag = f"{flag}/--no-{flag[2:]}"
    return option(flag, help=said, **settings)


def command(
    name: str, short_help: str = "", group: click.Group | None = None, more: Mapping[str, Any] = {}, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """A decorator that makes a command of a function, and adds it to ``group``; ``more`` is what it takes besides."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        declared = {key: each.default for key, each in inspect.signature(function).parameters.items()}
        parts = {key: each for key, each in {**declared, **more}.items() if isinstance(each, Parameter)}
        whole = together(function, **parts)
        settings.setdefault("help", function.__doc__)
        made = click.Command(
            name, callback=lambda **given: whole.value("", given), params=whole.read(""), short_help=short_help or None,
            **settings,
        )  # fmt: skip
        if group is not None:
            group.add_command(made)
        return made

    return decorate


NSQD_FLAGS = ("--nsqd-tcp-address", "--nsqd")
LOOKUPD_FLAGS = ("--lookupd-http-address", "--lookupd")

# Kinds of values

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # before click 8.4 it takes no type


class Kind(_ParamType):
    """What a text stands for: ``parse`` raises ValueError where it is none of that kind."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(us|ms|s|m|h|)\Z")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_PAIR = re.compile(r"([^=,]+)[=,](.*)\Z", re.DOTALL)
_SET_BY_COMMANDS = {"self", "topic", "channel", "message_handler", "nsqd_tcp_addresses", "lookupd_http_addresses"}


def _duration(text: str | float) -> float:
    match = _DURATION.match(str(text))
    if not match:
        raise ValueError(f"{text!r} is not a duration: seconds, or a number with ms, s, m or h")
    return float(match[1]) * _UNITS[match[2]]


def _some_time(text: str | float) -> float:
    if not (found := _duration(text)):
        raise ValueError(f"{text!r}: must be more than 0")
    return found


def _amount(what: str) -> Kind:
    """Click's own range lets nan pass."""

    def parse(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < math.inf:
            raise ValueError(f"{text!r} is not a {what}: a number, 0 or more")
        return value

    return Kind(what, parse)


def _pair(text: str) -> tuple[str, str]:
    match = _PAIR.match(text)
    if not match:
        raise ValueError(f"{text!r} is not name=value")
    return match[1].replace("-", "_"), match[2]


def _option_of_client(text: str) -> tuple[str, str]:
    name, value = _pair(text)
    if name in _SET_BY_COMMANDS:
        raise ValueError(f"{name!r} is set by the command; its --help names the option or argument for it")
    return name, value


def address(default_port: int) -> Kind:
    """``host``, ``host:port`` or ``[v6]:port``."""
    return Kind("host:port", lambda text: parse_address(text, default_port))


duration: Kind = Kind("duration", _duration)
"""Seconds, or a number with a unit: ``200ms``, ``2s``, ``1.5m``, ``1h``."""
some_time: Kind = Kind("duration", _some_time)
"""The same, and more than 0."""
rate: Kind = _amount("rate")
share: Kind = _amount("share")
pair: Kind = Kind("name=value", _pair)
"""``name=value``, or ``name,value`` as NSQ's own tools write it; dashes in the name count as underscores."""
option_of_client: Kind = Kind("name=value", _option_of_client)
"""A pair that names an option of a Consumer or Producer which its command does not set itself."""
topic: Kind = Kind("topic", check_topic)
channel: Kind = Kind("channel", check_channel)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def output_file(*flags: str, help: str) -> Any:
    """An option that names a file to be written; one that cannot be is refused before any work is done."""
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return option(*flags, type=kind, metavar="FILE", help=help, callback=_in_a_folder)


def _in_a_folder(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """The folder of a file is made when it is written, where it may be."""
    there = next((folder for folder in path.parents if folder.exists()), None) if path else None
    if there is not None and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise click.BadParameter(f"{path} cannot be written: {there} is no folder in which files can be made")
    return path


# Saying


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
