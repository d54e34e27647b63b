"""Run the fuzzers: ``python fuzz/run.py --seconds 15`` runs each target for so long, and fails when one finds a fault.

The readers run in C, under the address and undefined-behaviour sanitizers (build.py); the others in Python, under
atheris. What is found lies in ``build/fuzz/found``: give such a file to the same target as its argument to see it
again. What they learn stays in ``build/fuzz/corpus``, until ``make clean``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parent / "build" / "fuzz"
TARGETS = ("readers", "session", "lookup", "http", "snappy")


def main() -> int:
    """Build, make the seeds, run."""
    parser = argparse.ArgumentParser(description="Fuzz the parts that read what servers send.")
    parser.add_argument("--seconds", type=int, default=15, help="for each target (default: 15)")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(TARGETS)} (default: all)")
    options = parser.parse_args()
    targets = options.targets or TARGETS
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if "readers" in targets:
        subprocess.run([sys.executable, HERE / "build.py", FOLDER / "bin"], check=True)
    subprocess.run([sys.executable, HERE / "corpus.py", FOLDER / "corpus"], check=True)
    (FOLDER / "found").mkdir(exist_ok=True)
    return max(run(target, options.seconds) for target in targets)


def run(target: str, seconds: int) -> int:
    """Run one target; return its exit code."""
    program = [FOLDER / "bin" / "readers"] if target == "readers" else [sys.executable, HERE / "targets.py", target]
    settings = [f"-max_total_time={seconds}", "-max_len=512", "-verbosity=0", "-print_final_stats=1"]
    settings += [f"-artifact_prefix={FOLDER / 'found'}/{target}-", FOLDER / "corpus" / target]
    sys.stdout.write(f"fuzz: {target}\n")
    sys.stdout.flush()
    return subprocess.run(
        [str(each) for each in [*program, *settings]], env=environment(target), check=False
    ).returncode


def environment(target: str) -> dict[str, str]:
    """The environment of a target. The readers' interpreter is started by libFuzzer and must find its library."""
    if target != "readers":
        return {**os.environ, "PYTHONPATH": str(HERE.parent)}
    return {
        "PYTHONMALLOC": "malloc",  # so that each object has its own block, with poisoned bytes around it
        **os.environ,
        "PYTHONHOME": sys.base_prefix,
        "PYTHONPATH": str(FOLDER / "bin"),
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


if __name__ == "__main__":
    sys.exit(main())
