"""`nsq-fast admin` and `pub`, `tail` beside it, on servers of both dialects, embedded and real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import Servers, run
from support.waiting import until


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
    filled: Servers, topic: str, order: tuple[str, ...], cure: str
) -> None:
    refused = filled.admin(order[0], topic, *order[1:])
    assert refused.exit_code == 1
    assert f"an nsqd of the original NSQ has no {order[0]}" in refused.output
    assert cure in refused.output


@pytest.mark.parametrize("order", [("expand", "3"), ("move-leader", "0", "n"), ("cluster",)])
def test_what_only_a_redesigned_lookupd_can_is_explained(filled: Servers, topic: str, order: tuple[str, ...]) -> None:
    arguments = order if order == ("cluster",) else (order[0], topic, *order[1:])
    refused = filled.admin(*arguments)
    assert refused.exit_code == 1
    assert "original NSQ" in refused.output or "has no leader" in refused.output


def test_an_unknown_channel_is_named(filled: Servers, topic: str) -> None:
    refused = filled.admin("pause", topic, "none")
    assert refused.exit_code == 1
    assert "CHANNEL_NOT_FOUND" in refused.output


@pytest.mark.parametrize("flag", [("--partitions", "2"), ("--replicas", "2"), ("--ordered",), ("--extend",)])
def test_what_a_topic_of_the_original_has_not_is_refused(broker: Servers, topic: str, flag: tuple[str, ...]) -> None:
    refused = broker.admin("create", topic, *flag)
    assert refused.exit_code == 2
    assert f"{flag[0]}: a topic of the original NSQ has none" in refused.output


# --- redesigned ------------------------------------------------------------------------------------------------------


def test_redesigned_topics_and_channels_are_created_and_deleted(redesigned: Servers, topic: str) -> None:
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


def test_redesigned_channels_are_paused_and_emptied(redesigned: Servers, topic: str, tmp_path: Path) -> None:
    redesigned.make(topic, 2)
    lines = tmp_path / "lines"
    lines.write_text("a\nb\nc\nd\n")
    published = run("pub", topic, str(lines), *redesigned.flag)
    assert published.exit_code == 0, published.output
    assert redesigned.admin("pause", topic, "c", "--partition", "1").output.count("done") == 1
    assert sorted(each["paused"] for each in redesigned.channels(topic)) == [False, True]
    assert redesigned.admin("unpause", topic, "c").output.count("done") == 2
    assert sum(each["depth"] for each in redesigned.channels(topic)) == 4
    assert redesigned.admin("empty", topic, "c").output.count("done") == 2
    until(lambda: sum(each["depth"] for each in redesigned.channels(topic)) == 0)


@pytest.mark.parametrize("action", ["empty", "pause", "unpause"])
def test_a_redesigned_topic_as_a_whole_is_refused(redesigned: Servers, topic: str, action: str) -> None:
    redesigned.cluster.create_topic(topic)
    refused = redesigned.admin(action, topic)
    assert refused.exit_code == 2
    assert "name a CHANNEL" in refused.output


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
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{number}\n" for number in range(5)))
    assert run("pub", topic, str(lines), *servers.flag).exit_code == 0
    seen: list[str] = []
    for count in ("2", "2", "1"):
        printed = run("tail", topic, "-n", count, "--take-backlog", *servers.flag)
        assert printed.exit_code == 0, printed.output
        assert "--channel tail" in printed.stderr
        seen += printed.stdout.splitlines()
    assert sorted(seen) == list("01234")


def test_tail_says_what_taking_the_backlog_does() -> None:
    text = " ".join(run("tail", "--help").output.split())
    assert "from the channel 'tail', which is made and stays" in text


def test_pub_defers(broker: Servers, topic: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("a\nb\n")
    broker.clients[0].create_topic(topic)
    broker.clients[0].create_channel(topic, "c")
    published = run("pub", topic, str(lines), "--defer", "30m", "--nsqd", str(broker.nsqd.tcp))
    assert published.exit_code == 0, published.output
    assert "published 2 messages" in published.output
    until(lambda: [each["deferred_count"] for each in broker.channels(topic)] == [2])


def test_pub_puts_a_key_or_a_partition_where_it_belongs(redesigned: Servers, topic: str, tmp_path: Path) -> None:
    redesigned.make(topic, 2)
    flag = redesigned.flag
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
def test_pub_refuses_what_does_not_fit(broker: Servers, topic: str, options: tuple[str, ...]) -> None:
    refused = run("pub", topic, *options, "--nsqd", str(broker.nsqd.tcp))
    assert refused.exit_code == 2
