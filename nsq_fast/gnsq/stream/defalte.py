"""Deflate, under the name that gnsq gave it."""

from .compression import DefalteSocket as DefalteSocket
