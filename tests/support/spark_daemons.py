"""Daemons of Spark as child processes: a standalone master with its workers, and a Spark Connect server.

They listen on loopback, on ports that they choose themselves and tell in their logs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

from . import processes
from .spark_marks import poll
from .spark_settings import LOOPBACK, home, java_options, spark_environment, spark_settings

START_TIMEOUT = 120.0
_DEPLOY = "org.apache.spark.deploy"


class Daemon:
    """One JVM, ready when its log matches ``ready``; whose first group is kept in ``said``."""

    def __init__(self, command: list[str], ready: str, folder: Path, name: str, memory: str = "256m") -> None:
        self._command = [str(home() / "bin" / "spark-class"), *command]
        self._ready = re.compile(ready)
        self._folder = folder
        self._name = name
        self._memory = memory
        self._process: subprocess.Popen[str] | None = None
        self.lines: list[str] = []
        self.said = ""

    def start(self) -> None:
        """Start it and return when it is ready."""
        self.lines.clear()
        self.said = ""
        environment = {**spark_environment(), "SPARK_NO_DAEMONIZE": "1", "SPARK_DAEMON_MEMORY": self._memory}
        environment["SPARK_DAEMON_JAVA_OPTS"] = java_options("info")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self._folder,
            start_new_session=True,
        )
        threading.Thread(target=self._follow, args=(self._process,), daemon=True).start()
        try:
            poll(self._is_ready, START_TIMEOUT, f"{self._name} ready")
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL it and all that it started."""
        if self._process is not None:
            processes.kill_session(self._process.pid)
            self._process.wait()
            self._process = None

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self._name} ended\n" + "\n".join(self.lines[-40:])
        return bool(self.said)

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self.lines.append(line.rstrip())
                if found := self._ready.search(line):
                    self.said = found[1]


class _Daemons:
    def __init__(self) -> None:
        self._daemons: list[Daemon] = []

    def _run(self, daemon: Daemon) -> Daemon:
        self._daemons.append(daemon)
        daemon.start()
        return daemon

    def stop(self) -> None:
        """Kill all."""
        for daemon in reversed(self._daemons):
            daemon.kill()


class StandaloneCluster(_Daemons):
    """A master and its workers, one core each, each on a host of its own: Spark speculates on another host only.

    Attributes:
        url: of the master, for ``spark.master``.
    """

    def __init__(self, folder: Path, workers: int = 2) -> None:
        super().__init__()
        command = [f"{_DEPLOY}.master.Master", *_listen(LOOPBACK)]
        try:
            self.url = self._run(Daemon(command, r"Starting Spark master at (spark://\S+)", folder, "the master")).said
            for number in range(workers):
                self._run_worker(folder, number)
        except BaseException:
            self.stop()
            raise

    def _run_worker(self, folder: Path, number: int) -> None:
        size = ["--cores", "1", "--memory", "640m", "--work-dir", str(folder / f"work{number}")]
        command = [f"{_DEPLOY}.worker.Worker", *_listen(f"127.0.0.{1 + number}"), *size, self.url]
        self._run(Daemon(command, r"(Successfully registered with master)", folder, f"worker {number}"))


def _listen(host: str) -> list[str]:
    return ["--host", host, "--port", "0", "--webui-port", "0"]


class ConnectServer(_Daemons):
    """A Spark Connect server with a local Spark.

    Attributes:
        url: for ``SparkSession.builder.remote``.
    """

    def __init__(self, folder: Path, master: str = "local[2]") -> None:
        super().__init__()
        settings = {**spark_settings(master, folder), "spark.connect.grpc.binding.address": LOOPBACK}
        settings |= {"spark.connect.grpc.binding.port": "0", "spark.driver.extraJavaOptions": java_options("info")}
        settings["spark.pyspark.python"] = sys.executable
        flags = [flag for name, value in settings.items() for flag in ("--conf", f"{name}={value}")]
        server = "org.apache.spark.sql.connect.service.SparkConnectServer"
        command = [f"{_DEPLOY}.SparkSubmit", *flags, "--class", server, "spark-internal"]
        ready = r"Spark Connect server started at: .*:(\d+)"
        server_port = self._run(Daemon(command, ready, folder, "the Connect server", "1g")).said
        self.url = f"sc://{LOOPBACK}:{server_port}"
