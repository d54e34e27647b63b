"""The Python of Spark's workers, in tests: forked from one that has imported what each of them does.

Spark starts a dozen for each query, and each imports for 0.2 to 0.6 s: half of what the tests of Spark would cost. The
first that a JVM starts leaves a Python that imports once, and forks for it and for the next ones.
"""

import fcntl
import marshal
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

FORKING = "forking"  # in the command of the Python that forks, and so in those of its children
_OF_WORKERS = ("pyspark.daemon", "pyspark.sql.streaming.python_streaming_source_runner")
_SIZE = 1 << 17
_OURS = (
    "columns",
    "spark.source",
    "spark.journal.query",
    "spark.journal.collect",
    "spark.replay.batch",
    "spark.sink.plan",
)


def main() -> None:
    """As ``python -m module``, in a forked process with the files, environment and folder of this one.

    This process ends when that does, which gets the same signal where this one is ended.
    """
    link = _connect(f"\0nsq-fast-tests-{os.getppid()}")
    socket.send_fds(link, [marshal.dumps((sys.argv[2:], dict(os.environ), os.getcwd()))], [0, 1, 2])
    child = int(link.recv(_SIZE))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    link.recv(_SIZE)


def _connect(address: str) -> socket.socket:
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(ConnectionRefusedError):
            link.connect(address)
            return link
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, suppress(OSError):
            listener.bind(address)  # unless another process was faster
            listener.listen()
            given = [os.dup(listener.fileno()), os.pidfd_open(os.getppid())]
            for fd in given:
                os.set_inheritable(fd, True)
            os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-P", __file__, FORKING, *map(str, given)])


def _fork(listener: socket.socket, jvm: int) -> socket.socket:
    """Returns in each child, with its link to the process that it stands for; ends with the JVM."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, jvm], [], [])[0]:
        link, _ = listener.accept()
        _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid() and not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os.close(jvm)
            return link
        link.close()
    sys.exit()


def run() -> None:
    """The Python that forks, and its children."""
    import gc
    import importlib
    import pkgutil
    import runpy

    for fd in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    import pyspark.sql.worker as workers

    of_spark = [each.name for each in pkgutil.iter_modules(workers.__path__, f"{workers.__name__}.")]
    for name in ("pyspark.worker", *of_spark, *(f"nsq_fast.{each}" for each in _OURS)):
        importlib.import_module(name)
    gc.freeze()  # so that searching for garbage copies none of it in each child
    link = _fork(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    os.register_at_fork(after_in_child=link.close)
    given, fds, _, _ = socket.recv_fds(link, _SIZE, 3)
    link.send(b"%d" % os.getpid())
    for option, value in (
        (fcntl.F_SETOWN, os.getpid()),
        (fcntl.F_SETSIG, signal.SIGKILL),  # when the other end is closed; it sends nothing more
        (fcntl.F_SETFL, os.O_ASYNC),
    ):
        fcntl.fcntl(link, option, value)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv, environment, folder = marshal.loads(given)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1] == FORKING:
        run()
    elif sys.platform == "linux" and sys.argv[1] == "-m" and sys.argv[2] in _OF_WORKERS:
        main()
    else:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
