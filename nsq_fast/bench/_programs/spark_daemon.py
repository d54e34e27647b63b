"""Spark's daemon of Python workers. Spark's own has the system forget those that have ended, and what CPU they took;
here they stay, so that it can be read."""

import signal

from pyspark import daemon

daemon.SIGCHLD = signal.SIGURG  # to ignore this one changes nothing
daemon.manager()
