"""The client on any loop: the port (``loop``) and what stands on it."""
