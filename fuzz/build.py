"""Build the fuzzer of the readers with clang: ``python fuzz/build.py FOLDER`` makes ``FOLDER/readers``.

The compiled modules are built once more into FOLDER, with coverage for libFuzzer and with the address and
undefined-behaviour sanitizers. ``FOLDER/readers`` needs ``PYTHONPATH=FOLDER`` to find them.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from Cython.Compiler.Main import CompilationOptions, compile

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "nsq_fast"
CLANG = os.environ.get("CLANG", "clang")
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
COMPILE = [CLANG, "-O2", "-g", "-w", "-fPIC", f"-I{sysconfig.get_path('include')}"]


def main(folder: Path) -> None:
    """Build everything into ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "nsq_fast"
    package.mkdir(parents=True)
    for source in PACKAGE.iterdir():
        if source.suffix in {".py", ".pyx", ".pxd", ".pxi"}:
            shutil.copy(source, package)
    shutil.copytree(PACKAGE / "_per_interpreter", package / "_per_interpreter", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(HERE / "readers.pyx", folder)
    module(package / "_codec.pyx", folder)
    module(package / "_frame.pyx", folder, "-fsanitize-coverage=inline-8bit-counters,pc-table")
    module(folder / "readers.pyx", folder)
    library = sysconfig.get_config_var("LIBDIR")
    version = sysconfig.get_config_var("LDVERSION")
    run(
        *COMPILE, *SANITIZERS, "-fsanitize=fuzzer", f"-I{folder}", HERE / "driver.c", "-o", folder / "readers",
        f"-L{library}", f"-Wl,-rpath,{library}", f"-lpython{version}", "-rdynamic",
    )  # fmt: skip


def module(source: Path, folder: Path, *flags: str) -> None:
    """Compile one Cython module beside its source.

    Only the readers themselves are watched for coverage: libFuzzer looks at all of what is watched after each input.
    """
    options = CompilationOptions(language_level=3, include_path=[str(folder)], compiler_directives={"binding": True})
    assert compile(str(source), options).num_errors == 0
    target = source.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
    run(*COMPILE, *SANITIZERS, *flags, "-shared", source.with_suffix(".c"), "-o", target)


def run(*command: object) -> None:
    """Run a command, and end with it if it fails."""
    subprocess.run([str(each) for each in command], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
