"""gnsq's name for nsq_fast.gnsq: importing this replaces it, and all its submodules, by that."""

from nsq_fast import install_as_gnsq

__nsq_fast_shim__ = True

install_as_gnsq()
