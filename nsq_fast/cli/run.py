"""`nsq-fast run`: run the consumers of a program, in processes that are looked after. See ``nsq_fast.worker``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from nsq_fast.config import Option, WorkerConfig
from nsq_fast.errors import ConfigError
from nsq_fast.worker.settings import Given, Settings, SettingsReader, Task, write_logs
from nsq_fast.worker.supervisor import Supervisor, check

_ADDRESSES = (
    ("--nsqd-tcp-address", "--nsqd", "nsqd_tcp_addresses", "An nsqd (repeatable; port 4150)."),
    ("--lookupd-http-address", "--lookupd", "lookupd_http_addresses", "An nsqlookupd (repeatable; port 4161)."),
)


def _worker_options() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option for each of WorkerConfig; None where it is not given."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for declared in reversed([*WorkerConfig.OPTIONS.values()]):
            flag = f"--{declared.name.replace('_', '-')}"
            if declared.kind is bool:
                function = click.option(f"{flag}/--no-{flag[2:]}", default=None, help=_help(declared))(function)
            elif declared.choices:
                function = click.option(flag, type=click.Choice(declared.choices), help=_help(declared))(function)
            else:
                function = click.option(flag, metavar=_metavar(declared), help=_help(declared))(function)
        for flag, short, name, help in reversed(_ADDRESSES):
            function = click.option(flag, short, name, multiple=True, metavar="HOST:PORT", help=help)(function)
        return function

    return decorate


def _help(declared: Option) -> str:
    doc = declared.doc
    default = "" if declared.default in (None, False) else f"  [default: {declared.default}]"
    return f"{doc[:1].upper()}{doc[1:]}.{default}"


def _metavar(declared: Option) -> str:
    return {"s": "SECONDS"}.get(declared.unit, "N" if declared.kind is int else "TEXT")


@click.command("run", short_help="Run the consumers of a program, in processes.")
@click.argument("app")
@click.option("--config", type=click.Path(), metavar="FILE", help="A TOML file; also NSQ_FAST_CONFIG.")
@_worker_options()
@click.option(
    "--consumer-opt",
    metavar="NAME=VALUE",
    multiple=True,
    help="Any option of Consumer, for all consumers (repeatable).",
)
@click.option(
    "--app-dir", type=click.Path(file_okay=False, exists=True), default=".", help="Where APP is imported from."
)
@click.option("--check", "is_check", is_flag=True, help="Say what is wrong with the configuration and APP, and end.")
def command(
    app: str, config: str | None, consumer_opt: Sequence[str], app_dir: str, is_check: bool, **flags: Any
) -> None:
    """Run the consumers that APP, a `module` or `module:attribute`, declares.

    A module declares them with nsq_fast.worker.subscribe; an attribute may also be a Consumer, a list of these, or a
    function that returns them. SIGTERM and SIGINT drain the processes, a second one ends them at once, SIGHUP replaces
    them one by one, with the file as it is then.

    Each option may also be set in the environment, as NSQ_FAST_PROCESSES, or in the file, below [worker]. Options of
    consumers may be set in the environment, below [consumer] or below [subscription."topic/channel"]. A flag counts
    before the environment, the environment before the file, and the file before the program. The exit code is 0, 2 for
    a wrong configuration, 78 when APP cannot be run, 128 and more after a second signal.
    """

    def read() -> Settings:
        reader = SettingsReader()
        try:
            return reader.read(config, os.environ, _given(flags, consumer_opt))
        finally:
            for doubt in reader.doubts:
                click.echo(doubt, err=True)

    try:
        settings = read()
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    task = Task(app, str(Path(app_dir).resolve()), settings, is_check)
    if is_check:
        raise SystemExit(check(task))
    write_logs(settings.worker)
    raise SystemExit(Supervisor(task, read).run())


def _given(flags: dict[str, Any], consumer_opt: Sequence[str]) -> Iterator[Given]:
    for name, value in flags.items():
        if value not in (None, ()):
            yield Given(name, list(value) if isinstance(value, tuple) else value, f"--{name.replace('_', '-')}")
    for text in consumer_opt:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--consumer-opt {text!r}: must be NAME=VALUE")
        yield Given(name.strip().replace("-", "_"), value, "--consumer-opt")
