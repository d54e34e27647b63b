"""Clients in a hub thread, and what other threads have them do: what ``nsq_fast.threads`` and ``.aio`` stand on."""
