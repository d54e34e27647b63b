"""What a scenario measures, and the file of a run: on what, with what, every round of it. Durations are in seconds,
sizes in bytes.

Then the figures of a run: medians with their spread, ratios, what limited a client; and what changed between two runs.
A change counts when the ranges of the rounds do not overlap and the medians differ by more than a threshold. Runs of
different machines, or of one machine at different hours, compare only relative to a client that was in both: then each
round's median is divided by that client's in its own run, and the spread is that of both.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import timeit
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from nsq_fast import __version__
from nsq_fast.config import Config, option
from nsq_fast.errors import ConfigError

KINDS = ("consume", "publish", "roundtrip", "ordered", "idle", "start", "spark")
MODES = ("single", "concurrent", "batch")
SPARK_MODES = ("stream", "read", "cold", "write")
COMPRESSIONS = ("", "snappy", "deflate")

WARMUP_SHARE = 0.1
RATE_WARMUP_SECONDS = 1.0
RATE_BEYOND_SECONDS = 0.5
SMALLEST_COUNT = 1000
PEAK_CONCURRENCY = 100
SERVER_BUFFER = 65536
PATIENCE = 60.0
SPARK_PATIENCE = 600.0
_MODES = {"publish": MODES, "spark": SPARK_MODES}


class Settings(Config, frozen=True, kw_only=True):
    """One scenario, the same for every client."""

    kind: str = option("consume", "what is measured", choices=KINDS)
    mode: str = option(
        "",
        "of publishing: one at a time, from `concurrency` callers, or MPUBs of `batch`; of Spark: micro-batches, a"
        " table, the first table of a session, or a write",
    )
    size: int = option(200, "bytes in a message", minimum=1)
    count: int = option(0, "messages a round; 0: as many as a client handles in --duration", minimum=0)
    duration: float = option(2.0, "how long a client works in a round", unit="s", minimum=0.0)
    rounds: int = option(3, "how many rounds", minimum=1)
    max_in_flight: int = option(2500, "messages a consumer holds", minimum=1)
    connections: int = option(1, "connections of a consumer, to several loopback addresses of the nsqd", minimum=1)
    partitions: int = option(1, "partitions of the topic", minimum=1)
    concurrency: int = option(
        1, "callers that publish at once, handlers, or messages on their way in a roundtrip", minimum=1
    )
    batch: int = option(200, "messages in an MPUB", minimum=1)
    compression: str = option("", "compress the connections", choices=COMPRESSIONS)
    tls: bool = option(False, "connections are upgraded to TLS")
    rate: float = option(
        0.0, "open loop: publish so many messages/s, however fast they are handled; 0: as fast as it goes", minimum=0.0
    )
    rate_share: float = option(
        0.0,
        "an open loop at this share of the largest rate that each of the clients manages in a closed loop of"
        " PEAK_CONCURRENCY messages, measured before the rounds",
        minimum=0.0,
    )
    # Without it the messages of a slow topic wait in nsqd's output buffer, up to a quarter of a second, and latency is
    # that of the buffer.
    unbuffered: bool = option(False, "whether nsqd sends each message at once, or gathers them in its output buffer")
    handler_sleep: float = option(0.0, "how long each handler sleeps", unit="s", minimum=0.0)
    linger: float = option(0.001, "how long the client with linger waits for more publishes", unit="s", minimum=0.0)
    settle: float = option(
        0.5, "time to settle before an open loop begins, or before an idle client is measured", unit="s", minimum=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in (modes := _MODES.get(self.kind, ("",))):
            raise ConfigError(f"mode={self.mode!r}: must be one of {', '.join(map(repr, modes))}")

    @property
    def needs_cluster(self) -> bool:
        return self.kind == "ordered" or self.partitions > 1

    @property
    def asks(self) -> frozenset[str]:
        """What clients have to be able to do, see ``Client.can``."""
        asked = {
            "negotiate": bool(self.compression or self.tls or self.unbuffered),
            "rate": bool(self.rate or self.rate_share),
            "spread": self.connections > 1,
            "sleep": bool(self.handler_sleep),
            "partitions": self.needs_cluster,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    @property
    def needs_own_servers(self) -> bool:
        """Whether its clients ask for what servers that run already may not have, or do not say."""
        return self.kind in ("start", "spark")

    @property
    def patience(self) -> float:
        """How long a client may take for a round, in seconds: a JVM has to start, and to warm up."""
        return SPARK_PATIENCE if self.kind == "spark" else PATIENCE

    def count_at(self, rate: float) -> int:
        """How many messages a client that handles ``rate`` a second gets, so that it works for ``duration``."""
        return self.rounded(rate * self.duration / (1 - WARMUP_SHARE))

    def rounded(self, count: float) -> int:
        """The nearest count that callers and batches can share evenly."""
        step = {"concurrent": self.concurrency, "batch": self.batch}.get(self.mode, 1)
        return max(1, round(max(count, SMALLEST_COUNT) / step)) * step

    def beyond(self) -> int:
        """How many messages more than are counted: the last ones of a topic wait in the output buffer of nsqd."""
        if self.rate:
            return int(self.rate * RATE_BEYOND_SECONDS) + 1
        if self.kind in ("idle", "start", "spark"):
            return 0
        if self.kind == "roundtrip":
            return self.concurrency
        return 2 * self.max_in_flight + SERVER_BUFFER // self.size

    def warmup(self, count: int) -> int:
        """How many messages of ``count`` are left out at the start; publishing sends them besides."""
        if self.rate and self.kind != "publish":
            return min(count // 2, int(self.rate * RATE_WARMUP_SECONDS))
        step = {"concurrent": self.concurrency, "batch": self.batch}.get(self.mode, 1)
        return max(1, int(count * WARMUP_SHARE) // step) * step


FORMAT = 1


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One client once.

    Attributes:
        latency_us: pairs of percentage and microseconds.
        server_cpu_seconds: None where the server is not of this machine's harness.
        package_ms: CPU time that the import of the package alone took; import_ms: with what the client uses of it.
        first_ms: time from its start to the first message. All three are None where that was not measured.
        processes, nsqds: how many worked together, see ``runner``.
        together: the share of the time in which all of them were at work.
    """

    messages: int
    seconds: float
    cpu_seconds: float
    peak_kib: int
    latency_us: list[tuple[float, float]] = []
    server_cpu_seconds: float | None = None
    package_ms: float | None = None
    import_ms: float | None = None
    first_ms: float | None = None
    processes: int = 1
    nsqds: int = 1
    together: float = 1.0


class ClientResult(msgspec.Struct, kw_only=True):
    """All rounds of one client in one scenario. ``counted``: what a message costs, by what was counted."""

    client: str
    rounds: list[Round] = []
    counted: dict[str, float] = {}
    failure: str = ""


class Scenario(msgspec.Struct, kw_only=True):
    """One scenario: the clients took turns on one server. ``loop_ms`` is how fast the machine was just before, see
    ``machine``; 0 where that was not measured."""

    name: str
    settings: Settings
    server: str
    clients: list[ClientResult]
    loop_ms: float = 0.0

    def client(self, name: str) -> ClientResult | None:
        """The result of a client that gave one."""
        return next((each for each in self.clients if each.client == name and each.rounds), None)


class About(msgspec.Struct, kw_only=True):
    """Where and with what a run was made."""

    date: str
    nsq_fast: str
    git_commit: str
    python: str
    gevent: str
    system: str
    cpu: str
    cores: int
    memory_mib: int
    scheduling: str = ""
    clients: dict[str, str] = {}


class Run(msgspec.Struct, kw_only=True):
    about: About
    scenarios: list[Scenario] = []
    format: int = FORMAT

    def scenario(self, name: str) -> Scenario | None:
        return next((each for each in self.scenarios if each.name == name), None)


def as_json(run: msgspec.Struct) -> str:
    """What the file of a run holds."""
    return msgspec.json.format(msgspec.json.encode(run), indent=1).decode() + "\n"


def load(path: Path) -> Run:
    """Read the file of a run. Raises ConfigError when it is none."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not the file of a benchmark run: {error}") from error
    if run.format != FORMAT:
        raise ConfigError(f"{path} has format {run.format}, this version reads {FORMAT}")
    return run


def about(clients: dict[str, str]) -> About:
    """Describe this machine; ``clients`` are the versions of the others."""
    return About(
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        nsq_fast=__version__,
        git_commit=git_commit(),
        python=platform.python_version(),
        gevent=version("gevent"),
        system=f"{platform.system()} {platform.release()}",
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=os.cpu_count() or 1,
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        scheduling=scheduling(),
        clients=clients,
    )


def scheduling() -> str:
    """The policy of the system's scheduler for this process and those that it starts; empty where that is unknown."""
    if not hasattr(os, "sched_getscheduler"):
        return ""
    if os.sched_getscheduler(0) not in (os.SCHED_RR, os.SCHED_FIFO):
        return "ordinary"
    # Linux stops real-time processes that took 95 % of a second on a core for the rest of it: gaps of 50 ms, which were
    # seen as a p99 of 55 to 120 ms where it is 0.8.
    try:
        is_unlimited = Path("/proc/sys/kernel/sched_rt_runtime_us").read_text().strip() == "-1"
    except OSError:  # another system
        is_unlimited = True
    interrupted = ", interrupted for up to 50 ms of a second (sysctl kernel.sched_rt_runtime_us=-1 ends that)"
    return "real time" + ("" if is_unlimited else interrupted)


def loop_ms() -> float:
    """How fast the machine is at the moment: milliseconds that Python takes for a million additions, best of three."""
    return min(timeit.repeat("for number in range(1_000_000): total += number", "total = 0", number=1, repeat=3)) * 1000


def git_commit() -> str:
    """The commit of the checkout that this package is in, ``+`` behind it when files differ; empty elsewhere."""
    here = Path(__file__).parent
    commit = _git(here, "rev-parse", "--short=12", "HEAD")
    if not commit or not _git(here, "ls-files", "--", __file__):
        return ""
    return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no", "--", str(here.parent)) else "")


def _git(where: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


# Figures

BUSY = 0.9
INSTRUCTIONS = "instructions"


class Figure(msgspec.Struct, frozen=True):
    """A median and the smallest and largest of the rounds."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """The range as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def over(self, other: Figure) -> float:
        """How many times the other's median this one is; infinite over 0."""
        return self.median / other.median if other.median else float("inf")


def figure(values: Sequence[float]) -> Figure:
    """Raises ValueError where there are no values."""
    return Figure(statistics.median(values), min(values), max(values))


class Metric(msgspec.Struct, frozen=True):
    """Something each round has a value of: ``read`` gives it, or None."""

    name: str
    title: str
    unit: str
    more_is_better: bool
    read: Callable[[Round, int], float | None]
    digits: int = 0


def _rate(each: Round, _: int) -> float | None:
    return each.messages / each.seconds if each.messages else None


def _megabytes(each: Round, size: int) -> float | None:
    return each.messages * size / each.seconds / 1e6 if each.messages else None


def _cpu(each: Round, _: int) -> float | None:
    return each.cpu_seconds / each.messages * 1e6 if each.messages else None


def _server_cpu(each: Round, _: int) -> float | None:
    if each.server_cpu_seconds is None or not each.messages:
        return None
    return each.server_cpu_seconds / each.messages * 1e6


def quantile(share: float) -> Callable[[Round, int], float | None]:
    """A reader of one quantile of the latency, in microseconds."""
    return lambda each, _: next((value for at, value in each.latency_us if at == share), None)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("rate", "messages/s", "messages/s", True, _rate),
        Metric("megabytes", "MB/s", "MB/s", True, _megabytes, 1),
        Metric("cpu", "client CPU", "µs/message", False, _cpu, 3),
        Metric("server_cpu", "server CPU", "µs/message", False, _server_cpu, 3),
        Metric("p50", "latency p50", "µs", False, quantile(50)),
        Metric("p95", "latency p95", "µs", False, quantile(95)),
        Metric("p99", "latency p99", "µs", False, quantile(99)),
        Metric("p999", "latency p99.9", "µs", False, quantile(99.9)),
        Metric("max", "latency max", "µs", False, quantile(100)),
        Metric("peak", "peak memory", "MiB", False, lambda each, _: each.peak_kib / 1024, 1),
        Metric("package", "import of the package alone, CPU", "ms", False, lambda each, _: each.package_ms, 1),
        Metric("import", "import, CPU", "ms", False, lambda each, _: each.import_ms, 1),
        Metric("first", "start to first message", "ms", False, lambda each, _: each.first_ms, 1),
        Metric(
            "busy", "client's share of a core", "%", False, lambda each, _: each.cpu_seconds / each.seconds * 100, 2
        ),
    )
}


def value_of(result: ClientResult, metric: str, size: int = 0) -> Figure | None:
    """The figure of a metric over a client's rounds, or of what was counted; None where it has none. ``size`` is that
    of a message."""
    if metric == INSTRUCTIONS:
        return figure([result.counted[metric]]) if metric in result.counted else None
    values = [value for each in result.rounds if (value := METRICS[metric].read(each, size)) is not None]
    return figure(values) if values else None


def shown(value: Figure | float | None, metric: str) -> str:
    """A figure's median as text, in the metric's digits; a dash for none."""
    if value is None:
        return "-"
    number = value.median if isinstance(value, Figure) else value
    if metric == INSTRUCTIONS:
        return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{number:,.{METRICS[metric].digits}f}"


def limit_of(result: ClientResult, cores: int) -> str:
    """What limited a client: ``client``, ``server``, ``machine``, ``waiting``, or ``unknown``.

    ``client``: it used a core or more, or each of its processes did. ``machine``: client and server together used all
    cores. ``server``: the server used a core or more while the client had time left. ``waiting``: neither, they waited
    for each other.
    """
    if not result.rounds:
        return "unknown"
    processes, nsqds = result.rounds[0].processes, result.rounds[0].nsqds
    client = statistics.median(each.cpu_seconds / each.seconds for each in result.rounds)
    servers = [each.server_cpu_seconds / each.seconds for each in result.rounds if each.server_cpu_seconds is not None]
    if not servers:
        return "client" if client >= BUSY * processes else "unknown"
    server = statistics.median(servers)
    if client + server >= BUSY * cores:
        return "machine"
    if client >= BUSY * processes:
        return "client"
    return "server" if server >= BUSY * nsqds else "waiting"


THRESHOLD = 0.05
METRICS_COMPARED = ("rate", "cpu", "p99", "peak")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One figure in both runs. ``verdict`` is ``better``, ``worse`` or ``same``."""

    scenario: str
    client: str
    metric: str
    before: Figure
    after: Figure
    verdict: str

    @property
    def ratio(self) -> float:
        return self.after.over(self.before)


def compare(before: Run, after: Run, relative_to: str = "", threshold: float = THRESHOLD) -> Iterator[Change]:
    """Every figure that both runs have."""
    later = dict(_figures(after, relative_to))
    for key, old in _figures(before, relative_to):
        if new := later.get(key):
            scenario, client, metric = key
            verdict = verdict_on(old, new, metric == "rate", threshold)
            yield Change(scenario=scenario, client=client, metric=metric, before=old, after=new, verdict=verdict)


def _figures(run: Run, relative_to: str) -> Iterator[tuple[tuple[str, str, str], Figure]]:
    """All that are compared, each by its scenario, client and name."""
    for scenario in run.scenarios:
        for result in scenario.clients:
            if not result.rounds:
                continue
            for metric in METRICS_COMPARED:
                if value := _figure_in(scenario, result, metric, relative_to):
                    yield (scenario.name, result.client, metric), value
            for what, number in result.counted.items():
                yield (scenario.name, result.client, f"{what}/message"), figure([number])


def differences(before: Run, after: Run) -> Iterator[str]:
    """What else than the clients differs between the runs, and so may be the cause of a change; in sentences."""
    for what, old, new in (
        ("machine", *(f"{about.cpu}, {about.cores} cores" for about in (before.about, after.about))),
        ("Python", before.about.python, after.about.python),
    ):
        if old != new:
            yield f"another {what}: {old} before, {new} after"
    servers: dict[tuple[str, str], list[str]] = {}
    for scenario in before.scenarios:
        later = after.scenario(scenario.name)
        if later is None:
            continue
        if later.settings != scenario.settings:
            yield f"{scenario.name} was run with other settings"
        if later.server != scenario.server:
            servers.setdefault((scenario.server, later.server), []).append(scenario.name)
    for (old, new), names in servers.items():
        yield f"another server: {old} before, {new} after, in {', '.join(names)}"


def _figure_in(scenario: Scenario, result: ClientResult, metric: str, relative_to: str) -> Figure | None:
    value = value_of(result, metric, scenario.settings.size)
    if value is None or not relative_to or metric == "peak":  # memory does not depend on how fast a machine is
        return value
    base = scenario.client(relative_to)
    unit = value_of(base, metric, scenario.settings.size) if base else None
    if unit is None or not unit.low:
        return None
    return Figure(value.median / unit.median, value.low / unit.high, value.high / unit.low)


def verdict_on(before: Figure, after: Figure, more_is_better: bool, threshold: float = THRESHOLD) -> str:
    """``same`` unless the ranges are apart and the medians differ by more than the threshold."""
    overlap = before.low <= after.high and after.low <= before.high
    if overlap or abs(after.median - before.median) <= threshold * before.median:
        return "same"
    return "better" if (after.median > before.median) == more_is_better else "worse"
