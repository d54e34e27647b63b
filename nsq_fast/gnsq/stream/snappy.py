"""Snappy, in its framing format."""

from .compression import SnappySocket as SnappySocket
