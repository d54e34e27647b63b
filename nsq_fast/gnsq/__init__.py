"""gnsq's package on top of nsq_fast: the same modules and names, so that a program written for gnsq runs unchanged.

``import nsq_fast.gnsq as gnsq`` for a program that you edit; ``nsq_fast.install_as_gnsq()``
before its imports, or ``nsq-fast run-as-gnsq program.py``, for one that you do not.
This package has names and adapters only. docs/gnsq-differences.md lists where
the behaviour differs from gnsq's.
"""

from __future__ import annotations

import sys

from nsq_fast.errors import ConfigError

from . import basics as backofftimer
from . import basics as decorators
from . import basics as states
from . import basics as version
from . import consumer as reader
from . import contrib as contrib
from . import errors as errors
from . import httpclient as lookupd
from . import protocol as protocol
from . import stream as stream
from . import util as util
from .basics import BackoffTimer
from .basics import __version__ as __version__
from .consumer import Consumer, Reader
from .httpclient import Lookupd, LookupdClient, NsqdHTTPClient
from .message import Message
from .nsqd import Nsqd, NsqdTCPClient
from .producer import Producer

__author__ = "the authors of nsq_fast"
__email__ = ""

__all__ = [
    "BackoffTimer",
    "Consumer",
    "Lookupd",
    "LookupdClient",
    "Message",
    "Nsqd",
    "NsqdHTTPClient",
    "NsqdTCPClient",
    "Producer",
    "Reader",
]

_PARTS = {
    "backofftimer": backofftimer,
    "decorators": decorators,
    "states": states,
    "version": version,
    "reader": reader,
    "lookupd": lookupd,
    **dict.fromkeys(("contrib.batch", "contrib.giveup", "contrib.queue", "contrib.sentry"), contrib),
    **dict.fromkeys(("stream.compression", "stream.defalte", "stream.snappy", "stream.stream"), stream),
}
"""Modules of gnsq's that are no file here: the module that has all their names is imported in place of each."""

for _name, _module in _PARTS.items():
    _path = f"{__name__}.{_name}".rpartition(".")
    sys.modules[f"{__name__}.{_name}"] = _module
    setattr(sys.modules[_path[0]], _path[2], _module)


def install_as_gnsq() -> None:
    """Register every module of ``nsq_fast.gnsq`` as that of ``gnsq``, before anything imports gnsq.

    ``import gnsq.contrib.batch`` and ``from gnsq.errors import NSQInvalid`` then give the same modules and classes as
    ``nsq_fast.gnsq`` does, whether a gnsq is installed or not. Raises ConfigError when another gnsq was imported.
    """
    present = sys.modules.get("gnsq")
    if present not in (None, sys.modules[__name__]) and not getattr(present, "__nsq_fast_shim__", False):
        raise ConfigError("gnsq is imported already: call install_as_gnsq() before anything imports gnsq")
    ours = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(f"{__name__}.")}
    sys.modules |= {f"gnsq{name.removeprefix(__name__)}": module for name, module in ours.items()}
