"""Wrong arguments and servers that are not there: one line that says what to do, never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.commands import run

from nsq_fast.cli import COMMANDS

pytestmark = pytest.mark.usefixtures("no_servers_here")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: main {name}")
    assert len(result.output.splitlines()) > 5


def test_the_list_of_commands_says_what_each_is_for() -> None:
    result = run("--help")
    lines = [line.split(maxsplit=1) for line in result.output.partition("Commands:")[2].strip().splitlines()]
    assert [line[0] for line in lines] == list(COMMANDS)
    assert all(len(line[1]) > 10 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pub"], "Missing argument 'TOPIC'"),
        (["pub", "t"], "--nsqd HOST:PORT or --lookupd HOST:PORT"),
        (["pub", "no topic", "--nsqd", "h"], "invalid topic name 'no topic'"),
        (["pub", "t", "--nsqd", "h:x"], "invalid port 'x'"),
        (["pub", "t", "--nsqd", "h", "--lookupd", "h"], "not both"),
        (["pub", "t", "--lookupd", "h", "--to-all"], "--to-all needs --nsqd"),
        (["pub", "t", "--nsqd", "h", "--delimiter", ""], "--delimiter must not be empty"),
        (["pub", "t", "--nsqd", "h", "--rate", "-1"], "--rate"),
        (["pub", "t", "/no/such/file", "--nsqd", "h"], "does not exist"),
        (["tail", "--nsqd", "h"], "which TOPIC"),
        (["tail", "t"], "--nsqd HOST:PORT or --lookupd HOST:PORT"),
        (["tail", "t", "--nsqd", "h", "--channel", "a b"], "invalid channel name 'a b'"),
        (["tail", "t", "--nsqd", "h", "--consumer-opt", "x"], "is not name=value"),
        (["lookup", "t"], "--lookupd HOST:PORT"),
        (["lookup", "t", "--lookupd", "h", "--timeout", "soon"], "is not a duration"),
        (["stat"], "--nsqd HOST:PORT or --lookupd HOST:PORT"),
        (["stat", "--nsqd", "h", "--channel", "c"], "--channel needs --topic"),
        (["stat", "--nsqd", "h", "--interval", "0"], "--interval must be more than 0"),
        (["demo", "--messages", "0"], "--messages"),
        (["demo", "--nsqd", "h", "--lookupd", "h"], "not both"),
        (["broker", "--nsqds", "0", "--no-lookupd"], "nothing to run"),
        (["broker", "--max-rdy-count", "0"], "max_rdy_count"),
        (["broker", "--tls-required", "true"], "tls_cert"),
        (["broker", "--nodes", "3"], "--nodes: for --redesigned only"),
        (["broker", "--redesigned", "--mem-queue-size", "5"], "--mem-queue-size: not for --redesigned"),
        (["broker", "--redesigned", "--statsd-address", "a:1"], "--statsd-address: not for --redesigned"),
        (["broker", "--redesigned", "--lookupd-tcp-address", "a:1"], "--lookupd-tcp-address: not for --redesigned"),
        (["no-such-command"], "No such command"),
    ],
)
def test_wrong_arguments_give_one_line_that_says_what_to_do(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    error = [line for line in result.output.splitlines() if line.startswith("Error:")]
    assert len(error) == 1
    assert says in error[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["pub", "t", "--nsqd"],
        ["pub", "t", "--lookupd"],
        ["tail", "t", "--nsqd"],
        ["tail", "t", "--lookupd"],
        ["lookup", "t", "--lookupd"],
        ["stat", "--once", "--nsqd"],
        ["stat", "--once", "--lookupd"],
        ["demo", "--nsqd"],
        ["demo", "--lookupd"],
    ],
    ids=" ".join,
)
def test_a_server_that_is_not_there_is_one_line(arguments: list[str], closed_port: int) -> None:
    result = run(*arguments, f"127.0.0.1:{closed_port}")
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert f"127.0.0.1:{closed_port}" in result.output
    assert len(result.output.splitlines()) == 1


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nsq_fast", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("nsq-fast, version ")
