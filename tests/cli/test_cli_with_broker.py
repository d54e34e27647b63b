"""A program as it is, on embedded servers that end with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import accepts, free_address
from support.waiting import PROCESS, until

ROOT = Path(__file__).parents[2]
OURS = [sys.executable, "-m", "nsq_fast"]


def with_broker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*OURS, "with-broker", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PROCESS, check=False)


@pytest.mark.parametrize("servers", [["--nsqds", "2"], ["--redesigned", "--kind", "--nodes", "2"], ["--no-lookupd"]])
def test_commands_find_the_servers_and_the_exit_code_is_that_of_the_program(servers: list[str]) -> None:
    ours = " ".join(OURS)
    program = f"echo hello | {ours} pub t -q && {ours} tail t -n 1 --channel c && exit 7"
    done = with_broker(*servers, "--topic", "t/c", "--", "sh", "-c", program, NSQD_TCP_ADDRESSES="nsqd.invalid:4150")
    assert (done.returncode, done.stdout) == (7, "hello\n"), done.stderr


def test_a_program_that_knows_one_address_finds_a_server_there_that_is_gone_with_it() -> None:
    tcp, http = free_address(), free_address()
    program = f"{' '.join(OURS)} stat --once --nsqd {http} --topic orders"
    places = ["--no-lookupd", "--tcp-address", str(tcp), "--http-address", str(http)]
    done = with_broker(*places, "--topic", "orders/billing", "--topic", "orders/search", *program.split())
    assert (done.returncode, "billing" in done.stdout, "search" in done.stdout) == (0, True, True), done.stderr
    assert not accepts(tcp)
    assert not accepts(http)


def test_a_worker_is_on_these_servers_whatever_it_declares_and_sigterm_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from nsq_fast.threads import Producer\n"
        "from nsq_fast.worker import subscribe\n"
        "elsewhere = {'nsqd_tcp_addresses': 'nsqd.invalid', 'lookupd_http_addresses': 'lookupd.invalid'}\n"
        "@subscribe('orders', 'billing', **elsewhere)\n"
        "def bill(consumer, message):\n"
        "    print('billed', message.body.decode(), flush=True)\n"
        "@subscribe('new_orders', 'billing', **elsewhere)\n"
        "def bill_new(consumer, message):\n"
        "    print('billed', message.body.decode(), flush=True)\n"
    )
    ours = " ".join(OURS)
    publish = f"echo a book | {ours} pub orders -q; echo a pen | {ours} pub new_orders -q"
    command = [*OURS, "with-broker", "--topic", "orders/billing", "--", "sh", "-c"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, f"{publish}; exec {ours} run app"], cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert {process.stdout.readline() for _ in range(2)} == {"billed a book\n", "billed a pen\n"}
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PROCESS)
    finally:
        process.kill()
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_a_signal_ends_has_the_exit_code_of_shells(number: int) -> None:
    assert with_broker("sh", "-c", f"kill -{int(number)} $$").returncode == 128 + number


def test_what_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for program, code in (("no-such-program", 127), (str(tmp_path / "text"), 126)):
        done = with_broker("--no-lookupd", program)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith(f"Error: cannot run {program}: ")
        assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = with_broker("--tcp-address", "{}:{}".format(*taken.getsockname()), "true")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: cannot start: ")


def test_the_servers_outlive_an_interrupt_until_the_program_has_ended(tmp_path: Path) -> None:
    """As of a terminal's Ctrl-C, which both get."""
    (tmp_path / "program.py").write_text(
        "import os, signal, urllib.request\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"  # one that comes before the wait is waited for
        "open('ready', 'w').close()\n"
        "signal.sigwait([signal.SIGINT])\n"
        "url = f\"http://{os.environ['NSQD_HTTP_ADDRESSES']}/ping\"\n"
        "print(urllib.request.urlopen(url).read().decode(), flush=True)\n"
        "raise SystemExit(5)\n"
    )
    command = [*OURS, "with-broker", sys.executable, "program.py"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        until((tmp_path / "ready").exists)
        os.killpg(process.pid, signal.SIGINT)
        shown, _ = process.communicate(timeout=PROCESS)
    finally:
        process.kill()
    assert (process.returncode, shown) == (5, "OK\n")
