"""The file of a run: what was measured, on what, with what, every round of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from nsq_fast.errors import ConfigError

from .settings import Settings

FORMAT = 1


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One client once.

    Attributes:
        latency_us: pairs of percentage and microseconds.
        server_cpu_seconds: None where the server is not of this machine's harness.
        package_ms: CPU time that the import of the package alone took; import_ms: with what the client uses of it.
        first_ms: time from its start to the first message. All three are None where that was not measured.
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


class CoreResult(msgspec.Struct, kw_only=True):
    """One workload of the compiled core: nanoseconds a message, of each round."""

    group: str
    name: str
    ns_per_message: list[float]


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
    """Everything a run gave."""

    about: About
    scenarios: list[Scenario] = []
    core: list[CoreResult] = []
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
