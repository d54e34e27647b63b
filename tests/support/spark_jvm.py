"""The JVM of a session, whose classes and their methods are looked up once.

py4j asks the JVM what a name is each time it is used, and PySpark names ``functions`` for each operation on a column.
The JVM looks for such a short name in all jars of Spark: of queries with many columns that was a tenth of the CPU.
"""

from __future__ import annotations

from typing import Any

from py4j.java_gateway import JavaClass, JavaMember, JVMView
from pyspark import SparkContext


class _Class(JavaClass):  # type: ignore[misc]  # py4j has no types
    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, JavaMember):
            self.__dict__[name] = found
        return found


class _View(JVMView):  # type: ignore[misc]
    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, JavaClass):
            found = self.__dict__[name] = _Class(found._fqn, found._gateway_client)
        return found


def remember_classes() -> None:
    """Have PySpark ask the JVM of this process once for each class and method."""
    view = SparkContext._jvm
    assert view is not None
    SparkContext._jvm = _View(view._gateway_client, view._jvm_name, view._id)
