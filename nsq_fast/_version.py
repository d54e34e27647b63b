"""The version: what the build wrote down; sources that were not built do not know theirs."""

try:
    from ._built import VERSION as __version__
except ImportError:
    __version__ = "0+unknown"
