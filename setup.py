"""Build of the compiled modules, some of them twice, and the version (version.py).

Everything else stands in pyproject.toml. Why some are built twice: nsq_fast/_lazy.py.

NSQ_FAST_DEBUG=1      line tracing, annotated HTML, no optimisation
NSQ_FAST_SANITIZE=1   address and undefined-behaviour sanitizers
"""

import os
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # builds run this file, not from this folder
from version import find_version, write_version

DEBUG = os.environ.get("NSQ_FAST_DEBUG") == "1"
SANITIZE = os.environ.get("NSQ_FAST_SANITIZE") == "1"

# Without -g0 the interpreter's own flags put debug information in: 1.3 MB instead of 0.2, and a slower build.
compile_args = ["-O0", "-g"] if DEBUG else ["-O2", "-g0"]
compile_args += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
link_args: list[str] = []
if SANITIZE:
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    compile_args += ["-g", *flags]
    link_args += flags


# Their functions are on no stack that greenlet copies away: a copy of what guards their variables would be a fault.
STAY_ON_THE_STACK = ("_codec", "_frame", "_snappy_chunks")


def extension(name: str, source: str, *depends: str) -> Extension:
    macros = [("CYTHON_TRACE", "1")] if DEBUG else []
    is_copied = SANITIZE and not name.endswith(STAY_ON_THE_STACK)
    return Extension(
        f"nsq_fast.{name}",
        [f"nsq_fast/{source}"],
        depends=[f"nsq_fast/{each}" for each in depends],
        define_macros=macros,
        extra_compile_args=[*compile_args, "--param=asan-stack=0"] if is_copied else compile_args,
        extra_link_args=link_args,
    )


COMPILED = (
    "_client",
    "_codec",
    "_dispatch",
    "_frame",
    "_publish_path",
    "_snappy_chunks",
)
FOR_EACH_INTERPRETER = ("codec", "frame")


DIRECTIVES = {
    "language_level": 3,
    "binding": True,
    # What is made with pointers and sizes of its own must not take them from whoever unpickles.
    "auto_pickle": False,
    "linetrace": DEBUG,
    # tests/core/test_core_compiled.py; Cython from 3.3 on guards the attributes that are public
    "freethreading_compatible": True,
    # tests/core/test_core_compiled.py; it says something in nsq_fast/_per_interpreter only
    "subinterpreters_compatible": "own_gil",
}


class Build(build_ext):
    """Makes C of Cython where it is compiled: an sdist has none, and need not wait for it."""

    def run(self) -> None:
        compiled = cythonize(list(self.extensions), compiler_directives=DIRECTIVES, annotate=DEBUG)
        for given, made in zip(self.extensions, compiled, strict=True):
            given.sources = made.sources
        super().run()


modules = [extension(name, f"{name}.pyx") for name in COMPILED]
if sys.version_info >= (3, 12):  # interpreters before that cannot say whether they are the main one
    modules += [
        extension(f"_per_interpreter._{name}", f"_per_interpreter/{name}.c", f"_{name}.c")
        for name in FOR_EACH_INTERPRETER
    ]
version = find_version()
write_version(version)
setup(
    version=version,
    ext_modules=modules,
    cmdclass={"build_ext": Build},
    options={"build_ext": {"parallel": os.cpu_count()}},
)
