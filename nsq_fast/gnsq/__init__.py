"""gnsq's package on top of nsq_fast: the same modules and names, so that a program written for gnsq runs unchanged.

``import nsq_fast.gnsq as gnsq`` for a program that you edit; ``nsq_fast.install_as_gnsq()``
before its imports, or ``nsq-fast run-as-gnsq program.py``, for one that you do not.
This package has names and adapters only. docs/gnsq-differences.md lists where
the behaviour differs from gnsq's.
"""

from __future__ import annotations

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
