"""The version of gnsq whose interface this is."""

__version__ = "1.0.2"
