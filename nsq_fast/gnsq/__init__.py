"""gnsq's package on top of nsq_fast: the same modules and names, so that a program written for gnsq runs unchanged.

``import nsq_fast.gnsq as gnsq`` for a program that you edit; ``nsq_fast.install_as_gnsq()``
before its imports, or ``nsq-fast run-as-gnsq program.py``, for one that you do not.
This package has names and adapters only. docs/gnsq-differences.md lists where
the behaviour differs from gnsq's.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from nsq_fast.errors import ConfigError

from . import decorators as decorators
from . import errors as errors
from . import protocol as protocol
from . import states as states
from . import stream as stream
from . import util as util
from .backofftimer import BackoffTimer
from .consumer import Consumer
from .lookupd import Lookupd, LookupdClient
from .message import Message
from .nsqd import Nsqd, NsqdHTTPClient, NsqdTCPClient
from .producer import Producer
from .reader import Reader
from .version import __version__ as __version__

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


def install_as_gnsq() -> None:
    """Register every module of ``nsq_fast.gnsq`` as that of ``gnsq``, before anything imports gnsq.

    ``import gnsq.contrib.batch`` and ``from gnsq.errors import NSQInvalid`` then give the same modules and classes as
    ``nsq_fast.gnsq`` does, whether a gnsq is installed or not. Raises ConfigError when another gnsq was imported.
    """
    present = sys.modules.get("gnsq")
    if (
        present is not None
        and present is not sys.modules[__name__]
        and not getattr(present, "__nsq_fast_shim__", False)
    ):
        raise ConfigError("gnsq is imported already: call install_as_gnsq() before anything imports gnsq")
    for info in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(info.name)
    for name in [__name__, *(name for name in sys.modules if name.startswith(f"{__name__}."))]:
        sys.modules["gnsq" + name.removeprefix(__name__)] = sys.modules[name]
