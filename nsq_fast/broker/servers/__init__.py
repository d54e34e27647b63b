"""Servers that can be started: state, TCP and HTTP put together, alone, in groups, or in a process of their own."""
