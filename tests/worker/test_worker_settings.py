"""The configuration of a worker: which source counts, and what is said of what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from nsq_fast.cli import main
from nsq_fast.errors import ConfigError
from nsq_fast.worker import subscribe
from nsq_fast.worker.settings import Given, Settings, SettingsReader, Subscription, declared

FILE = """
[worker]
processes = 2
drain_timeout = 7

[consumer]
max_in_flight = 2
concurrency = 2
msg_timeout = 20

[subscription."orders/billing"]
max_in_flight = 3
concurrency = 3
"""


def read(
    tmp_path: Path, text: str = FILE, environment: dict[str, str] | None = None, flags: Sequence[Given] = ()
) -> Settings:
    path = tmp_path / "worker.toml"
    path.write_text(text)
    return SettingsReader().read(str(path), environment or {}, flags)


def test_a_flag_counts_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    environment = {"NSQ_FAST_PROCESSES": "4", "NSQ_FAST_HANDLERS": "threads", "NSQ_FAST_MAX_IN_FLIGHT": "40"}
    flags = [Given("processes", "8", "--processes"), Given("max_in_flight", "80", "--consumer-opt")]
    found = read(tmp_path, environment=environment, flags=flags)
    assert (found.worker.processes, found.worker.handlers, found.worker.drain_timeout) == (8, "threads", 7.0)
    assert found.options_of(Subscription("orders", "billing", print))["max_in_flight"] == "80"
    assert read(tmp_path, environment=environment).worker.processes == 4
    assert read(tmp_path).worker.processes == 2
    assert read(tmp_path, "").worker.processes == 1


def test_the_special_part_of_the_file_counts_before_the_general_one_and_that_before_the_program(tmp_path: Path) -> None:
    options = {"max_in_flight": 1, "concurrency": 1, "msg_timeout": 10, "auto_touch": True}
    billing = read(tmp_path).options_of(Subscription("orders", "billing", print, options=options))
    shipping = read(tmp_path).options_of(Subscription("orders", "shipping", print, options=options))
    chosen = [(each["max_in_flight"], each["concurrency"], each["msg_timeout"]) for each in (billing, shipping)]
    assert chosen == [(3, 3, 20), (2, 2, 20)]
    assert billing["auto_touch"] is True
    assert billing["requeue_unfinished"] is True


def test_what_becomes_of_old_messages_may_be_said_from_outside(tmp_path: Path) -> None:
    text = '[consumer]\nmax_age = 60\nmax_age_policy = "finish"\n'
    subscription = Subscription("orders", "billing", print)
    options = read(tmp_path, text).options_of(subscription)
    assert (options["max_age"], options["max_age_policy"]) == (60, "finish")
    overriding = read(tmp_path, text, {"NSQ_FAST_MAX_AGE_POLICY": "give_up"}).options_of(subscription)
    assert overriding["max_age_policy"] == "give_up"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text(FILE)
    found = SettingsReader().read(None, {"NSQ_FAST_CONFIG": str(tmp_path / "worker.toml")}, ())
    assert found.worker.processes == 2


def test_each_wrong_key_is_named_with_its_source_and_what_is_allowed(tmp_path: Path) -> None:
    text = """
[worker]
proceses = 2
http = "nowhere"
[consumer]
max_in_flight = -1
max_age_policy = "drop"
[subscription.orders]
max_in_flight = 1
[subscription."orders/billing"]
order_policy = "maybe"
[extra]
"""
    environment = {"NSQ_FAST_DRAIN_TIMEOUT": "soon", "NSQ_FAST_NSQD_TCP_ADDRESSES": "http://host"}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, environment, [Given("log_format", "xml", "--log-format")])
    faults = str(caught.value).replace(f"{tmp_path}/", "").split("\n")
    expected = [
        ("worker.toml [worker]: unknown option 'proceses'; did you mean 'processes'?", "drain_timeout"),
        ("worker.toml [worker]: http='nowhere'", "host:port"),
        ("worker.toml [consumer]: max_in_flight=-1", "0 to 1000000"),
        ("worker.toml [consumer]: max_age_policy='drop'", "finish, give_up"),
        ("worker.toml: subscription.orders", '[subscription."topic/channel"]'),
        ('worker.toml [subscription."orders/billing"]: order_policy=', "deliver, drop, stop"),
        ("worker.toml: 'extra'", "worker, consumer, subscription"),
        ("NSQ_FAST_DRAIN_TIMEOUT: drain_timeout='soon'", "a number"),
        ("NSQ_FAST_NSQD_TCP_ADDRESSES: invalid address", "host:port"),
        ("--log-format: log_format='xml'", "text, json"),
    ]
    for where, allowed in expected:
        (fault,) = (each for each in faults if each.startswith(where))
        assert allowed in fault
    assert len(faults) == len(expected)


def test_no_secret_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, '[consumer]\nauth_secret = ["hunter2"]\nlookupd_authorization = 7\n')
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(read(tmp_path, '[consumer]\nauth_secret = "hunter2"\n'))


def test_a_variable_that_looks_like_an_option_is_pointed_at_and_a_service_of_kubernetes_is_not(tmp_path: Path) -> None:
    reader = SettingsReader()
    environment = {
        "NSQ_FAST_PROCESES": "2",
        "NSQ_FAST_SERVICE_HOST": "10.0.0.1",
        "NSQ_FAST_PORT_9151_TCP_ADDR": "10.0.0.1",
    }
    reader.read(None, environment, ())
    assert reader.doubts == ["NSQ_FAST_PROCESES is not known and has no effect; did you mean NSQ_FAST_PROCESSES?"]


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.toml: cannot be read as TOML"):
        read(tmp_path, "processes: 2")
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read"):
        SettingsReader().read(str(tmp_path / "missing.toml"), {}, ())


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        (("bad topic!", "c"), {}, "bad topic!"),
        (("t", "c"), {"concurency": 2}, "did you mean 'concurrency'"),
        (("t", "c"), {"place": "moon"}, "gevent, threads, asyncio"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_stands(
    arguments: tuple[str, str], options: dict[str, object], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        subscribe(*arguments, **options)  # type: ignore[arg-type]


def test_where_a_handler_runs_follows_from_its_kind() -> None:
    async def waits(consumer: object, message: object) -> None: ...

    class Waits:
        async def __call__(self, consumer: object, message: object) -> None: ...

    def runs(consumer: object, message: object) -> None: ...

    def place(handler: object, handlers: str = "gevent", **options: object) -> str:
        return Subscription("t", "c", handler, options=dict(options)).place_of(handlers)  # type: ignore[arg-type]

    assert [place(waits), place(Waits()), place(waits, "threads")] == ["asyncio"] * 3
    assert [place(runs), place(runs, "threads"), place(runs, handler_threads=2)] == ["gevent", "threads", "threads"]
    with pytest.raises(ConfigError, match="coroutine function"):
        subscribe("t", "c", place="gevent")(waits)
    assert declared(waits) == []


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "checked_app.py").write_text(
        "from nsq_fast.worker import subscribe\n\n@subscribe('orders', 'billing')\nasync def handle(c, m): ...\n"
    )
    return tmp_path


@pytest.mark.slow
def test_check_says_what_would_run(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["run", "checked_app", "--check", "--app-dir", str(program)]
    assert CliRunner().invoke(main, [*command, "--nsqd", "127.0.0.1:4150"]).exit_code == 0
    assert capfd.readouterr().out == "orders/billing: asyncio\n"
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 78
    assert "orders/billing: must specify at least one nsqd or lookupd" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "word"),
    [
        ("no_such_module", "there is no module 'no_such_module' in "),
        ("there/app.py", "there/app.py is a path: name a module, as in nsq-fast run there.app"),
        ("checked_app:nothing", "has no 'nothing'"),
        ("checked_app:__name__", "cannot be run: it must be declared with subscribe"),
        ("json", "there is nothing to run"),
    ],
)
def test_check_says_why_a_program_cannot_be_run(program: Path, app: str, word: str) -> None:
    result = CliRunner().invoke(main, ["run", app, "--check", "--app-dir", str(program), "--nsqd", "127.0.0.1"])
    assert result.exit_code == 78
    assert word in result.output


def test_a_wrong_configuration_starts_nothing(program: Path) -> None:
    result = CliRunner().invoke(main, ["run", "checked_app", "--processes", "0", "--consumer-opt", "x=1"])
    assert result.exit_code == 2
    assert "--processes: processes=0: must be a whole number, 1 to 1024" in result.output
    assert "--consumer-opt: unknown option 'x'" in result.output


def test_an_address_that_is_taken_is_named(program: Path, closed_port: int) -> None:
    command = ["run", "checked_app", "--nsqd", "127.0.0.1", "--http", f"127.0.0.1:{closed_port}"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert f"http='127.0.0.1:{closed_port}': cannot listen there: Address already in use" in result.output
