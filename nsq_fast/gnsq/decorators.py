"""gnsq's two decorators: ``cached_property`` is the standard library's."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

__all__ = ["cached_property", "deprecated"]

F = TypeVar("F", bound=Callable[..., Any])


def deprecated(function: F) -> F:
    """Warn with the first line of its docstring whenever ``function`` is called."""

    @functools.wraps(function)
    def warn_and_call(*args: Any, **kwargs: Any) -> Any:
        advice = (function.__doc__ or f"{function.__name__} is deprecated").partition("\n")[0]
        warnings.warn(advice, DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warn_and_call  # type: ignore[return-value]
