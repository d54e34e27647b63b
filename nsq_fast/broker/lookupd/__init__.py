"""nsqlookupd: what it knows, its TCP protocol and its HTTP routes."""
