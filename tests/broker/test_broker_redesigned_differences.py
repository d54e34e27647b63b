"""What a real redesigned nsqd does that is not kind, where ours differs on purpose, and what was recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.differential import Stage, open_stage
from support.http import ask, shape
from support.replay import DATA, Replay, conversations
from support.servers import accepts
from support.transcripts import Place, Transcript, differences, perform
from support.waiting import WAIT, promptly, until
from support.wire import Consumer, WireClient, headed, identify, sized

from nsq_fast.broker import RedesignedCluster
from nsq_fast.broker.redesigned.cluster import NodeServer
from nsq_fast.broker.redesigned.log import Draft

# What a redesigned nsqd does that is not kind: the same test on the embedded one and on the real one.


EXT = {"extend_support": True}

TAG = "##client_dispatch_tag"


def publish(node: Any, *messages: tuple[dict[str, Any], bytes]) -> None:
    client = WireClient(node.tcp_address)
    for header, body in messages:
        command = b"PUB_EXT ext 0\n" + sized(headed(header, body)) if header else b"PUB ext 0\n" + sized(body)
        assert client.command(command) == b"OK"
    client.close()


def consume(node: Any, rdy: int = 10, **identity: Any) -> Consumer:
    return Consumer(node, "SUB ext ch 0", rdy=rdy, **EXT, **identity)


def take(consumer: Consumer) -> bytes:
    frame = consumer.receive()
    consumer.finish(frame)
    return frame.data[-1:]


def test_an_untagged_message_blocks_a_lone_tagged_client(node: Any) -> None:
    tagged = consume(node, desired_tag="red")
    publish(node, ({TAG: "red"}, b"1"), ({"k": "v"}, b"2"), ({TAG: "red"}, b"3"))
    assert take(tagged) == b"1"
    assert tagged.is_quiet()
    untagged = consume(node)
    assert take(untagged) == b"2"
    assert take(tagged) == b"3"


def test_a_tagged_message_blocks_the_others_while_its_client_is_not_ready(node: Any) -> None:
    tagged, untagged = consume(node, rdy=0, desired_tag="red"), consume(node)
    publish(node, ({TAG: "red"}, b"1"), ({"k": "v"}, b"2"))
    assert untagged.is_quiet()
    tagged.send(b"RDY 1\n")
    assert take(tagged) == b"1"
    assert take(untagged) == b"2"


def test_untagged_clients_get_the_messages_of_a_tag_that_has_gone(node: Any) -> None:
    tagged, untagged = consume(node, rdy=0, desired_tag="red"), consume(node)
    publish(node, ({TAG: "red"}, b"1"), ({"k": "v"}, b"2"))
    tagged.close()
    assert [take(untagged), take(untagged)] == [b"1", b"2"]


HEADERS: list[dict[str, Any]] = [
    *({"k": "ab", "l": "m"}, {}, {"k": 7}, {"o": {"k": "in"}}),
    *({"k": value} for value in ("ac", "a", "a\n", "3", "٣")),
]
"""Of the messages A, B, C and so on."""


def of(kind: int, data: str, key: str = "k", **more: Any) -> dict[str, Any]:
    return {"type": kind, "filter_ext_key": key, "filter_data": data, **more}


def of_several(key: str, **wanted: str) -> dict[str, Any]:
    items = [{"filter_ext_key": name, "filter_data": data} for name, data in wanted.items()]
    return {"type": 4, "filter_ext_key": key, "filter_data_list": items}


FILTERS: list[tuple[dict[str, Any], bytes]] = [
    (of(1, "ab"), b"A"),
    (of(1, "in", "o.k"), b"D"),
    (of(1, "ab", inverse=True), b"BCDEFGHI"),
    (of(2, "^a.$"), b"AE"),
    (of(2, "^a$"), b"F"),  # the $ of Go is not before a newline at the end
    (of(2, r"^\d$"), b"H"),  # of ASCII
    (of(2, r"^\p{Arabic}$"), b"I"),
    (of(2, r"^\p{Greek}$"), b""),
    (of(2, "("), b"ABCDEFGHI"),  # no regular expression for Go: the filter is ignored
    (of(2, "(?!a)"), b"ABCDEFGHI"),
    (of(2, r"\C"), b"ABCDEFGHI"),  # of RE2 alone
    (of(2, ""), b"ABCDEFGHI"),
    (of(3, "{a,x}[!b]"), b"EG"),
    (of(3, "{b,a}?"), b"AEG"),
    (of(3, "[!b-z]*"), b"AEFGHI"),
    (of(3, "[v"), b"ABCDEFGHI"),
    (of_several("all", k="ab", l="m"), b"A"),
    (of_several("any", k="ac", l="m"), b"AE"),
    (of(9, "x"), b"ABCDEFGHI"),
]


def test_filters_are_read_as_go_does(node: Any) -> None:
    for number, (ext_filter, passed) in enumerate(FILTERS):
        consumer = Consumer(node, f"SUB ext ch{number} 0", ext_filter=ext_filter, **EXT)
        publish(node, *((header, b"%c" % letter) for letter, header in enumerate(HEADERS, ord("A"))))
        assert b"".join(take(consumer) for _ in passed) == passed, ext_filter
        assert consumer.is_quiet(0.05), ext_filter
        # What was kept out is done for the whole channel.
        until(lambda number=number: depth(node, f"ch{number}") == 0)  # type: ignore[misc]
        consumer.close()


def depth(node: Any, channel: str) -> int:
    path = "/stats?format=json&topic=ext"
    [topic] = ask(node.http_address, "GET", path, Accept="application/vnd.nsq; version=1.0").json["topics"]
    [found] = [each for each in topic["channels"] if each["channel_name"] == channel]
    return int(found["depth"])


def test_no_regular_expression_keeps_a_server_busy(node: Any) -> None:
    consumer = consume(node, ext_filter={"type": 2, "filter_ext_key": "k", "filter_data": "(a+)+$"})
    with promptly():
        publish(node, ({"k": "a" * 60 + "!"}, b"1"), ({"k": "a" * 60}, b"2"))
        assert take(consumer) == b"2"


def test_a_tag_means_nothing_where_there_are_no_headers(node: Any) -> None:
    client = WireClient(node.tcp_address)
    assert client.command(identify(desired_tag="red", heartbeat_interval=5000)) == b"OK"
    assert client.command(b"SUB t c 0\n") == b"OK"
    client.send(b"RDY 1\n")
    publisher = WireClient(node.tcp_address)
    assert publisher.command(b"PUB t 0\n" + sized(b"x")) == b"OK"
    assert client.frame().body == b"x"


def test_text_is_not_wrapped_for_clients_of_old(node: Any) -> None:
    for path, body in (("/pub", b"x"), ("/mpub", b"x\ny")):
        answer = ask(node.http_address, "POST", f"{path}?topic=t&partition=0", body)
        assert (answer.status, answer.body) == (200, b"OK")
        assert "x-nsq-content-type" not in answer.headers
        refused = ask(node.http_address, "POST", f"{path}?topic=none&partition=0", body)
        assert (refused.status, refused.json["status_txt"], refused.json["data"]) == (500, "E_TOPIC_NOT_EXIST", None)


def test_headers_that_are_no_json_are_taken_as_the_server_takes_them(node: Any) -> None:
    client, consumer = WireClient(node.tcp_address), consume(node)
    for header in (b'{"k":01}', b'{"k":"\n\xff\\q\\u0041\\ud800"}', b'{"a":[],"a":NaN}'):
        assert client.command(b"PUB_EXT ext 0\n" + sized(headed(header, b"x"))) == b"OK"
        assert consumer.receive().data.endswith(header + b"x")


def test_messages_of_an_mpub_may_end_before_its_size_says(node: Any) -> None:
    client = WireClient(node.tcp_address)
    client.send(b"MPUB t 0\n\0\0\0\x63\0\0\0\1" + sized(b"m") + b"PUB t 0\n" + sized(b"n"))
    assert [client.frame().data, client.frame().data] == [b"OK", b"OK"]


def test_a_line_goes_on_until_its_id_is_there(node: Any) -> None:
    client = WireClient(node.tcp_address)
    assert client.command(b"SUB t c 0\n") == b"OK"
    client.send(b"FIN 1234567890\nNOP\nN\n")
    assert client.frame().data.startswith(b"E_FIN_FAILED FIN [49 50 51 52 53 54 55 56 57 48 10 78 79 80 10 78] failed")


def test_figures_for_people(node: Any) -> None:
    assert ask(node.http_address, "POST", "/pub?topic=t&partition=0", b"x").status == 200
    text = ask(node.http_address, "GET", "/stats").body.decode()
    assert "Health: OK" in text
    assert "[t              ] depth: 31" in text
    assert "[c                        ] depth: 1" in text
    assert "NO_TOPICS" in ask(node.http_address, "GET", "/stats?topic=none").body.decode()


# Sequences in which the embedded cluster answered otherwise than the real one: it answers as that one did.
#
# ``redesigned_differences.jsonl`` holds for each of them the steps, and what the real cluster answered. More of them
# are found by tests/servers/test_judge.py, which has random sequences performed on both.


CORPUS = [json.loads(line) for line in (DATA / "redesigned_differences.jsonl").open()]


@pytest.fixture(scope="module")
def judged() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(2, 2, readiness=0.0) as judged:
        yield judged


@pytest.fixture(scope="module")
def stages(judged: RedesignedCluster) -> dict[str, Stage]:
    """One for each slot that sequences were recorded on."""
    first, second = (lookupd.http_address for lookupd in judged.lookupds)
    one, other = (Place(node.tcp_address, node.http_address) for node in judged.nsqds)
    return {slot: open_stage(slot, (first, second), (one, other)) for slot in {each["slot"] for each in CORPUS}}


@pytest.mark.parametrize("recorded", CORPUS, ids=lambda recorded: f"{recorded['kind']} {recorded['seed']}")
def test_answers_are_those_of_the_real_cluster(stages: dict[str, Stage], recorded: dict[str, Any]) -> None:
    real = Transcript(recorded["answers"], recorded["pace"])
    stage, run = stages[recorded["slot"]], recorded["run"]
    ours = perform(recorded["steps"], stage, run, pace=real.pace, quiet=0.005, patience=WAIT)
    assert differences(stage, ours, real) == []


# Conversations recorded from a real redesigned cluster, had again with the embedded one: ids and offsets included.


ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}

LOOKUPS = [recorded for line in (DATA / "redesigned.jsonl").open() if "http" in (recorded := json.loads(line))]

HELLO = [Draft(b"hello")] * 2

# What the partitions held when a channel of the record was made: so many records, with so many bytes in their bodies.
EARLIER = {("t1", 0): (8, 32), ("t1", 1): (2, 4), ("ord1", 0): (6, 24), ("ext1", 0): (7, 144)}

LATER = {
    ("t1", 0): [*HELLO, Draft(b"traced", 77), Draft(b"t1", 78)],
    ("t1", 1): [Draft(b"q1"), Draft(b"q2")],
    ("ord1", 0): [Draft(b"r1"), Draft(b"r2"), Draft(b"m0", 1000), Draft(b"m1", 1001)],
    ("ext1", 0): [
        Draft(b"EB", 77, b'{"##trace_id":"77","k":"v"}'),
        Draft(b"plain on ext"),
        Draft(b"EB", 77, b'{"##trace_id":"77","k":"v"}'),
        Draft(b"EC", 0, b'{"k":"v"}'),
        Draft(b"x1", 0, b'{"k":"v"}'),
    ],
}

CHANNELS = {"tape1": ("t1", 0), "tape2": ("t1", 1), "tape3": ("ord1", 0), "tape6": ("ext1", 0)}

# Conversations that were had when only some of the later records were there.
BEFORE = {"pub_trace": 2, "pub_ext_with_trace": 2, "pub_ext_plain": 3}

PLACES = {"ord1": ("ord1", 0), "ext1": ("ext1", 0), "SUB_ADVANCED": ("t1", 1)}


@pytest.fixture
def recorded_cluster() -> Iterator[RedesignedCluster]:
    """A cluster with the topics of the recorded one."""
    with RedesignedCluster(lookupds=1) as recorded_cluster:
        recorded_cluster.create_topic("t1", 3, 1)
        recorded_cluster.create_topic("ord1", 3, 2, ordered=True)
        recorded_cluster.create_topic("ext1", 1, 1, ext=True)
        yield recorded_cluster


def fill(recorded_cluster: RedesignedCluster, later: int | None) -> None:
    """Publish what the recorded cluster held; the channels begin where they did."""
    for place, (count, size) in EARLIER.items():
        partition = recorded_cluster.partition(*place)
        partition.log.append(
            [Draft(bytes(size // count))] * (count - 1) + [Draft(bytes(size - size // count * (count - 1)))]
        )
        for channel in (name for name, at in CHANNELS.items() if at == place):
            partition.channel(channel)
        partition.log.append(LATER[place][:later])


def server_of(recorded_cluster: RedesignedCluster, conversation: dict[str, Any]) -> Any:
    """The node that the conversation was had with."""
    commands = b"".join(bytes.fromhex(*data) for step, *data in conversation["steps"] if step == "send")
    place = next((place for word, place in PLACES.items() if word.encode() in commands), ("t1", 0))
    leader = recorded_cluster.leader_of(*place)
    if conversation["name"] != "sub_ordered_wrong_node":
        return leader.tcp_address
    replicas = recorded_cluster.partition(*place).replicas
    return next(recorded_cluster.node(node) for node in replicas if node != leader.id).tcp_address


@pytest.mark.parametrize(
    "conversation", conversations("redesigned.jsonl"), ids=lambda conversation: conversation["name"]
)
def test_conversation(recorded_cluster: RedesignedCluster, conversation: dict[str, Any]) -> None:
    fill(recorded_cluster, BEFORE.get(conversation["name"]))
    replay = Replay(server_of(recorded_cluster, conversation), same_ids=True)
    replay.play(conversation)
    replay.sock.close()


@pytest.mark.parametrize("recorded", LOOKUPS, ids=lambda recorded: recorded["name"])
def test_lookup(recorded_cluster: RedesignedCluster, recorded: dict[str, Any]) -> None:
    topic = recorded["name"].removeprefix("lookup_")
    for name in recorded["http"]["channels"]:
        recorded_cluster.partition(topic, 0).channel(name)
    path = f"/lookup?topic={topic}&access=r&metainfo=true"
    answer = ask(recorded_cluster.lookupds[0].http_address, "GET", path, **ACCEPT).json
    assert shape(answer) == shape(recorded["http"])
    for key in ("channels", "meta"):
        assert answer[key] == recorded["http"][key]
    assert {node["version"] for node in answer["producers"]} == {recorded["http"]["producers"][0]["version"]}


# Where a node of the embedded cluster differs from a real one on purpose: docs/broker.md. Each test runs on both.
#
# What takes a cluster is in tests/servers/test_redesigned_on_purpose.py.


def is_ours(node: Any) -> bool:
    return isinstance(node, NodeServer)


def test_an_empty_brace_at_the_end_kills_no_server_here(node: Any) -> None:
    consumer = consume(node, ext_filter=of(3, "a{"))
    if is_ours(node):
        publish(node, ({"k": "a"}, b"a"))
        assert take(consumer) == b"a"
    else:
        client = WireClient(node.tcp_address)  # whether its OK comes is a matter of luck
        client.send(b"PUB_EXT ext 0\n" + sized(headed({"k": "a"}, b"a")))
        assert consumer.reader.read() == b""  # nsqd panics, and the process ends
        client.close()
        until(lambda: not accepts(node.tcp_address))


def test_delayed_messages_are_not_on_disk_here(node: Any) -> None:
    consumer = Consumer(node, "SUB t c 0")
    client = WireClient(node.tcp_address)
    assert client.command(b"PUB t 0\n" + sized(b"1")) == b"OK"
    consumer.requeue(consumer.receive(), 3_600_000)
    assert consumer.command(b"CLS\n") == b"CLOSE_WAIT"
    answer = ask(node.http_address, "GET", "/delayqueue/backupto?topic=t&partition=0")
    if is_ours(node):
        assert answer.status == 404
    else:
        assert answer.status == 200
        assert len(answer.body) > 4096  # a database


def test_what_runs_itself_on_real_servers_is_missing_here(node: Any) -> None:
    assert (ask(node.http_address, "GET", "/serverstats").status == 404) is is_ours(node)


ROUTES = [
    ("GET", "/metric", 404),
    ("GET", "/debug/pprof/cmdline", 404),
    ("POST", "/loglevel/set?loglevel=2", 404),
    ("GET", "/config/log_level", 400),
]


def test_routes_of_a_nodes_runtime_are_missing_here(node: Any) -> None:
    for method, path, status in ROUTES:
        assert ask(node.http_address, method, path).status == (status if is_ours(node) else 200), path


def test_why_a_header_is_no_json_is_said_in_other_words_here(node: Any) -> None:
    client = WireClient(node.tcp_address)
    reply = client.command(b"PUB_EXT ext 0\n" + sized(headed(b"{", b"x")))
    client.close()
    assert reply.startswith(b"E_INVALID_JSON_HEADER fail to parse json header:cannot parse JSON: ")
    assert reply.endswith(b'unparsed tail: ""') is not is_ours(node)
