"""`nsq-fast admin` and `pub`, `tail` beside it, on servers of both dialects, embedded and real."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme
from support.commands import Servers, run
from support.http_server import Question, scripted_http
from support.servers import SERVERS, RealNsqd, find_server
from support.waiting import until

from nsq_fast.broker import BrokerProcess
from nsq_fast.cli import main
from nsq_fast.names import Address


@pytest.fixture
def filled(broker: Servers, topic: str) -> Servers:
    """Both nsqds have the topic, its channel ``c`` and three messages."""
    broker.make(topic)
    for client in broker.clients:
        client.multipublish(topic, [b"1", b"2", b"3"])
    return broker


def test_a_topic_is_created_before_an_nsqd_has_it(broker: Servers, topic: str) -> None:
    created = broker.admin("create", topic, "c")
    assert created.exit_code == 0, created.output
    assert "first message" in created.output
    assert broker.lookup.channels(topic)["channels"] == ["c"]
    broker.clients[0].publish(topic, b"x")
    until(lambda: [each["depth"] for each in broker.channels(topic)] == [1])


def test_a_channel_is_created_and_deleted_on_every_nsqd(filled: Servers, topic: str) -> None:
    assert filled.admin("create", topic, "new").output.count("done") == 2
    assert sorted(each["channel_name"] for each in filled.channels(topic)) == ["c", "c", "new", "new"]
    assert filled.admin("delete", topic, "new").output.count("done") == 2
    assert [each["channel_name"] for each in filled.channels(topic)] == ["c", "c"]
    until(lambda: filled.lookup.channels(topic)["channels"] == ["c"])


def test_a_topic_is_deleted_on_every_nsqd(filled: Servers, topic: str) -> None:
    assert filled.admin("delete", topic).output.count("done") == 2
    assert filled.topics(topic) == []
    assert topic not in filled.lookup.topics()["topics"]
    again = filled.admin("delete", topic)
    assert again.exit_code == 1
    assert "TOPIC_NOT_FOUND" in again.output


def test_a_channel_is_emptied_and_paused(filled: Servers, topic: str) -> None:
    assert filled.admin("pause", topic, "c").exit_code == 0
    assert all(each["paused"] for each in filled.channels(topic))
    assert filled.admin("unpause", topic, "c").exit_code == 0
    assert not any(each["paused"] for each in filled.channels(topic))
    until(lambda: [each["depth"] for each in filled.channels(topic)] == [3, 3])
    assert filled.admin("empty", topic, "c").exit_code == 0
    assert [each["depth"] for each in filled.channels(topic)] == [0, 0]


def test_a_topic_is_emptied_and_paused(filled: Servers, topic: str) -> None:
    assert filled.admin("pause", topic).exit_code == 0
    assert all(each["paused"] for each in filled.topics(topic))
    filled.clients[0].publish(topic, b"waits")
    until(lambda: sum(each["depth"] for each in filled.topics(topic)) >= 1)
    assert filled.admin("empty", topic).exit_code == 0
    assert [each["depth"] for each in filled.topics(topic)] == [0, 0]
    assert filled.admin("unpause", topic).exit_code == 0
    assert not any(each["paused"] for each in filled.topics(topic))


def test_what_only_a_redesigned_cluster_can_is_explained(filled: Servers, topic: str) -> None:
    of_nsqd = {
        ("skip", topic, "c"): "`empty` drops",
        ("unskip", topic, "c"): "`unpause`",
        ("set-offset", topic, "c", "end"): "`empty`",
        ("set-order", topic, "c", "on"): "no order",
        ("rate-limit", topic, "c", "7"): "`pause`",
    }
    for order, cure in of_nsqd.items():
        refused = filled.admin(*order)
        assert refused.exit_code == 1
        assert f"an nsqd of the original NSQ has no {order[0]}" in refused.output
        assert cure in refused.output
    for order in (("expand", topic, "3"), ("move-leader", topic, "0", "n"), ("cluster",)):
        refused = filled.admin(*order)
        assert refused.exit_code == 1
        assert "original NSQ" in refused.output or "has no leader" in refused.output


def test_an_unknown_channel_is_named(filled: Servers, topic: str) -> None:
    refused = filled.admin("pause", topic, "none")
    assert refused.exit_code == 1
    assert "CHANNEL_NOT_FOUND" in refused.output


def test_what_a_topic_of_the_original_has_not_is_refused(broker: Servers, topic: str) -> None:
    for flag in (("--partitions", "2"), ("--replicas", "2"), ("--ordered",), ("--extend",)):
        refused = broker.admin("create", topic, *flag)
        assert refused.exit_code == 2
        assert f"{flag[0]}: a topic of the original NSQ has none" in refused.output


# --- redesigned ------------------------------------------------------------------------------------------------------


def test_redesigned_topics_and_channels_are_created_and_deleted(redesigned: Servers, topic: str) -> None:
    for action in ("create", "delete"):
        refused = redesigned.admin(action, topic, "c")
        assert (refused.exit_code, "lookup names no nsqd" in refused.output) == (1, True)
    created = redesigned.admin("create", topic, "--partitions", "2", "--replicas", "2", "--ordered")
    assert created.exit_code == 0, created.output
    lookup = redesigned.lookup
    until(lambda: len(lookup.lookup(topic, access="r", metainfo=True)["partitions"]) == 2)
    meta = lookup.lookup(topic, access="r", metainfo=True)["meta"]
    assert (meta["partition_num"], meta["replica"]) == (2, 2)
    assert redesigned.admin("create", topic, "c").output.count("done") == 2
    assert [each["channel_name"] for each in redesigned.channels(topic)] == ["c", "c"]
    assert redesigned.admin("delete", topic, "c").output.count("done") == 2
    assert redesigned.channels(topic) == []
    assert redesigned.admin("delete", topic).exit_code == 0
    until(lambda: topic not in lookup.topics()["topics"])


def published(tmp_path: Path, topic: str, bodies: str, *flags: str) -> str:
    """Publish the characters, a message each; what the command says."""
    lines = tmp_path / "lines"
    lines.write_text("\n".join(bodies))
    done = run("pub", topic, str(lines), *flags)
    assert done.exit_code == 0, done.output
    return done.output


def test_redesigned_channels_are_paused_and_emptied(redesigned: Servers, topic: str, tmp_path: Path) -> None:
    redesigned.make(topic, 2)
    published(tmp_path, topic, "abcd", *redesigned.flag)
    assert redesigned.admin("pause", topic, "c", "--partition", "1").output.count("done") == 1
    assert sorted(each["paused"] for each in redesigned.channels(topic)) == [False, True]
    assert redesigned.admin("unpause", topic, "c").output.count("done") == 2
    assert sum(each["depth"] for each in redesigned.channels(topic)) == 4
    assert redesigned.admin("empty", topic, "c").output.count("done") == 2
    until(lambda: sum(each["depth"] for each in redesigned.channels(topic)) == 0)
    for action in ("empty", "pause", "unpause"):
        refused = redesigned.admin(action, topic)
        assert (refused.exit_code, "name a CHANNEL" in refused.output) == (2, True)


@pytest.mark.parametrize("action", ["create", "delete", "pause"])
def test_partitions_that_nobody_leads_are_named(action: str) -> None:
    def answer(question: Question) -> None:
        host, port = server.address
        nsqd = {"broadcast_address": host, "tcp_port": 1, "http_port": port, "version": "0.3.7-HA.1.9.9"}
        meta = {"partition_num": 3, "replica": 1}
        found = {"partitions": {"1": nsqd}, "producers": [nsqd], "channels": [], "meta": meta}
        question.answer({**found, "lookupdnodes": [], "lookupdleader": {}})

    with scripted_http(answer) as [server]:
        done = run("admin", action, "t", "c", "--lookupd", str(server.address))
    assert (done.exit_code, done.output.count("done")) == (1, 2), done.output
    assert "partition 1: done" in done.output
    assert "for want of a leader: partition 0, 2" in done.output


# --- pub and tail ----------------------------------------------------------------------------------------------------


def test_tail_prints_json_with_what_it_knows_of_a_message(servers: Servers, topic: str, tmp_path: Path) -> None:
    servers.make(topic, 2)
    lines = tmp_path / "lines"
    lines.write_bytes(b"text\n\xff\xfe\n")
    assert run("pub", topic, str(lines), *servers.flag).exit_code == 0
    printed = run("tail", topic, "-n", "2", "--channel", "c", "--json", *servers.flag)
    assert printed.exit_code == 0, printed.output
    found = [json.loads(line) for line in printed.stdout.splitlines()]
    assert sorted(each.get("body", "") for each in found) == ["", "text"]
    assert [each["body_base64"] for each in found if "body" not in each] == ["//4="]
    for each in found:
        assert (each["topic"], each["attempts"]) == (topic, 1)
        assert len(each["id"]) in (16, 32)
        assert each["time"].endswith("Z")
        assert isinstance(each["timestamp"], int)
        assert ("partition" in each) is bool(servers.cluster)


def test_tail_keeps_what_it_does_not_print(servers: Servers, topic: str, tmp_path: Path) -> None:
    servers.make(topic, 2)
    assert servers.admin("delete", topic, "c").exit_code == 0
    if servers.cluster:  # a topic without a channel takes nothing there
        assert servers.admin("create", topic, "tail").exit_code == 0
    published(tmp_path, topic, "01234", *servers.flag)
    seen: list[str] = []
    for count in ("2", "2", "1"):
        printed = run("tail", topic, "-n", count, "--take-backlog", *servers.flag)
        assert printed.exit_code == 0, printed.output
        assert "--channel tail" in printed.stderr
        seen += printed.stdout.splitlines()
    assert sorted(seen) == list("01234")


def test_pub_defers(broker: Servers, topic: str, tmp_path: Path) -> None:
    broker.clients[0].create_topic(topic)
    broker.clients[0].create_channel(topic, "c")
    said = published(tmp_path, topic, "ab", "--defer", "30m", "--nsqd", str(broker.nsqd.tcp))
    assert "published 2 messages" in said
    until(lambda: [each["deferred_count"] for each in broker.channels(topic)] == [2])


def test_pub_puts_a_key_or_a_partition_where_it_belongs(redesigned: Servers, topic: str, tmp_path: Path) -> None:
    redesigned.make(topic, 2)
    for options in (("--partition", "1"), ("--key", "k"), ("--key", "k")):
        published(tmp_path, topic, "abc", *options, *redesigned.flag)
    printed = run("tail", topic, "-n", "9", "--channel", "c", "--json", *redesigned.flag)
    partitions = [json.loads(line)["partition"] for line in printed.stdout.splitlines()]
    assert partitions.count(1) in (3, 9)
    assert partitions.count(0) in (0, 6)


# TLS and AUTH on the command line: the same options for every command that talks to servers.


SECRET = "s3cret of the shop"
COMMANDS = ("pub", "tail", "lookup", "stat", "demo")
OPTIONS = ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "auth_secret_file")


def authorize(question: Question) -> None:
    """Let in who knows the secret."""
    secret = parse_qs(urlsplit(question.target).query).get("secret")
    grant = {"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}
    answer = {"ttl": 60, "identity": "me", "identity_url": "", "authorizations": [grant]}
    question.answer(answer) if secret == [SECRET] else question.answer({}, "403 Forbidden")


def look_up(question: Question) -> None:
    """It knows a channel of every topic."""
    question.answer({"channels": ["readers"], "producers": []})


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
    with scripted_http(authorize) as [auth]:
        if request.param == "embedded":
            flags = {**server, "auth_http_addresses": (str(auth.address),), "https_address": "127.0.0.1:0"}
            with BrokerProcess(lookupd=False, **flags) as broker:
                yield Guarded(broker.nsqd.tcp, broker.nsqd.https, trust, options)
            return
        if find_server("nsqd") is None:
            pytest.skip(f"no real nsqd below {SERVERS}")
        texts = [f"-{name.replace('_', '-')}={value}" for name, value in server.items()]
        nsqd = RealNsqd(folder, *texts, f"-auth-http-address={auth.address}", https=True)
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


@contextmanager
def command_lines() -> Iterator[set[bytes]]:
    """Those of all processes that there are meanwhile."""
    seen: set[bytes] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    seen.add(path.read_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


@pytest.mark.parametrize(
    ("guarded", "measured"),
    [
        ("embedded", ("consume", "--client", "nsq_fast", "--client", "nsq_fast batches")),
        ("original", ("consume", "--rate", "1000", "--client", "nsq_fast")),
        ("embedded", ("publish", "--mode", "batch", "--client", "nsq_fast threads")),
        ("original", ("roundtrip", "--client", "nsq_fast aio")),
    ],
    indirect=["guarded"],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else value,
)
def test_bench_measures_there_and_does_not_show_the_secret(
    guarded: Guarded, tmp_path: Path, measured: tuple[str, ...]
) -> None:
    target = tmp_path / "run.json"
    small = ("--count", "1200", "--rounds", "1", "--client", "floor: core", "--json", str(target))
    with command_lines() as seen:
        done = run("bench", *measured, *small, "--nsqd", guarded.tcp, *guarded.options)
    assert done.exit_code == 0, done.output
    (scenario,) = json.loads(target.read_text())["scenarios"]
    assert scenario["settings"]["tls"] is True
    assert [len(client["rounds"]) for client in scenario["clients"]] == [1] * measured.count("--client"), scenario
    assert "left out: floor: core: bench cannot give them TLS and AUTH options" in done.stderr
    assert SECRET not in done.output + target.read_text()
    assert any(b"/_programs/use_" in arguments for arguments in seen)
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
    with scripted_http(look_up) as [server]:
        places = {"secret": tmp_path / "secret", "nsqd": server.address}
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
    with scripted_http(look_up, ssl_context=context) as [lookupd]:
        found = run("lookup", topic, "--json", "--lookupd", f"https://{lookupd.address}", *trust)
    assert json.loads(found.stdout)["channels"] == ["readers"]


@pytest.mark.parametrize(
    ("command", "option", "says"),
    [
        ("pub topic --nsqd", ["--tls-ca", "{garbage}"], "cafile {garbage}: "),
        ("tail topic --nsqd", ["--tls-cert", "{garbage}"], "certfile {garbage} with its key in the same file: "),
        ("lookup topic --lookupd", ["--tls-key", "{garbage}"], "--tls-key needs --tls-cert"),
        ("stat --nsqd", ["--tls-ca", "/no/such/file"], "'/no/such/file' does not exist"),
        ("demo --nsqd", ["--auth-secret-file", "{empty}"], "--auth-secret-file {empty}: it is empty"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, command: str, option: list[str], says: str) -> None:
    files = {name: str(tmp_path / name) for name in ("garbage", "empty")}
    Path(files["garbage"]).write_text("no certificate")
    Path(files["empty"]).write_text("\n")
    result = run(*command.split(), "127.0.0.1", *(word.format(**files) for word in option))
    assert result.exit_code == 2
    (error,) = (line for line in result.output.splitlines() if line.startswith("Error:"))
    assert says.format(**files) in error
