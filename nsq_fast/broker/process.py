"""A broker, or a cluster, in a process of its own: it has its own core, and can be killed; or in a thread of its own.

``BrokerProcess`` starts ``python -m nsq_fast.broker.process``. The child reads one JSON line with what to run, answers
with one line of its addresses when they all listen, then takes one command a line, a method to call, and answers each.
It stops, saving its state, on SIGTERM, SIGINT or the end of its input; so it never outlives its parent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from gevent import Greenlet, Timeout, get_hub, spawn
from gevent.event import Event
from gevent.fileobject import FileObjectPosix
from gevent.lock import Semaphore

from nsq_fast._lazy import get_original
from nsq_fast.broker.net import HeldPorts
from nsq_fast.broker.servers import NsqdServer, ServerGroup, Watched, serve
from nsq_fast.errors import NotRunning, NsqError
from nsq_fast.names import Address

START_TIMEOUT = 15.0
STOP_TIMEOUT = 10.0


class ServerAddresses(msgspec.Struct, frozen=True):
    """Where a server of a broker process listens. ``https`` is None without a certificate.

    ``tcp_address``, ``http_address``, ``https_address`` are the same, as those of a server in this process.
    """

    tcp: Address
    http: Address
    https: Address | None = None

    @property
    def tcp_address(self) -> Address:
        return self.tcp

    @property
    def http_address(self) -> Address:
        return self.http

    @property
    def https_address(self) -> Address | None:
        return self.https


class _Addresses(msgspec.Struct):
    nsqds: list[ServerAddresses]
    lookupds: list[ServerAddresses]

    def all(self) -> Iterator[Address]:
        for server in (*self.nsqds, *self.lookupds):
            yield from filter(None, (server.tcp, server.http, server.https))


class _Answer(msgspec.Struct):
    """What a method returns, or the text of the error that it raises."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None


class BrokerProcess(Watched):
    """A broker as a child process. Use it in a ``with``, or call ``start`` and ``stop``.

    Args:
        nsqds: how many nsqds.
        lookupd: whether there is an nsqlookupd, at which they register.
        data_path: where messages and metadata are kept; None keeps nothing.
        options: of the nsqds, as for ``Broker``.

    Raises ConfigError for values that do not fit.
    """

    _group = "Broker"

    def __init__(
        self, nsqds: int = 1, lookupd: bool = True, data_path: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        self._set_up(data_path, nsqds=nsqds, lookupd=lookupd, **options)

    def _set_up(self, data_path: str | os.PathLike[str] | None, **options: Any) -> None:
        _make(self._group, {"data_path": data_path, **options})  # what is wrong is known here, and not in the child
        self._settings = {"data_path": None if data_path is None else os.fspath(data_path), **options}
        self._addresses = _Addresses([], [])
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Any = None
        self._ports = HeldPorts()
        self._turn = Semaphore()  # of those who ask the child

    @property
    def nsqds(self) -> list[ServerAddresses]:
        """The addresses of the nsqds. Known once it has been started; the same after a restart."""
        return self._addresses.nsqds

    @property
    def nsqd(self) -> ServerAddresses:
        return self._addresses.nsqds[0]

    @property
    def lookupd(self) -> ServerAddresses:
        """The addresses of the nsqlookupd."""
        if not self._addresses.lookupds:
            raise NotRunning("the broker has no nsqlookupd")
        return self._addresses.lookupds[0]

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the child and return when it serves, on the addresses of the last time if there was one.

        Without effect when it runs already. Raises NsqError, with its reason, when the child ends instead.
        """
        if self.is_running:
            return
        self.kill()
        self._ports.offer()
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nsq_fast.broker.process", self._group],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which still needs the broker to end cleanly
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
        )
        assert self._process.stdout is not None
        self._output = FileObjectPosix(self._process.stdout.fileno(), "rb", closefd=False)
        try:
            self._addresses = msgspec.json.decode(self._ask(self._settings, START_TIMEOUT), type=_Addresses)
        except BaseException:
            self.kill()
            raise
        self.release_ports()
        addresses = msgspec.to_builtins(self._addresses)
        self._settings["addresses"] = {**addresses, "lookupd": next(iter(addresses["lookupds"]), None)}

    def stop(self) -> None:
        """End the child with SIGTERM: it saves its state first. Without effect when it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(TimeoutError), Timeout(STOP_TIMEOUT, TimeoutError()):
            self._output.read()
        self.kill()

    def kill(self) -> None:
        """End the child with SIGKILL. Without effect when it does not run."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._output.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process = None
        for address in self._addresses.all():
            self._ports.hold(address)

    def release_ports(self) -> None:
        self._ports.let_go()

    def restart(self) -> None:
        """SIGKILL, then start again on the same addresses and data."""
        self.kill()
        self.start()

    def set_faults(self, target: str, **switches: Any) -> None:
        """Turn fault switches (see ``Faults``) of ``nsqd0.tcp``, ``nsqd0.http``, ..., ``lookupd.http``.

        Raises NsqError when there is no such target or switch.
        """
        if isinstance(switches.get("lie"), bytes):
            switches["lie"] = switches["lie"].decode("latin-1")
        self._call("set_faults", target, **switches)

    def messages(self, topic: str, channel: str | None = None) -> list[bytes]:
        return msgspec.json.decode(self._call("messages", topic, channel), type=list[bytes])

    def depth(self, topic: str, channel: str | None = None) -> int:
        return msgspec.json.decode(self._call("depth", topic, channel), type=int)

    @contextlib.contextmanager
    def fault(self, name: str, value: Any = None) -> Iterator[None]:
        self._call("begin_fault", name, value)
        process = self._process
        try:
            yield
        finally:
            if self._process is process:  # one that was killed, or restarted, has no fault any more
                self._call("end_fault")

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> msgspec.Raw:
        """What a method returns, as JSON. Raises NsqError with the text of its error."""
        return self._ask({"method": method, "arguments": arguments, "keywords": keywords}, STOP_TIMEOUT)

    def _ask(self, question: Any, timeout: float) -> msgspec.Raw:
        answer = msgspec.json.decode(self._request(question, timeout), type=_Answer)
        if answer.error is not None:
            raise NsqError(answer.error)
        return answer.value

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise NotRunning("the broker process is not running")
        return self._process

    def _request(self, question: Any, timeout: float) -> bytes:
        process = self._running()
        assert process.stdin is not None
        with self._turn, Timeout(timeout, TimeoutError("the broker process does not answer")):
            process.stdin.write(msgspec.json.encode(question) + b"\n")
            process.stdin.flush()
            answer: bytes = self._output.readline()
        if not answer:
            raise NsqError(f"the broker process ended, with status {process.wait()}")
        return answer


def run(kind: str) -> None:
    """Start ``Broker``, or ``RedesignedCluster``, with the settings on stdin; execute the commands that follow them."""
    commands = FileObjectPosix(sys.stdin.fileno(), "rb", closefd=False)
    group = _make(kind, msgspec.json.decode(commands.readline()))
    is_ready = False
    follower: Greenlet[..., Any] = Greenlet(_run_commands, commands, group)
    stopped = Event()
    follower.link(lambda _: stopped.set())

    def ready() -> None:
        nonlocal is_ready
        is_ready = True
        _write_line(_answer(lambda: addresses_of(group)))
        follower.start()

    try:
        serve(group, ready, stopped)
    except (NsqError, OSError) as error:
        if is_ready:
            raise
        _write_line(_Answer(error=str(error)))
        sys.exit(1)


def _run_commands(commands: Any, group: ServerGroup) -> None:
    faults = _Faults(group)
    for line in commands:
        _write_line(_execute(group, faults, **msgspec.json.decode(line)))


def _execute(
    group: ServerGroup, faults: _Faults, method: str, arguments: list[Any], keywords: dict[str, Any]
) -> _Answer:
    function = getattr(faults if hasattr(faults, method) else group, method)
    return _answer(lambda: function(*arguments, **keywords))


def _answer(function: Callable[[], Any]) -> _Answer:
    try:
        return _Answer(msgspec.Raw(msgspec.json.encode(function(), enc_hook=_addresses_of)))
    except NsqError as error:
        return _Answer(error=str(error))
    except Exception as error:  # an argument of a kind that a method does not expect: nobody else pays for it
        return _Answer(error=f"{type(error).__name__}: {error}")


class _Faults:
    """Faults by name that have begun, and end when their parent says so: the last one first."""

    def __init__(self, group: ServerGroup) -> None:
        self._group = group
        self._begun: list[contextlib.AbstractContextManager[None]] = []

    def begin_fault(self, name: str, value: Any) -> None:
        fault = self._group.fault(name, value)
        fault.__enter__()
        self._begun.append(fault)

    def end_fault(self) -> None:
        self._begun.pop().__exit__(None, None, None)


def addresses_of(group: ServerGroup) -> _Addresses:
    """Where the servers of a group listen."""
    addresses = _Addresses([], [])
    for server in group.servers.values():
        servers = addresses.nsqds if isinstance(server, NsqdServer) else addresses.lookupds
        servers.append(_addresses_of(server))
    return addresses


def _addresses_of(server: Any) -> ServerAddresses:
    return ServerAddresses(server.tcp_address, server.http_address, getattr(server, "https_address", None))


def _make(group: str, settings: Mapping[str, Any]) -> ServerGroup:
    made: ServerGroup = getattr(importlib.import_module("nsq_fast.broker"), group)(**settings)
    return made


def _write_line(answer: Any) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(answer) + b"\n")


def _remote(method: str) -> Callable[..., None]:
    def call(self: ClusterProcess, *arguments: Any, **keywords: Any) -> None:
        named = {name: self._numbered(value) for name, value in keywords.items()}
        self._call(method, *map(self._numbered, arguments), **named)

    return call


class ClusterProcess(BrokerProcess):
    """A cluster as a child process. ``kill`` and ``restart`` are for all of it, ``kill_node`` for one nsqd.

    Args:
        nodes: how many nsqds.
        lookupds: how many nsqlookupds.
        data_path: where topics, messages and channels are kept; None keeps nothing.
        options: as for ``RedesignedCluster``.
    """

    _group = "RedesignedCluster"

    def __init__(
        self, nodes: int = 3, lookupds: int = 2, data_path: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        self._set_up(data_path, nodes=nodes, lookupds=lookupds, **options)

    @property
    def lookupds(self) -> list[ServerAddresses]:
        """The addresses of the nsqlookupds. Known once it has been started; the same after a restart."""
        return self._addresses.lookupds

    def leader_of(self, topic: str, number: int) -> ServerAddresses:
        """The nsqd that leads a partition: one of ``nsqds``, which may be dead. Raises NsqError."""
        return msgspec.json.decode(self._call("leader_of", topic, number), type=ServerAddresses)

    def _numbered(self, value: Any) -> Any:
        """One of ``nsqds`` as its number: the child knows it by that."""
        return self.nsqds.index(value) if isinstance(value, ServerAddresses) else value

    # As the methods of ``RedesignedCluster``; a node is its number, or one of ``nsqds``. Each raises NsqError.
    create_topic: Callable[..., None] = _remote("create_topic")
    move_leader: Callable[..., None] = _remote("move_leader")
    wait_stable: Callable[..., None] = _remote("wait_stable")
    forget_log: Callable[..., None] = _remote("forget_log")
    kill_node: Callable[..., None] = _remote("kill_node")
    restart_node: Callable[..., None] = _remote("restart_node")
    remove_node: Callable[..., None] = _remote("remove_node")
    isolate_node: Callable[..., None] = _remote("isolate_node")
    heal_node: Callable[..., None] = _remote("heal_node")


# --- in a thread of its own ------------------------------------------------------------------------------------------
# So it serves programs that block their hub, or have none: threads, asyncio, requests, subprocesses.


class HubThread:
    """A native thread with a hub, for the time of a ``with``. What is made in it is used from any thread.

    Its methods are called in that thread, and the caller waits; other greenlets of the caller's hub run meanwhile. In a
    coroutine a call that takes time is made by ``asyncio.to_thread``.
    """

    def __enter__(self) -> HubThread:
        ready, hear = _native_event()
        # The real function: a program may have patched it.
        get_original("_thread", "start_new_thread")(self._run, (ready,))
        hear()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _run(self, ready: Callable[[], None]) -> None:
        self._hub: Any = get_hub()
        self._end, stopped = _native_event()  # its watcher keeps a loop alive that has nothing else to do
        ready()
        stopped()
        self._hub.destroy(destroy_loop=True)

    def make(self, factory: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a function gives that is called in the thread; its methods are called there, too."""
        return _Remote(self.call(lambda: factory(*arguments, **options)), self.call)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in the thread; what it gives, or raises."""
        if get_hub() is self._hub:
            return function()
        done, hear = _native_event()
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome[:] = [function(), None]
            except BaseException as error:
                outcome[:] = [None, error]
            done()

        self._hub.loop.run_callback_threadsafe(spawn, run)
        hear()
        result, error = outcome
        if error is not None:
            raise error
        return result


class InThread:
    """Servers in a ``HubThread`` of their own: ``with InThread(Broker, nsqds=2) as broker``.

    Args:
        make: ``Broker`` or ``RedesignedCluster``; ``arguments``, ``options``: for it.
    """

    def __init__(self, make: Callable[..., ServerGroup], *arguments: Any, **options: Any) -> None:
        self._thread = HubThread()
        self._made = make, arguments, options
        self._group: Any = None

    def __enter__(self) -> Any:
        make, arguments, options = self._made
        self._thread.__enter__()
        try:
            self._group = self._thread.make(make, *arguments, **options)
            self._group.start()
        except BaseException:
            self._thread.__exit__()
            raise
        return self._group

    def __exit__(self, *_: object) -> None:
        try:
            self._group.stop()
            self._group.release_ports()
        finally:
            self._thread.__exit__()


def _native_event() -> tuple[Callable[[], None], Callable[[], None]]:
    """Something to call in another thread, and something to wait with until that was called."""
    watcher, event = get_hub().loop.async_(), Event()
    watcher.start(event.set)

    def hear() -> None:
        event.wait()
        watcher.close()

    return watcher.send, hear


class _Remote:
    """An object of the broker in another thread."""

    def __init__(self, target: Any, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_call", call)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value) or isinstance(value, type):
            return self._shown(value)
        return lambda *arguments, **options: self._shown(
            self._call(lambda: value(*map(_target_of, arguments), **options))
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self._call(lambda: setattr(self._target, name, value))

    def __enter__(self) -> Any:
        return self._call(self._target.__enter__)

    def __exit__(self, *arguments: object) -> Any:
        return self._call(lambda: self._target.__exit__(*arguments))

    def __eq__(self, other: object) -> bool:
        return self._target is _target_of(other)

    def __hash__(self) -> int:
        return hash(self._target)

    def _shown(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._shown(each) for each in value]
        if isinstance(value, dict):
            return {key: self._shown(each) for key, each in value.items()}
        is_ours = type(value).__module__.startswith(("nsq_fast.broker.", "contextlib"))
        return _Remote(value, self._call) if is_ours and not isinstance(value, (tuple, msgspec.Struct)) else value


def _target_of(value: object) -> object:
    return value._target if isinstance(value, _Remote) else value


def main() -> None:
    run(sys.argv[1])


if __name__ == "__main__":
    main()
