"""The client on any loop: the port (``loop``) and what stands on it."""

from nsq_fast._lazy import require_main_interpreter

require_main_interpreter()
