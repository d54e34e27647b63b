"""What makes Spark find the format "nsq" by itself: it looks for ``DefaultSource`` in modules named ``pyspark_*``.

Spark imports this with every other such module that is installed, whether the
format is used or not. So where its extra is not installed there is no
``DefaultSource``, and no error either.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    from nsq_fast.spark import NsqDataSource as DefaultSource  # noqa: F401
