"""TLS and AUTH on the command line: the same options for every command that talks to servers."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme
from support.commands import Answering, run, serving
from support.servers import SERVERS, RealNsqd, find_server

from nsq_fast.broker import BrokerProcess
from nsq_fast.cli import main
from nsq_fast.names import Address

SECRET = "s3cret of the shop"
COMMANDS = ("pub", "tail", "lookup", "stat", "demo")
OPTIONS = ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "auth_secret_file")


class AuthServer(Answering):
    """Lets in who knows the secret."""

    def do_GET(self) -> None:
        secret = parse_qs(urlsplit(self.path).query).get("secret")
        grant = {"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}
        answer = {"ttl": 60, "identity": "me", "identity_url": "", "authorizations": [grant]}
        self.answer(200, answer) if secret == [SECRET] else self.answer(403, {})


class LookupServer(Answering):
    """Knows a channel of every topic."""

    def do_GET(self) -> None:
        self.answer(200, {"channels": ["readers"], "producers": []})


class Guarded:
    """An nsqd that takes TLS with client certificates only, and AUTH; and what a client needs to get in."""

    def __init__(self, tcp: Address, https: Address, trust: list[str], options: list[str]) -> None:
        self.tcp, self.https = str(tcp), f"https://{https}"
        self.trust, self.options = trust, options


@pytest.fixture(scope="module", params=["embedded", "original"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    authority = trustme.CA()
    folder = tmp_path_factory.mktemp("guarded")
    files = {name: str(folder / name) for name in ("ca", "server", "client", "client-key", "secret")}
    authority.cert_pem.write_to_path(files["ca"])
    authority.issue_cert("nsqd.shop").private_key_and_cert_chain_pem.write_to_path(files["server"])
    client = authority.issue_cert("client")
    client.cert_chain_pems[0].write_to_path(files["client"])
    client.private_key_pem.write_to_path(files["client-key"])
    Path(files["secret"]).write_text(f"{SECRET}\n")
    trust = ["--tls-ca", files["ca"], "--tls-server-name", "nsqd.shop"]
    options = [*trust, "--tls-cert", files["client"], "--tls-key", files["client-key"]]
    options += ["--auth-secret-file", files["secret"]]
    server = {
        "tls_cert": files["server"],
        "tls_key": files["server"],
        "tls_root_ca_file": files["ca"],
        "tls_client_auth_policy": "require-verify",
        "tls_required": "true",
    }
    with serving(AuthServer) as auth:
        if request.param == "embedded":
            flags = {**server, "auth_http_addresses": (str(auth),), "https_address": "127.0.0.1:0"}
            with BrokerProcess(lookupd=False, **flags) as broker:
                yield Guarded(broker.nsqd.tcp, broker.nsqd.https, trust, options)
            return
        if find_server("nsqd") is None:
            pytest.skip(f"no real nsqd below {SERVERS}")
        texts = [f"-{name.replace('_', '-')}={value}" for name, value in server.items()]
        nsqd = RealNsqd(folder, *texts, f"-auth-http-address={auth}", https=True)
        try:
            yield Guarded(nsqd.tcp_address, nsqd.https_address, trust, options)
        finally:
            nsqd.kill()


@pytest.fixture
def lines(tmp_path: Path) -> str:
    """The name of a file with two messages."""
    (tmp_path / "lines").write_text("one\ntwo\n")
    return str(tmp_path / "lines")


def test_every_command_that_talks_to_servers_takes_the_same_options() -> None:
    helps = set()
    for name in COMMANDS:
        params = {each.name: each for each in main.get_command(None, name).params}  # type: ignore[arg-type]
        helps.add(tuple(params[option].help for option in OPTIONS))  # type: ignore[attr-defined]
    bench = main.get_command(None, "bench")  # type: ignore[arg-type]
    for name in ("consume", "publish", "roundtrip", "ordered", "idle", "suite"):
        params = {each.name: each for each in bench.commands[name].params}  # type: ignore[union-attr]
        helps.add(tuple(params[option].help for option in OPTIONS))
    assert len(helps) == 1


def test_messages_pass_with_a_client_certificate_and_a_secret(guarded: Guarded, topic: str, lines: str) -> None:
    published = run("pub", topic, lines, "--nsqd", guarded.tcp, *guarded.options)
    assert published.exit_code == 0, published.output
    shown = run("stat", "--once", "--json", "--topic", topic, "--nsqd", guarded.https, *guarded.options)
    assert shown.exit_code == 0, shown.output
    assert [row["depth"] for row in json.loads(shown.stdout)] == [2]
    refused = run("tail", topic, "-n", "2", "--nsqd", guarded.tcp, "--nsqd-http", guarded.https, *guarded.options)
    assert "its 2 waiting messages" in refused.output
    printed = run("tail", topic, "-n", "2", "--take-backlog", "--nsqd", guarded.tcp, *guarded.options)
    assert sorted(printed.stdout.splitlines()) == ["one", "two"]
    for result in (published, shown, refused, printed):
        assert SECRET not in result.output


def test_the_demo_passes(guarded: Guarded) -> None:
    done = run("demo", "--messages", "200", "--topics", "1", "--json", "--nsqd", guarded.tcp, *guarded.options)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["lost"] == 0


BENCH = [
    ("consume", "--client", "nsq_fast", "--client", "nsq_fast batches"),
    ("consume", "--rate", "1000", "--client", "nsq_fast"),
    ("publish", "--mode", "batch", "--client", "nsq_fast threads"),
    ("roundtrip", "--client", "nsq_fast aio"),
]


@pytest.mark.parametrize("measured", BENCH, ids=lambda measured: " ".join(measured[:2]))
def test_bench_measures_there(guarded: Guarded, tmp_path: Path, measured: tuple[str, ...]) -> None:
    target = tmp_path / "run.json"
    small = ("--count", "1200", "--rounds", "1", "--client", "floor: core", "--json", str(target))
    done = run("bench", *measured, *small, "--nsqd", guarded.tcp, *guarded.options)
    assert done.exit_code == 0, done.output
    (scenario,) = json.loads(target.read_text())["scenarios"]
    assert scenario["settings"]["tls"] is True
    assert [len(client["rounds"]) for client in scenario["clients"]] == [1] * measured.count("--client"), scenario
    assert "left out: floor: core: bench cannot give them TLS and AUTH options" in done.stderr
    assert SECRET not in done.output + target.read_text()


def test_bench_does_not_show_the_secret_among_its_processes(guarded: Guarded) -> None:
    seen: set[bytes] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    seen.add(path.read_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    small = ("--count", "1200", "--rounds", "1", "--rate", "1000", "--client", "nsq_fast")
    done = run("bench", "consume", *small, "--nsqd", guarded.tcp, *guarded.options)
    stop.set()
    watcher.join()
    assert done.exit_code == 0, done.output
    assert any(b"use_nsq_fast.py" in arguments for arguments in seen)
    assert not any(SECRET.encode() in arguments for arguments in seen)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["consume", "--auth-secret-file", "{secret}"], "are for servers that run already"),
        (["ordered", "--tls"], "the embedded cluster has none"),
        (["consume", "--nsqd", "{nsqd}", "--tls", "--client", "floor: core"], "bench cannot give them TLS"),
        (["suite", "--only", "consume-tls", "--nsqd", "{nsqd}"], "consume-tls: needs --tls"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bench_says_what_it_cannot_secure(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "secret").write_text(SECRET)
    with serving(LookupServer) as address:
        places = {"secret": tmp_path / "secret", "nsqd": address}
        result = run("bench", *(argument.format(**places) for argument in arguments))
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("leave_out", "says"),
    [("--tls-ca", "certificate verify failed"), ("--tls-server-name", "not valid for '127.0.0.1'")],
)
def test_why_a_server_is_not_trusted_is_said_while_it_is_tried_again(
    guarded: Guarded, topic: str, lines: str, leave_out: str, says: str
) -> None:
    place = guarded.options.index(leave_out)
    options = guarded.options[:place] + guarded.options[place + 2 :]
    limit = ("--producer-opt", "publish_timeout=1")
    failed = run("pub", topic, lines, "--nsqd", guarded.tcp, *limit, *options)
    assert failed.exit_code == 1
    *warnings, error = failed.stderr.splitlines()
    assert any(line.startswith("warning: ") and says in line and guarded.tcp in line for line in warnings)
    assert error.startswith("Error: after 0 messages: ")
    assert says in error


def test_a_missing_secret_is_said(guarded: Guarded, topic: str, lines: str) -> None:
    options = guarded.options[: guarded.options.index("--auth-secret-file")]
    failed = run("pub", topic, lines, "--nsqd", guarded.tcp, "--producer-opt", "publish_timeout=1", *options)
    assert failed.exit_code == 1
    assert "AUTH" in failed.stderr


def test_lookup_asks_over_https(tmp_path: Path, topic: str) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    trust = ("--tls-ca", str(tmp_path / "ca"), "--tls-server-name", "localhost")
    with serving(LookupServer, context) as address:
        found = run("lookup", topic, "--json", "--lookupd", f"https://{address}", *trust)
    assert json.loads(found.stdout)["channels"] == ["readers"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tls-ca", "{garbage}"], "cafile {garbage}: "),
        (["--tls-cert", "{garbage}"], "certfile {garbage}: "),
        (["--tls-key", "{garbage}"], "--tls-key needs --tls-cert"),
        (["--tls-ca", "/no/such/file"], "'/no/such/file' does not exist"),
        (["--auth-secret-file", "{empty}"], "--auth-secret-file {empty}: it is empty"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, command: str, arguments: list[str], says: str) -> None:
    files = {name: str(tmp_path / name) for name in ("garbage", "empty")}
    Path(files["garbage"]).write_text("no certificate")
    Path(files["empty"]).write_text("\n")
    what = [] if command in ("stat", "demo") else ["topic"]
    where = "--lookupd" if command == "lookup" else "--nsqd"
    result = run(command, *what, where, "127.0.0.1", *(argument.format(**files) for argument in arguments))
    assert result.exit_code == 2
    (error,) = (line for line in result.output.splitlines() if line.startswith("Error:"))
    assert says.format(**files) in error
