"""`nsq-fast run`: run the consumers of a program, in processes that are looked after. See ``nsq_fast.worker``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import click

from nsq_fast.config import Option
from nsq_fast.worker.settings import Given, Settings, SettingsReader, Task, WorkerConfig, write_logs
from nsq_fast.worker.supervisor import Stderr, Supervisor, check

from . import options
from .options import argument, flag, option, say, several


def _of_worker(declared: Option) -> Any:
    """An option of WorkerConfig; None where it is not given."""
    kind: dict[str, Any] = {"type": click.Choice(declared.choices)} if declared.choices else {}
    if not kind and declared.kind is not bool:
        kind = {"metavar": "SECONDS" if declared.unit == "s" else "N" if declared.kind is int else "TEXT"}
    default = "" if declared.default in (None, False) else f"  [default: {declared.default}]"
    return options.of_config(declared, help=default, **kind)


_SETTINGS = {
    "nsqd_tcp_addresses": several(*options.NSQD_FLAGS, metavar="HOST:PORT", help="An nsqd (repeatable; port 4150)."),
    "lookupd_http_addresses": several(
        *options.LOOKUPD_FLAGS, metavar="HOST:PORT", help="An nsqlookupd (repeatable; port 4161)."
    ),
    **{name: _of_worker(declared) for name, declared in WorkerConfig.OPTIONS.items()},
}


@options.command("run", "Run the consumers of a program, in processes.", more=_SETTINGS)
def command(
    app: str = argument(),
    config: str | None = option(type=click.Path(), metavar="FILE", help="A TOML file; also NSQ_FAST_CONFIG."),
    consumer_opt: Sequence[tuple[str, str]] = several(
        type=options.pair, metavar="NAME=VALUE", help="Any option of Consumer, for all consumers (repeatable)."
    ),
    app_dir: str = option(
        type=click.Path(file_okay=False, exists=True),
        default=".",
        show_default=False,
        help="Where APP is imported from.",
    ),
    is_check: bool = flag("--check", help="Say what is wrong with the configuration and APP, and end."),
    **flags: Any,
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
                say(doubt)

    settings = read()
    task = Task(app, str(Path(app_dir).resolve()), settings, is_check)
    if is_check:
        raise SystemExit(check(task))
    stderr = Stderr()
    with redirect_stderr(stderr.text() if sys.stderr is not None else None):  # None: it was closed before we began
        write_logs(settings.worker)
        code = Supervisor(task, read, stderr).run()
    raise SystemExit(code)


def _given(flags: dict[str, Any], consumer_opt: Sequence[tuple[str, str]]) -> Iterator[Given]:
    called = {each.name: each.opts[0] for each in click.get_current_context().command.params}
    for name, value in flags.items():
        if value not in (None, ()):
            yield Given(name, list(value) if isinstance(value, tuple) else value, called[name])
    for name, value in consumer_opt:
        yield Given(name, value, "--consumer-opt")
