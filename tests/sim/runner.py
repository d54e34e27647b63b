"""Runs scenarios by seed: ``python -m sim connection 0:300`` in the folder ``tests``; one seed tells what happened."""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .clock import SimError, SimLoop, simulate
from .network import Network
from .nsqd import Books
from .planted import PLANTED, plant

SEEDS_A_COLLECTION = 20
SCENARIOS = ("connection", "producer", "consumer", "lookup")


class Outcome:
    """How one seed went.

    Attributes:
        error: what was wrong; None: nothing.
        trace: what happened, a line each.
        digest: of the trace; the same for the same seed.
    """

    def __init__(self, scenario: str, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.error: BaseException | None = None
        self.books: Books | None = None
        self.result: dict[str, Any] = {}
        self.virtual_seconds = 0.0

    @property
    def trace(self) -> list[str]:
        return self.books.trace if self.books is not None else []

    @property
    def digest(self) -> str:
        return hashlib.sha1("\n".join(self.trace).encode()).hexdigest()[:12]

    def replay(self) -> str:
        """One line that runs it again."""
        return f"cd tests && python -m sim {self.scenario} {self.seed}"


def in_virtual_time(seed: str, scenario: Callable[[SimLoop], Any]) -> Any:
    """Run ``await scenario(loop)`` with a network and books; what it returns."""

    def new_socket(loop: SimLoop) -> Callable[..., Any]:
        loop.network = Network(loop)
        loop.books = Books(loop)
        return loop.network.new_socket

    return simulate(seed, scenario, new_socket)


def run(scenario: str, seed: int) -> Outcome:
    """Run one scenario by one seed."""
    module = import_module(f"{__package__}.{scenario}")
    outcome = Outcome(scenario, seed)

    async def main(loop: SimLoop) -> dict[str, Any]:
        began = loop.time()
        outcome.books = loop.books
        result = await module.scenario(loop)
        outcome.virtual_seconds = loop.time() - began
        await asyncio.sleep(0)
        _expect_nothing_left(loop)
        return result

    gc.disable()  # its time depends on what ran before, and so would the finalizers
    try:
        outcome.result = in_virtual_time(f"{scenario} {seed}", main)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        outcome.error = error
    finally:
        gc.enable()
    if seed % SEEDS_A_COLLECTION == 0:
        gc.collect()
    return outcome


def _expect_nothing_left(loop: SimLoop) -> None:
    """No socket, task or timer of the client outlives it."""
    if loop.broken is not None:
        raise SimError(loop.broken)
    if loop.sockets:
        raise SimError(f"{len(loop.sockets)} sockets are left open")
    others = asyncio.all_tasks(loop) - {asyncio.current_task()}
    if others:
        raise SimError(f"tasks are left: {[task.get_name() for task in others]}")
    for timer in loop.waiting:
        callback = timer._callback
        module = getattr(callback, "__module__", None) or type(getattr(callback, "__self__", None)).__module__
        if str(module).startswith("nsq_fast"):
            raise SimError(f"a timer is left: {callback}")


def run_planted(seeds: range, part: str) -> int:
    """Plant each fault of a scenario, or of all, and look for the first seed that finds it; how many were not found."""
    missed = 0
    for fault in PLANTED:
        if part not in (fault.scenario, "all"):
            continue
        began = time.process_time()
        with plant(fault):
            tried = (run(fault.scenario, seed) for seed in (fault.seed, *seeds))
            found = next((outcome for outcome in tried if outcome.error is not None), None)
        seconds = time.process_time() - began
        if found is None:
            missed += 1
            print(f"MISSED: {fault.name}; {len(seeds)} seeds of {fault.scenario}, {seconds:.1f} s")
        else:
            text = str(found.error) or repr(found.error)
            print(f"{fault.name}: {found.scenario} {found.seed}, {seconds:.1f} s: {text[:100]}")
    return missed


def seeds_of(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last)) if last else range(int(first), int(first) + 1)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sim", description=__doc__)
    parser.add_argument("scenario", choices=(*SCENARIOS, "all", "planted"))
    parser.add_argument("seeds", help="one, or FIRST:END")
    parser.add_argument("--planted", default="all", help="of planted: in which scenario")
    parser.add_argument("--digest", action="store_true", help="print what each seed did, in short")
    parser.add_argument("--most", type=int, default=10, help="stop after so many failures")
    options = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have another order else
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "sim", *arguments])
    import logging

    logging.disable(logging.CRITICAL)
    gc.freeze()  # what is imported need not be looked at after each seed
    seeds = seeds_of(options.seeds)
    if options.scenario == "planted":
        return run_planted(seeds, options.planted)
    failures = 0
    for scenario in SCENARIOS if options.scenario == "all" else (options.scenario,):
        began, virtual, totals = time.process_time(), 0.0, Counter[str]()
        done = 0
        for seed in seeds:
            outcome = run(scenario, seed)
            done += 1
            virtual += outcome.virtual_seconds
            totals.update({name: value for name, value in outcome.result.items() if isinstance(value, int)})
            if options.digest:
                print(scenario, seed, outcome.digest)
            if outcome.error is not None:
                failures += 1
                if len(seeds) == 1:
                    print(*outcome.trace, sep="\n")
                    traceback.print_exception(outcome.error)
                print(f"FAILED {str(outcome.error) or repr(outcome.error)}\n  replay: {outcome.replay()}")
                if failures >= options.most:
                    break
            elif len(seeds) == 1:
                print(*outcome.trace, sep="\n")
        print(f"{scenario}: {done} seeds, {virtual / 3600:.1f} h of virtual time in {time.process_time() - began:.1f} s"
              f" of CPU; {dict(totals)}")  # fmt: skip
    return 1 if failures else 0
