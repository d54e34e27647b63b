"""The consumers of a program: its module is imported, and what that declares becomes Consumers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

from nsq_fast import aio, threads
from nsq_fast.errors import ConfigError
from nsq_fast.runtime import Consumer

from .settings import Settings
from .subscriptions import Subscription, declared

READY_MADE = (Consumer, threads.Consumer, aio.Consumer)

_IMPORTING = {"nsq_fast", "importlib"}


class Running(NamedTuple):
    """A consumer of one of the three kinds, by a name that no other one of the program has."""

    name: str
    consumer: Any
    place: str


def load(target: str, folder: str, settings: Settings) -> list[Running]:
    """Import ``module`` or ``module:attribute`` from ``folder``, and make the consumers that it declares.

    An attribute is a function that was declared, a Subscription, a Consumer, several of them, or a function that
    returns such. Without one, it is all that was declared with ``subscribe``.

    Raises ConfigError, and whatever the module raises.
    """
    module_name, _, attribute = target.partition(":")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _imported(module_name, folder)
    found: list[Any] = list(_named(module, attribute, target)) if attribute else list(declared())
    if not found:
        raise ConfigError(
            f"{target}: there is nothing to run: declare handlers with nsq_fast.worker.subscribe, or name what is to"
            f" be run, as in {module_name}:consumers"
        )
    made = [_consumer(each, settings) for each in found]
    return list(_with_names(made))


def _imported(name: str, folder: str) -> object:
    """The module. That it is missing itself is said with where it was looked for."""
    if "/" in name:
        meant = name.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        raise ConfigError(f"{name} is a path: name a module, as in nsq-fast run {meant}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the program imports
        raise ConfigError(
            f"there is no module {error.name!r} in {folder}, nor where Python looks else: run it where"
            f" {error.name.replace('.', '/')}.py is, or name its folder with --app-dir"
        ) from None


def of_program(error: Exception) -> Exception:
    """An error of a program, its traceback without the calls from here that led into the program."""
    at = error.__traceback__
    while at is not None and (at.tb_frame.f_globals.get("__package__") or "").partition(".")[0] in _IMPORTING:
        at = at.tb_next
    return error if at is None else error.with_traceback(at)


def _named(module: object, attribute: str, target: str) -> Iterator[Any]:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{target}: {value!r} has no {part!r}")
        value = getattr(value, part)
    yield from _flat(value, target)


def _flat(value: Any, target: str, may_call: bool = True) -> Iterator[Any]:
    if isinstance(value, (Subscription, *READY_MADE)):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each, target)
    elif callable(value) and declared(value):
        yield from declared(value)
    elif callable(value) and may_call:
        yield from _flat(value(), target, may_call=False)
    else:
        raise ConfigError(
            f"{target}: {value!r} cannot be run: it must be declared with subscribe, a Consumer of nsq_fast,"
            " nsq_fast.threads or nsq_fast.aio, a list of these, or a function that returns them"
        )


def _consumer(found: Any, settings: Settings) -> tuple[Any, str]:
    if not isinstance(found, Subscription):
        return found, "asyncio" if isinstance(found, aio.Consumer) else "gevent"
    place = found.place_of(settings.worker.handlers)
    kinds: dict[str, Any] = {"gevent": Consumer, "threads": threads.Consumer, "asyncio": aio.Consumer}
    handler = {"batch_handler" if found.batch else "message_handler": found.handler}
    try:
        return kinds[place](found.topic, found.channel, **handler, **settings.options_of(found)), place
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{found.name}: {error}") from error


def _with_names(made: list[tuple[Any, str]]) -> Iterator[Running]:
    taken: set[str] = set()
    for consumer, place in made:
        plain = f"{consumer.topic}/{consumer.channel}"
        name = next(name for number in count(1) if (name := plain if number == 1 else f"{plain}#{number}") not in taken)
        taken.add(name)
        yield Running(name, consumer, place)
