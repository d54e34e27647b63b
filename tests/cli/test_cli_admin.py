"""`nsq-fast admin` and `pub`, `tail` beside it, on servers of both dialects, embedded and real."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.servers import SERVERS, RealLookupd, RealNsqd, find_server
from support.waiting import until

from nsq_fast import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.cli import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


class Original:
    """nsqds of the original and an nsqlookupd."""

    def __init__(self, tcp: list[Any], http: list[Any], lookupd: Any) -> None:
        self.tcp, self.lookupd = tcp, lookupd
        self.nsqds = [NsqdHTTPClient.from_url(tuple(address)) for address in http]
        self.lookup = LookupdHTTPClient.from_url(tuple(lookupd))

    def admin(self, *arguments: str) -> Result:
        return run("admin", *arguments, "--lookupd", "{}:{}".format(*self.lookupd))

    def channels(self, topic: str) -> list[dict[str, Any]]:
        """The channels of a topic, of all nsqds."""
        found = [(nsqd.stats(topic=topic)["topics"] or ()) for nsqd in self.nsqds]
        return [channel for topics in found for each in topics for channel in each["channels"]]

    def topics(self, topic: str) -> list[dict[str, Any]]:
        return [each for nsqd in self.nsqds for each in (nsqd.stats(topic=topic)["topics"] or ())]


def start_original(kind: str, stack: ExitStack, folders: pytest.TempPathFactory) -> Original:
    if kind == "embedded":
        broker = stack.enter_context(BrokerProcess(nsqds=2))
        nsqds = broker.nsqds
        return Original([each.tcp for each in nsqds], [each.http for each in nsqds], broker.lookupd.http)
    if find_server("nsqd") is None or find_server("nsqlookupd") is None:
        pytest.skip(f"no real nsqd and nsqlookupd below {SERVERS}")
    lookupd = RealLookupd()
    stack.callback(lookupd.kill)
    flag = f"-lookupd-tcp-address={lookupd.tcp_address}"
    real = [RealNsqd(folders.mktemp("nsqd"), flag) for _ in range(2)]
    for each in real:
        stack.callback(each.kill)
    return Original([each.tcp_address for each in real], [each.http_address for each in real], lookupd.http_address)


@pytest.fixture(scope="module", params=["embedded", "real"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Original]:
    with ExitStack() as stack:
        yield start_original(request.param, stack, tmp_path_factory)


@pytest.fixture
def topic() -> str:
    return f"t{uuid.uuid4().hex[:8]}"


@pytest.fixture
def filled(original: Original, topic: str) -> Original:
    """Both nsqds have the topic, its channel ``c`` and three messages."""
    for nsqd in original.nsqds:
        nsqd.create_topic(topic)
        nsqd.create_channel(topic, "c")
        nsqd.multipublish(topic, [b"1", b"2", b"3"])
    until(lambda: len(original.lookup.lookup(topic)["producers"]) == 2)
    until(lambda: original.lookup.channels(topic)["channels"] == ["c"])
    return original


def test_a_topic_is_created_before_an_nsqd_has_it(original: Original, topic: str) -> None:
    created = original.admin("create", topic, "c")
    assert created.exit_code == 0, created.output
    assert "first message" in created.output
    assert original.lookup.channels(topic)["channels"] == ["c"]
    original.nsqds[0].publish(topic, b"x")
    until(lambda: [each["depth"] for each in original.channels(topic)] == [1])


def test_a_channel_is_created_and_deleted_on_every_nsqd(filled: Original, topic: str) -> None:
    assert filled.admin("create", topic, "new").output.count("done") == 2
    assert sorted(each["channel_name"] for each in filled.channels(topic)) == ["c", "c", "new", "new"]
    assert filled.admin("delete", topic, "new").output.count("done") == 2
    assert [each["channel_name"] for each in filled.channels(topic)] == ["c", "c"]
    until(lambda: filled.lookup.channels(topic)["channels"] == ["c"])


def test_a_topic_is_deleted_on_every_nsqd(filled: Original, topic: str) -> None:
    assert filled.admin("delete", topic).output.count("done") == 2
    assert filled.topics(topic) == []
    assert topic not in filled.lookup.topics()["topics"]
    again = filled.admin("delete", topic)
    assert again.exit_code == 1
    assert "TOPIC_NOT_FOUND" in again.output


def test_a_channel_is_emptied_and_paused(filled: Original, topic: str) -> None:
    assert filled.admin("pause", topic, "c").exit_code == 0
    assert all(each["paused"] for each in filled.channels(topic))
    assert filled.admin("unpause", topic, "c").exit_code == 0
    assert not any(each["paused"] for each in filled.channels(topic))
    until(lambda: [each["depth"] for each in filled.channels(topic)] == [3, 3])
    assert filled.admin("empty", topic, "c").exit_code == 0
    assert [each["depth"] for each in filled.channels(topic)] == [0, 0]


def test_a_topic_is_emptied_and_paused(filled: Original, topic: str) -> None:
    assert filled.admin("pause", topic).exit_code == 0
    assert all(each["paused"] for each in filled.topics(topic))
    filled.nsqds[0].publish(topic, b"waits")
    until(lambda: sum(each["depth"] for each in filled.topics(topic)) >= 1)
    assert filled.admin("empty", topic).exit_code == 0
    assert [each["depth"] for each in filled.topics(topic)] == [0, 0]
    assert filled.admin("unpause", topic).exit_code == 0
    assert not any(each["paused"] for each in filled.topics(topic))


@pytest.mark.parametrize(
    ("order", "cure"),
    [
        (("skip", "c"), "`empty` drops"),
        (("unskip", "c"), "`unpause`"),
        (("set-offset", "c", "end"), "`empty`"),
        (("set-order", "c", "on"), "no order"),
        (("rate-limit", "c", "7"), "`pause`"),
    ],
)
def test_what_only_a_redesigned_nsqd_can_is_explained(
    filled: Original, topic: str, order: tuple[str, ...], cure: str
) -> None:
    refused = filled.admin(order[0], topic, *order[1:])
    assert refused.exit_code == 1
    assert f"an nsqd of the original NSQ has no {order[0]}" in refused.output
    assert cure in refused.output


@pytest.mark.parametrize("order", [("expand", "3"), ("move-leader", "0", "n"), ("cluster",)])
def test_what_only_a_redesigned_lookupd_can_is_explained(filled: Original, topic: str, order: tuple[str, ...]) -> None:
    arguments = order if order == ("cluster",) else (order[0], topic, *order[1:])
    refused = filled.admin(*arguments)
    assert refused.exit_code == 1
    assert "original NSQ" in refused.output or "has no leader" in refused.output


def test_an_unknown_channel_is_named(filled: Original, topic: str) -> None:
    refused = filled.admin("pause", topic, "none")
    assert refused.exit_code == 1
    assert "CHANNEL_NOT_FOUND" in refused.output


@pytest.mark.parametrize("flag", [("--partitions", "2"), ("--replicas", "2"), ("--ordered",), ("--extend",)])
def test_what_a_topic_of_the_original_has_not_is_refused(original: Original, topic: str, flag: tuple[str, ...]) -> None:
    refused = original.admin("create", topic, *flag)
    assert refused.exit_code == 2
    assert f"{flag[0]}: a topic of the original NSQ has none" in refused.output


# --- redesigned ------------------------------------------------------------------------------------------------------


class Redesigned:
    def __init__(self, cluster: ClusterProcess) -> None:
        self.cluster = cluster
        self.tcp = [each.tcp for each in cluster.nsqds]
        self.lookupd = cluster.lookupds[0].http
        self.nsqds = [NsqdHTTPClient.from_url(tuple(each.http)) for each in cluster.nsqds]

    def admin(self, *arguments: str) -> Result:
        return run("admin", *arguments, "--lookupd", "{}:{}".format(*self.lookupd))

    def channels(self, topic: str) -> list[dict[str, Any]]:
        found = [(nsqd.stats(topic=topic)["topics"] or ()) for nsqd in self.nsqds]
        return [channel for topics in found for each in topics if each["is_leader"] for channel in each["channels"]]


@pytest.fixture(scope="module")
def redesigned() -> Iterator[Redesigned]:
    with ClusterProcess(nodes=2, lookupds=2, kind=True) as cluster:
        yield Redesigned(cluster)


def test_redesigned_topics_and_channels_are_created_and_deleted(redesigned: Redesigned, topic: str) -> None:
    created = redesigned.admin("create", topic, "--partitions", "2", "--replicas", "2", "--ordered")
    assert created.exit_code == 0, created.output
    lookup = LookupdHTTPClient.from_url(tuple(redesigned.lookupd))
    until(lambda: len(lookup.lookup(topic, access="r", metainfo=True)["partitions"]) == 2)
    meta = lookup.lookup(topic, access="r", metainfo=True)["meta"]
    assert (meta["partition_num"], meta["replica"]) == (2, 2)
    assert redesigned.admin("create", topic, "c").output.count("done") == 2
    assert [each["channel_name"] for each in redesigned.channels(topic)] == ["c", "c"]
    assert redesigned.admin("delete", topic, "c").output.count("done") == 2
    assert redesigned.channels(topic) == []
    assert redesigned.admin("delete", topic).exit_code == 0
    until(lambda: topic not in lookup.topics()["topics"])


def test_redesigned_channels_are_paused_and_emptied(redesigned: Redesigned, topic: str, tmp_path: Path) -> None:
    redesigned.cluster.create_topic(topic, 2, 1, channels=["c"])
    redesigned.cluster.wait_stable()
    lines = tmp_path / "lines"
    lines.write_text("a\nb\nc\nd\n")
    published = run("pub", topic, str(lines), "--lookupd", "{}:{}".format(*redesigned.lookupd))
    assert published.exit_code == 0, published.output
    assert redesigned.admin("pause", topic, "c", "--partition", "1").output.count("done") == 1
    assert sorted(each["paused"] for each in redesigned.channels(topic)) == [False, True]
    assert redesigned.admin("unpause", topic, "c").output.count("done") == 2
    assert sum(each["depth"] for each in redesigned.channels(topic)) == 4
    assert redesigned.admin("empty", topic, "c").output.count("done") == 2
    until(lambda: sum(each["depth"] for each in redesigned.channels(topic)) == 0)


@pytest.mark.parametrize("action", ["empty", "pause", "unpause"])
def test_a_redesigned_topic_as_a_whole_is_refused(redesigned: Redesigned, topic: str, action: str) -> None:
    redesigned.cluster.create_topic(topic)
    refused = redesigned.admin(action, topic)
    assert refused.exit_code == 2
    assert "name a CHANNEL" in refused.output


# --- pub and tail ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["embedded", "real", "redesigned"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Servers of either kind."""
    with ExitStack() as stack:
        if request.param == "redesigned":
            yield Redesigned(stack.enter_context(ClusterProcess(nodes=2, lookupds=2, kind=True)))
        else:
            yield start_original(request.param, stack, tmp_path_factory)


@pytest.fixture
def flag(servers: Any, topic: str) -> tuple[str, ...]:
    """Servers that have the topic, with the channel ``c``."""
    if isinstance(servers, Redesigned):
        servers.cluster.create_topic(topic, 2, 1, channels=["c"])
        servers.cluster.wait_stable()
    else:
        for nsqd in servers.nsqds:
            nsqd.create_topic(topic)
            nsqd.create_channel(topic, "c")
        until(lambda: len(servers.lookup.lookup(topic)["producers"]) == 2)
    return ("--lookupd", "{}:{}".format(*servers.lookupd))


def test_tail_prints_json_with_what_it_knows_of_a_message(
    servers: Any, flag: tuple[str, ...], topic: str, tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"text\n\xff\xfe\n")
    assert run("pub", topic, str(lines), *flag).exit_code == 0
    printed = run("tail", topic, "-n", "2", "--channel", "c", "--json", *flag)
    assert printed.exit_code == 0, printed.output
    found = [json.loads(line) for line in printed.stdout.splitlines()]
    assert sorted(each.get("body", "") for each in found) == ["", "text"]
    assert [each["body_base64"] for each in found if "body" not in each] == ["//4="]
    for each in found:
        assert (each["topic"], each["attempts"]) == (topic, 1)
        assert len(each["id"]) in (16, 32)
        assert each["time"].endswith("Z")
        assert isinstance(each["timestamp"], int)
        assert ("partition" in each) is isinstance(servers, Redesigned)


def test_tail_keeps_what_it_does_not_print(servers: Any, flag: tuple[str, ...], topic: str, tmp_path: Path) -> None:
    if isinstance(servers, Redesigned):  # a topic without a channel takes nothing there
        assert run("admin", "delete", topic, "c", *flag).exit_code == 0
        assert run("admin", "create", topic, "tail", *flag).exit_code == 0
    else:
        assert run("admin", "delete", topic, "c", *flag).exit_code == 0
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{number}\n" for number in range(5)))
    assert run("pub", topic, str(lines), *flag).exit_code == 0
    seen: list[str] = []
    for count in ("2", "2", "1"):
        printed = run("tail", topic, "-n", count, "--take-backlog", *flag)
        assert printed.exit_code == 0, printed.output
        assert "--channel tail" in printed.stderr
        seen += printed.stdout.splitlines()
    assert sorted(seen) == list("01234")


def test_tail_says_what_taking_the_backlog_does() -> None:
    text = " ".join(run("tail", "--help").output.split())
    assert "from the channel 'tail', which is made and stays" in text


def test_pub_defers(original: Original, topic: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("a\nb\n")
    original.nsqds[0].create_topic(topic)
    original.nsqds[0].create_channel(topic, "c")
    published = run("pub", topic, str(lines), "--defer", "30m", "--nsqd", "{}:{}".format(*original.tcp[0]))
    assert published.exit_code == 0, published.output
    assert "published 2 messages" in published.output
    until(lambda: [each["deferred_count"] for each in original.channels(topic)] == [2])


def test_pub_puts_a_key_or_a_partition_where_it_belongs(redesigned: Redesigned, topic: str, tmp_path: Path) -> None:
    redesigned.cluster.create_topic(topic, 2, 1, channels=["c"])
    redesigned.cluster.wait_stable()
    flag = ("--lookupd", "{}:{}".format(*redesigned.lookupd))
    lines = tmp_path / "lines"
    lines.write_text("a\nb\nc\n")
    for options in (("--partition", "1"), ("--key", "k"), ("--key", "k")):
        published = run("pub", topic, str(lines), *options, *flag)
        assert published.exit_code == 0, published.output
    printed = run("tail", topic, "-n", "9", "--channel", "c", "--json", *flag)
    partitions = [json.loads(line)["partition"] for line in printed.stdout.splitlines()]
    assert partitions.count(1) in (3, 9)
    assert partitions.count(0) in (0, 6)


@pytest.mark.parametrize("options", [("--key", "k", "--partition", "1"), ("--defer", "-1s"), ("--partition", "-1")])
def test_pub_refuses_what_does_not_fit(original: Original, topic: str, options: tuple[str, ...]) -> None:
    refused = run("pub", topic, *options, "--nsqd", "{}:{}".format(*original.tcp[0]))
    assert refused.exit_code == 2
