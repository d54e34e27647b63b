"""The client on any loop: the port (``loop``) and what stands on it."""

from nsq_fast._per_interpreter import require_main_interpreter

require_main_interpreter()
