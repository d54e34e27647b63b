"""The pieces of the benchmarking harness that need no server: figures, verdicts, limits, pacing, charts, goals."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import WAIT

from nsq_fast.bench.clients import PROGRAMS, Client, names
from nsq_fast.bench.counting import INSTRUCTIONS, SYSCALLS, Counter, per_message, read_cachegrind, read_calls
from nsq_fast.bench.figures import Figure, figure, limit_of, value_of, verdict_on
from nsq_fast.bench.report import header, rows
from nsq_fast.bench.results import About, ClientResult, Round, Run, Scenario, Settings
from nsq_fast.bench.runner import MOST_ROUNDS, Task, run_scenarios
from nsq_fast.bench.scale import Curve, Point, explained, knee_of
from nsq_fast.bench.scale import limit_of as scale_limit_of
from nsq_fast.bench.scale import rows as scale_rows
from nsq_fast.bench.servers import Server
from nsq_fast.bench.suite import in_turns, is_settled, judge, middle, plans
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address


def meter() -> ModuleType:
    """What the client programs share; they find it beside them, not in a package."""
    spec = importlib.util.spec_from_file_location("bench_meter", PROGRAMS / "meter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


METER = meter()


def a_round(messages: int = 1000, seconds: float = 1.0, cpu: float = 0.5, server: float | None = None) -> Round:
    return Round(messages=messages, seconds=seconds, cpu_seconds=cpu, peak_kib=2048, server_cpu_seconds=server)


def test_a_figure_is_a_median_with_its_spread() -> None:
    assert figure([3, 1, 2]) == Figure(2, 1, 3)
    assert figure([3, 1, 2]).spread == 1.0
    assert figure([4.0]).over(figure([2.0])) == 2.0
    with pytest.raises(ValueError, match="at least one"):
        figure([])


def test_metrics_of_rounds() -> None:
    result = ClientResult(
        client="x", rounds=[a_round(2000, 2.0, 1.0), a_round(2000, 1.0, 0.5), a_round(2000, 4.0, 2.0)]
    )
    assert value_of(result, "rate") == Figure(1000, 500, 2000)
    assert value_of(result, "megabytes", 500) == Figure(0.5, 0.25, 1.0)
    assert value_of(result, "cpu") == Figure(500, 250, 1000)
    assert value_of(result, "peak") == Figure(2, 2, 2)
    assert value_of(result, "server_cpu") is None
    assert value_of(result, "p99") is None


@pytest.mark.parametrize(
    ("before", "after", "more_is_better", "verdict"),
    [
        ((100, 95, 105), (104, 99, 109), True, "same"),
        ((100, 95, 105), (150, 140, 160), True, "better"),
        ((100, 95, 105), (150, 140, 160), False, "worse"),
        ((100, 50, 160), (150, 140, 160), True, "same"),
        ((100, 100, 100), (101, 101, 101), True, "same"),
        ((100, 100, 100), (90, 90, 90), True, "worse"),
    ],
)
def test_a_change_counts_when_it_is_more_than_the_spread(
    before: tuple[float, float, float], after: tuple[float, float, float], more_is_better: bool, verdict: str
) -> None:
    assert verdict_on(Figure(*before), Figure(*after), more_is_better) == verdict


@pytest.mark.parametrize(
    ("client", "server", "limit"),
    [
        (0.95, 0.2, "client"),
        (0.95, 0.95, "machine"),
        (0.3, 0.95, "server"),
        (0.3, 0.4, "waiting"),
        (0.3, None, "unknown"),
        (0.95, None, "client"),
    ],
)
def test_it_is_said_what_the_limit_was(client: float, server: float | None, limit: str) -> None:
    assert limit_of(ClientResult(client="x", rounds=[a_round(cpu=client, server=server)]), cores=2) == limit


def test_settings_are_checked() -> None:
    for wrong in (
        {"kind": "no"},
        {"kind": "publish"},
        {"kind": "consume", "size": 0},
        {"kind": "consume", "mode": "batch"},
    ):
        with pytest.raises(ConfigError):
            Settings(**wrong)  # type: ignore[arg-type]


@given(st.integers(1, 10**7), st.sampled_from(["single", "concurrent", "batch"]), st.integers(1, 300))
def test_counts_are_shared_out_evenly(count: int, mode: str, share: int) -> None:
    settings = Settings(kind="publish", mode=mode, concurrency=share, batch=share)
    found = settings.rounded(count)
    step = 1 if mode == "single" else share
    assert found % step == 0
    assert settings.warmup(found) % step == 0
    assert settings.warmup(found) > 0


def test_clients_take_part_in_what_they_can_do() -> None:
    plain = Client(name="plain", command=("x",))
    able = Client(name="able", command=("x",), can=frozenset({"negotiate", "spread", "sleep"}))
    for settings in (
        Settings(kind="consume", tls=True),
        Settings(kind="consume", compression="snappy"),
        Settings(kind="consume", connections=10),
        Settings(kind="consume", handler_sleep=0.005),
    ):
        assert not plain.takes_part(settings)
        assert able.takes_part(settings)
    awake = Client(name="awake", command=("x",), can=frozenset({"spread"}))
    assert awake.takes_part(Settings(kind="consume", connections=10))
    assert not awake.takes_part(Settings(kind="consume", handler_sleep=0.005))
    assert plain.takes_part(Settings(kind="consume"))
    assert not able.takes_part(Settings(kind="ordered"))


def test_an_open_loop_has_its_times_fixed_in_advance() -> None:
    pairs = list(METER.ticks(10_000, 1234))
    assert sum(many for _, many in pairs) == 1234
    gaps = {later[0] - earlier[0] for earlier, later in itertools.pairwise(pairs)}
    assert all(abs(gap - 1_000_000) < 1000 for gap in gaps)
    slow = list(METER.ticks(100, 5))
    assert [many for _, many in slow] == [1] * 5


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="this system has no real-time scheduling")
def test_a_run_says_that_the_system_stops_its_real_time_processes() -> None:
    program = (
        "import os; from nsq_fast.bench.results import scheduling; print(scheduling())\n"
        "try: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))\n"
        "except PermissionError: print('not permitted')\n"
        "else: print(scheduling())"
    )
    ordinary, real_time = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert ordinary == "ordinary"
    if real_time == "not permitted":
        pytest.skip("real-time scheduling is not permitted here")
    limit = Path("/proc/sys/kernel/sched_rt_runtime_us")
    is_limited = limit.exists() and limit.read_text().strip() != "-1"
    assert real_time.startswith("real time")
    assert ("sched_rt_runtime_us" in real_time) == is_limited


def test_the_reports_of_perf_and_strace_are_read() -> None:
    assert read_calls("# started\n\n29;;raw_syscalls:sys_enter;123;100.00;;\n") == 29
    assert read_calls("<not counted>;;raw_syscalls:sys_enter;0;100.00;;\n") is None
    strace = "% time seconds usecs/call calls errors syscall\n100.00 0.000123 4 29 1 total\n"
    assert read_calls(strace) == 29
    assert read_calls("nothing") is None


def test_the_report_of_valgrind_is_read() -> None:
    text = "desc: Cachegrind\ncmd: python x\nevents: Ir\nfl=x.c\nfn=main\n7 123\nsummary:  505604956\n"
    assert read_cachegrind(text) == 505_604_956
    assert read_cachegrind("desc: killed on its way\n") is None


def in_shell(script: str) -> Counter:
    """Counts what a shell's script writes; the client's command follows."""
    return Counter(what="x", wrapper=lambda path: ["sh", "-c", script, str(path)], read=int, share=1.0)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo $((1000 + 3 * $1)) >$0", 3.0),  # a start costs 1,000
        ("echo 1000 >$0", None),  # no more for more messages
        ("true", None),  # nothing was written
    ],
)
def test_what_a_message_costs_is_the_difference_of_two_runs(script: str, found: float | None) -> None:
    def run(count: int, wrapper: list[str]) -> int:
        subprocess.run([*wrapper, str(count)], check=True)
        return count

    assert per_message(in_shell(script), run, 100, 300) == found
    assert per_message(in_shell(script), run, 100, 100) is None


def test_a_share_tells_what_instructions_say() -> None:
    def counted(client: str, number: float) -> ClientResult:
        return ClientResult(client=client, rounds=[a_round(1_000_000, 1.0, 0.4)], counted={INSTRUCTIONS: number})

    found = scenario("consume", counted("nsq_fast", 2400), counted("floor: core", 2000), of_cpu("floor: batches", 0.4))
    assert ("at most 1.25x floor: core", "1.00x; by instructions 1.20x", "met") in judged(found)
    first, second, third = rows(found, 2)
    column = header(found).index("instructions/message")
    assert [each[column : column + 2] for each in (first, second, third)] == [
        ["2,400", "1.20x"],
        ["2,000", "1.00x"],
        ["-", "-"],
    ]
    assert f"{SYSCALLS}/message" not in header(found)


def test_a_client_that_failed_says_why_and_one_round_has_no_spread() -> None:
    failed = ClientResult(client="b", failure="it ended with status 1: Traceback\n  File x\nImportError: no\tmodule")
    found = scenario("consume", ClientResult(client="a", rounds=[a_round(1000, 1.0, 0.4)]), failed)
    first, second = rows(found, 2)
    assert first[header(found).index("spread")] == "-"
    assert second[1] == "failed: ImportError: no\\tmodule"


def scenario(name: str, *clients: ClientResult) -> Scenario:
    return Scenario(name=name, settings=Settings(kind="consume"), server="x", clients=list(clients))


def judged(*scenarios: Scenario) -> list[tuple[str, str, str]]:
    here = About(date="", nsq_fast="", git_commit="", python="", gevent="", system="", cpu="", cores=2, memory_mib=1)
    return [(each.target, each.actual, each.verdict) for each in judge(Run(about=here, scenarios=list(scenarios)))]


def of_rate(client: str, rate: int, cpu: float) -> ClientResult:
    return ClientResult(client=client, rounds=[a_round(rate, 1.0, cpu)])


def test_goals_are_judged_by_the_figures_of_the_run() -> None:
    consume = [
        of_rate("nsq_fast", 1_000_000, 0.4),
        of_rate("go-nsq", 200_000, 0.8),
        of_rate("gnsq", 100_000, 1.0),
        of_rate("nsq_fast aio", 90_000, 0.9),
        of_rate("nsq_fast threads", 99_000, 0.9),
        of_rate("ansq", 20_000, 1.2),
    ]
    found = judged(
        scenario("consume", *consume),
        scenario("sleep", of_rate("nsq_fast", 15_000, 0.2), of_rate("nsq_fast aio", 12_000, 0.5)),
    )
    for goal in (
        ("at most 1.25x floor: core", "the run has no floor: core in consume", "not measured"),
        ("at most 0.125x go-nsq", "0.10x", "met"),
        ("at most 0.025x gnsq", "0.040x", "missed"),
        ("at least 3x go-nsq", "5.00x", "met"),
        ("at least 14x gnsq", "10.00x", "missed"),
        ("at least 7x asyncnsq", "the run has no asyncnsq in consume", "not measured"),
        ("at least 4x ansq", "4.50x", "met"),
        ("at most 0.2x ansq", "0.17x", "met"),
        ("at least 100,000/s", "99,000/s", "missed"),
        ("at least 0.9x nsq_fast", "0.80x", "missed"),
    ):
        assert goal in found


@pytest.mark.parametrize("mode", ["stream", "read", "cold", "write"])
def test_spark_is_judged_beside_rows_that_were_ready(mode: str) -> None:
    clients = [of_rate("nsq_fast Spark", 500_000, 0.9), of_rate("floor: ready rows", 1_000_000, 1.2)]
    found = judged(scenario(f"spark-{mode}", *clients))
    assert ("at least 0.6x floor: ready rows", "0.50x", "missed") in found
    assert (("at most 1.67x floor: ready rows", "1.50x", "met") in found) == (mode != "write")


@pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")
def test_an_alarm_rings_when_it_is_due_and_once() -> None:
    alarm = METER.Alarm()
    due = time.time_ns() + 3_000_000
    alarm.set(due)
    assert select.select([alarm.descriptor], [], [], WAIT)[0]
    assert time.time_ns() >= due
    alarm.clear()
    assert not select.select([alarm.descriptor], [], [], 0)[0]
    os.close(alarm.descriptor)


def test_the_suite_measures_every_goal() -> None:
    latency = [(99, 100.0), (99.9, 200.0)]
    measured = msgspec.structs.replace(a_round(), latency_us=latency, package_ms=3.0, import_ms=20.0, first_ms=9.0)
    found = [
        scenario(plan.name, *[ClientResult(client=name, rounds=[measured]) for name in plan.clients or names()])
        for plan in plans(1.0, 1)
    ]
    assert "not measured" not in [verdict for _, _, verdict in judged(*found)]


def of_cpu(client: str, *cpu: float) -> ClientResult:
    return ClientResult(client=client, rounds=[a_round(1_000_000, 1.0, each) for each in cpu])


@pytest.mark.parametrize(("ours", "shown", "verdict"), [(0.45, "1.12x", "met"), (0.52, "1.30x", "missed")])
def test_a_share_is_the_ratio_of_rounds_that_took_turns(ours: float, shown: str, verdict: str) -> None:
    """A machine that is three times as slow in one round is so for both."""
    slow = (1, 3, 1, 2, 1)
    floor = of_cpu("floor: core", *(0.4 * by for by in slow))
    found = judged(scenario("consume", of_cpu("nsq_fast", *(ours * by for by in slow)), floor))
    assert ("at most 1.25x floor: core", shown, verdict) in found


def test_a_share_that_its_rounds_do_not_settle_says_so() -> None:
    floor = of_cpu("floor: core", 0.4, 0.4, 0.4)
    found = judged(scenario("consume", of_cpu("nsq_fast", 0.4, 0.6, 0.44), floor))
    assert ("at most 1.25x floor: core", "1.10x (1.00 to 1.50: not settled by 3 rounds)", "met") in found


def test_growth_is_held_against_that_of_the_floor() -> None:
    few = scenario("in-flight-10", of_cpu("nsq_fast", 4.0, 4.4), of_cpu("floor: core", 2.0, 2.2))
    many = scenario("in-flight-10000", of_cpu("nsq_fast", 1.0, 1.1), of_cpu("floor: core", 0.4, 0.44))
    assert ("at most 1.2x the same of floor: core", "0.80x", "met") in judged(few, many)


def test_the_middle_leaves_out_more_the_more_values_there_are() -> None:
    """With 90 % confidence: of 5 values none, of 8 the outermost, of 11 two at each end."""
    for many, low, high in ((2, 1, 2), (5, 1, 5), (7, 1, 7), (8, 2, 7), (11, 3, 9)):
        found = middle([float(number) for number in range(1, many + 1)])
        assert (found.low, found.high) == (low, high)


def test_a_ratio_is_settled_when_it_is_known_to_a_tenth() -> None:
    assert is_settled([1.0, 1.05, 1.02])
    assert not is_settled([1.0, 1.2, 1.02])
    assert not is_settled([1.0])
    assert is_settled([])  # nobody will measure it
    assert is_settled([9.0, 1.0, 1.01, 1.02, 1.02, 1.03, 1.04, 0.1])


def test_figures_are_shown_as_shares_of_the_floor() -> None:
    clients = [of_cpu("nsq_fast", 0.6), of_cpu("floor: batches", 0.2), of_cpu("floor: core", 0.4)]
    found = scenario("consume", *clients)
    place = header(found).index("client CPU, of the floor")
    assert [row[place] for row in rows(found, 2)] == ["1.50x", "0.50x", "1.00x"]
    assert "client CPU, of the floor" not in header(scenario("consume", of_cpu("nsq_fast", 0.6)))


def test_scenarios_that_are_held_against_each_other_take_turns() -> None:
    together = [[plan.name for plan in group] for group in in_turns(plans(1.0, 3))]
    assert ["connections-1", "connections-10", "connections-100"] in together
    assert ["consume"] in together
    assert [name for group in together for name in group] == [plan.name for plan in plans(1.0, 3)]


@contextmanager
def nowhere(settings: Settings) -> Iterator[Server]:
    yield Server("nowhere", (Address("127.0.0.1", 1),))


def reporting(name: str, messages: int, status: int = 0) -> Client:
    """A client that reports at once that it has published."""
    result = {"event": "result", "messages": messages, "seconds": 1.0, "cpu_seconds": 0.5, "peak_kib": 2048}
    code = f"import sys; print('warming up'); {status or f'print({json.dumps(result)!r})'}; sys.exit({status})"
    return Client(name=name, command=(sys.executable, "-c", code))


def test_scenarios_take_turns_round_by_round_and_one_that_fails_is_left_out() -> None:
    def task(name: str, *clients: Client, rounds: int = 2) -> Task:
        return Task(name, Settings(kind="publish", mode="single", count=1000, rounds=rounds), clients, nowhere)

    seen: list[str] = []
    few, many = run_scenarios(
        [task("few", reporting("a", 1), reporting("broken", 0, status=3)), task("many", reporting("a", 5), rounds=3)],
        seen.append,
    )
    assert seen == [
        "few: round 1 of 2, a", "few: round 1 of 2, broken", "many: round 1 of 3, a",
        "few: round 2 of 2, a", "many: round 2 of 3, a",
        "many: round 3 of 3, a",
    ]  # fmt: skip
    assert [each.messages for each in few.clients[0].rounds] == [1, 1]
    assert [each.messages for each in many.clients[0].rounds] == [5, 5, 5]
    assert few.clients[1].rounds == []
    assert "status 3" in few.clients[1].failure


def unsteady(name: str, cpu: list[float], noted: Path) -> Client:
    """A client that takes the CPU of the next of the numbers in each of its rounds, the last one for ever."""
    code = f"""
import json, pathlib
noted = pathlib.Path({str(noted)!r})
number = int(noted.read_text()) if noted.exists() else 0
noted.write_text(str(number + 1))
cpu = {cpu!r}[number:][:1] or {cpu[-1:]!r}
print(json.dumps(dict(event="result", messages=1000, seconds=1.0, cpu_seconds=cpu[0], peak_kib=1)))
"""
    return Client(name=name, command=(sys.executable, "-c", code))


@pytest.mark.parametrize(
    ("ours", "patience", "taken"),
    [
        # 8 rounds: the outermost ratios are left out, 1.0 and 2.25; the others are all 1.25.
        ([0.4, 0.9, 0.5], 600, 8),
        ([0.4, 4.0, 0.5, 3.0] * MOST_ROUNDS, 600, MOST_ROUNDS),  # it never settles
        ([0.4, 4.0], 0, 2),  # without patience there are the rounds that were asked for
    ],
    ids=["settles", "never settles", "no patience"],
)
def test_those_that_are_compared_take_turns_until_their_ratio_is_settled(
    tmp_path: Path, ours: list[float], patience: float, taken: int
) -> None:
    clients = [
        unsteady("nsq_fast", ours, tmp_path / "ours"),
        unsteady("floor: core", [0.4], tmp_path / "floor"),
        unsteady("somebody else", [0.4], tmp_path / "else"),
    ]
    settings = Settings(kind="publish", mode="single", count=1000, rounds=2)
    (found,) = run_scenarios([Task("consume-tls", settings, clients, nowhere)], patience=patience)
    rounds = {each.client: len(each.rounds) for each in found.clients}
    assert rounds == {"nsq_fast": taken, "floor: core": taken, "somebody else": 2}


def test_a_share_of_the_peak_is_that_of_the_slowest() -> None:
    """The fast one handles 40,000 a second, the slow one 10,000."""
    settings = Settings(kind="publish", mode="single", rate_share=0.5, rounds=1, duration=0.1)
    (found,) = run_scenarios([Task("x", settings, [reporting("a", 40_000), reporting("b", 10_000)], nowhere)])
    assert found.settings.rate == 5000.0
    assert [len(each.rounds) for each in found.clients] == [1, 1]


# Many processes


def curve(*rates: float, client: float = 0.5, server: float = 1.0, together: float = 1.0, nsqds: int = 2) -> Curve:
    """A curve with a point for 1, 2, 4 ... processes; CPU is in cores."""
    points = [
        Point(
            processes=2**number,
            messages=int(rate),
            seconds=1.0,
            cpu_seconds=client,
            server_cpu_seconds=server,
            p99_us=100.0,
            together=together,
        )
        for number, rate in enumerate(rates)
    ]
    return Curve(kind="consume", nsqds=nsqds, connections=2, size=200, server="nsqd", points=points)


@pytest.mark.parametrize(
    ("rates", "processes"), [((100, 200, 400), 4), ((100, 190, 200), 2), ((100, 90, 80), 1), ((100,), 1)]
)
def test_the_knee_is_where_more_processes_bring_less_than_a_tenth(rates: tuple[float, ...], processes: int) -> None:
    found = curve(*rates)
    assert knee_of(found).processes == processes
    assert f"{processes} (knee)" in [row[0] for row in scale_rows(found)]


def test_the_limit_is_a_core_of_each_nsqd() -> None:
    """1 s of the servers' CPU for 500,000 messages: 2 µs for each."""
    assert scale_limit_of(curve(250_000, 500_000)) == pytest.approx(1_000_000)


@pytest.mark.parametrize(
    ("client", "server", "reason"),
    [
        (2.0, 1.9, "the machine is the limit"),
        (1.9, 1.0, "each process has a core of its own to the full"),
        (0.5, 1.0, "they wait for each other"),
    ],
)
def test_the_knee_is_explained_by_who_used_what(client: float, server: float, reason: str) -> None:
    said = " ".join(explained(curve(250_000, 500_000, client=client, server=server), cores=4))
    assert "2 processes handle 500,000 messages/s, and no more were measured." in said
    assert reason in said
    assert "understated" not in said


def test_processes_that_did_not_run_together_are_said() -> None:
    said = " ".join(explained(curve(100, 190, 200, together=0.4), cores=4))
    assert "The 4 processes were all at work for 40% of the time only" in said
    assert "2 processes handle 190 messages/s, and up to 4, more bring less than a tenth." in said
