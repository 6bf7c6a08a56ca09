# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh Debian or Ubuntu machine:
#   make demo    train on 2 ranks and write report.png
#   make test    most tests; make test-all runs the slow ones too
# Choices: PY=python3.12 (the Python that makes the environment), TF=2.18.1
# (another TensorFlow, in an environment of its own), TFDIST_CUDA=0 or 1.

PY ?= python3
TF_DEFAULT := 2.21.0
TF ?= $(TF_DEFAULT)
TF_MINOR := $(basename $(TF))
VENV ?= $(if $(filter $(TF),$(TF_DEFAULT)),.venv,.venv-$(TF))
BIN := $(VENV)/bin
CONSTRAINTS := requirements-tf$(TF_MINOR).txt
# Python compiles a module when it is first imported: most never are.
PIP := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check
# Two files at a time.
TWO_AT_A_TIME := -n 2 --dist loadgroup --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(TWO_AT_A_TIME) $(PYTEST_ARGS)
# What make test runs: with another TensorFlow, what may differ between versions.
EVERYDAY := $(if $(filter $(TF),$(TF_DEFAULT)),not extended,versions)
PYTHON_SOURCES := tfdist_ext build_ops tests examples benchmarks setup.py
CXX_SOURCES = $(shell git ls-files '*.cc' '*.h' '*.cu' '*.cuh')

# make bench: all workloads, or WORKLOAD. FBGEMM names a Python that has it.
WORKLOAD ?=
RANKS ?=
EGRESS ?=
FBGEMM ?=
BENCH_ARGS = $(if $(RANKS),--ranks $(RANKS)) \
    $(if $(EGRESS),--egress $(EGRESS)) \
    $(if $(FBGEMM),--fbgemm-python $(FBGEMM))

# make wheels: options of build_ops/wheels.py, such as --cuda.
WHEELS_ARGS ?=

export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: help demo test test-all test-fast test-process test-fault test-ports \
    test-numbers test-keras test-onnx test-orbax test-install test-asan test-tsan test-horovod test-horovodrun fuzz soak coverage build editable \
    library environment lint format docs wheel wheels bench gpu-check clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '2,6p'
	@echo 'Also: build lint format docs test-all test-fast test-process test-fault' \
	    'test-ports test-numbers test-keras test-onnx test-orbax test-install' \
	    'test-asan test-tsan' \
	    'test-horovod fuzz soak coverage wheel wheels bench' \
	    'gpu-check clean'

demo:
	$(ALONE) editable
	$(BIN)/tfdist-run -n 2 examples/ctr.py --report report.png

test: build
	$(PYTEST) -m '$(EVERYDAY)'

test-all: test
	$(PYTEST) -m 'not ($(EVERYDAY))'

test-fast: build
	$(PYTEST) -m 'not process and not fault and not slow'

test-process: build
	$(PYTEST) -m process

test-fault: build
	$(PYTEST) -m fault

# Published programs at 1, 2 and 4 ranks each; the suite has two sizes of each.
test-ports: build
	TFDIST_TEST_EVERY_SIZE=1 $(PYTEST) tests/process/test_ports.py

# Every program of tests/numbers in all settings at 1, 2 and 3 ranks.
test-numbers: build
	TFDIST_TEST_EVERY_SIZE=1 $(PYTEST) tests/numbers

# Models as ONNX files, and checkpoints of Orbax. Each runs in an environment on
# top of $(VENV) with the packages that it needs. Without them the tests would
# only be skipped; with JAX installed, Keras imports it, which slows other tests.
ONNX = build/onnx-$(TF)
ORBAX = build/orbax-$(TF)
test-onnx test-orbax: export PYTHONPATH = $(CURDIR)
test-onnx: build $(ONNX)/.installed
	$(ONNX)/bin/python -c 'import onnxruntime, tf2onnx'
	$(ONNX)/bin/python -m pytest $(PYTEST_ARGS) tests/process/test_onnx.py

test-orbax: build $(ORBAX)/.installed
	$(ORBAX)/bin/python -c 'import orbax.checkpoint'
	$(ORBAX)/bin/python -m pytest $(TWO_AT_A_TIME) $(PYTEST_ARGS) \
	    tests/process/test_orbax.py
	TFDIST_TEST_EVERY_SIZE=1 $(ORBAX)/bin/python -m pytest $(TWO_AT_A_TIME) \
	    $(PYTEST_ARGS) tests/keras_own -k orbax

PURELIB = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
build/%-$(TF)/.installed: requirements-%.txt $(VENV)/.installed-dev
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python $(PURELIB) > "$$($(@D)/bin/python $(PURELIB))/below.pth"
	$(@D)/bin/python -m pip install -q --no-compile \
	    --disable-pip-version-check -r requirements-$*.txt \
	    -c $(CONSTRAINTS) tensorflow==$(TF)
	@touch $@

# All of Keras's own tests of its loops and callbacks; the suite has some.
test-keras: build
	TFDIST_TEST_EVERY_SIZE=1 $(PYTEST) tests/keras_own

# The README's install lines in a fresh environment: needs a package index.
test-install: environment
	TFDIST_TEST_INSTALL=1 $(BIN)/python -m pytest $(PYTEST_ARGS) \
	    tests/docs/test_install.py

# One at a time in this tree: `make demo` beside `make test` waits for its build.
ALONE = +@flock -n Makefile true || echo 'Another make builds here: this waits'; \
    flock -o -w 3600 Makefile $(MAKE) --no-print-directory

# The installed package is the source tree itself (editable); only the library
# has to be built again, and that compiles only what has changed.
build:
	$(ALONE) $(VENV)/.installed-dev editable

environment:
	$(ALONE) $(VENV)/.installed-dev

editable: library
	@$(MAKE) -s $(VENV)/.editable

library: $(VENV)/.installed
	$(BIN)/python setup.py -q build_ext --inplace

$(VENV)/.editable: $(VENV)/.installed setup.py pyproject.toml
	$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

# What the package, the examples and `make demo` use.
$(VENV)/.installed: requirements.txt $(CONSTRAINTS)
	build_ops/system_packages.sh $(PY)
	$(PY) -m venv $(VENV)
	$(PIP) -r requirements.txt -c $(CONSTRAINTS) tensorflow==$(TF)
	@touch $@

# What tests, lint, the site and wheels use besides.
$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt \
    requirements-libraries.txt
	$(PIP) -r requirements-dev.txt -c $(CONSTRAINTS) tensorflow==$(TF)
	$(PIP) --no-deps -r requirements-libraries.txt
	@touch $@

# LD_PRELOAD because AddressSanitizer must be loaded before Python, and libstdc++
# with it so that it finds the exceptions it wraps. TensorFlow and Python keep
# memory until the end: leaks would say nothing about the ops.
WITH_ASAN = TFDIST_LIBRARY=$(CURDIR)/tfdist_ext/ops/_tfdist_ops_asan.so \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$(foreach lib,libasan.so libstdc++.so.6,\
	    $(shell $(CXX) -print-file-name=$(lib)))"
test-asan: build
	TFDIST_VARIANT=asan $(BIN)/python setup.py -q build_ext --inplace
	$(WITH_ASAN) $(PYTEST) tests/ops tests/comm \
	    -m 'not process and not fault'

# Horovod beside the environment: its launcher alone, and all of it, built for
# this TensorFlow. Where it cannot be imported its tests would only be skipped.
HOROVOD = $(CURDIR)/build/horovod-$(TF)
HOROVOD_TESTS = -m pytest $(PYTEST_ARGS) tests/process/test_other_launchers.py
test-horovod: test-horovodrun $(HOROVOD)/library/.built
	PYTHONPATH=$(HOROVOD)/library $(BIN)/python -c 'import horovod.tensorflow'
	PYTHONPATH=$(HOROVOD)/library $(BIN)/python $(HOROVOD_TESTS) \
	    -k 'test_horovodrun or test_horovod_carries'

# Its launcher alone, which is installed in seconds.
test-horovodrun: build $(HOROVOD)/launcher/.built
	PYTHONPATH=$(HOROVOD)/launcher $(BIN)/python -c 'import horovod.runner'
	PYTHONPATH=$(HOROVOD)/launcher $(BIN)/python $(HOROVOD_TESTS) \
	    -k test_horovodrun

$(HOROVOD)/launcher/.built: export HOROVOD_WITHOUT_TENSORFLOW = 1
$(HOROVOD)/%/.built: $(VENV)/.installed build_ops/horovod.sh
	rm -rf $(@D)
	build_ops/horovod.sh $(BIN)/python --target $(@D)
	@touch $@

# For a night: damaged handshakes, messages, ids and plans, so many of each.
FUZZ_INPUTS = 1000000
fuzz: build
	TFDIST_VARIANT=asan $(BIN)/python setup.py -q build_ext --inplace
	TFDIST_FUZZ_INPUTS=$(FUZZ_INPUTS) $(WITH_ASAN) $(BIN)/python -m pytest \
	    tests/comm/test_handshake.py tests/ops/test_malformed_ids.py \
	    tests/ops/test_int8_ops.py \
	    tests/comm/test_damaged_messages.py \
	    tests/tables/test_damaged_plans.py

# Random faults in a job that must come to the weights of one without any.
SOAK ?= --minutes 60 --ranks 4 --seed 1
soak: build
	$(BIN)/python -m tests.fault.soak $(SOAK)

# Ranks as threads of one process. TensorFlow and Python are not instrumented;
# what only they do is not looked at.
# Without oneDNN TensorFlow asks the system for each tensor: its own allocator
# hands memory from thread to thread under locks that are not instrumented.
test-tsan: build
	TFDIST_VARIANT=tsan $(BIN)/python setup.py -q build_ext --inplace
	TF_ENABLE_ONEDNN_OPTS=0 \
	TFDIST_LIBRARY=$(CURDIR)/tfdist_ext/ops/_tfdist_ops_tsan.so \
	TSAN_OPTIONS="ignore_noninstrumented_modules=1 exitcode=66 \
	    allocator_may_return_null=1 \
	    suppressions=$(CURDIR)/build_ops/tsan_suppressions.txt" \
	LD_PRELOAD="$(foreach lib,libtsan.so libstdc++.so.6,\
	    $(shell $(CXX) -print-file-name=$(lib)))" \
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/ops/test_collective_ops.py \
	    tests/ops/test_collective_errors.py \
	    tests/ops/test_checkpoint_ops.py tests/comm

# What tests run of the package's Python and C++, in whatever process. Not seen:
# processes that are killed, Python that autograph has converted or that runs in
# TensorFlow's threads. gcov would count any call that may throw as a branch.
# Tests that fail are the business of make test.
COUNTERS = build/ops-$(TF)-coverage
coverage: build
	TFDIST_VARIANT=coverage $(BIN)/python setup.py -q build_ext --inplace
	find $(COUNTERS) -name '*.gcda' -delete
	$(BIN)/python -m coverage erase
	-TFDIST_LIBRARY=$(CURDIR)/tfdist_ext/ops/_tfdist_ops_coverage.so \
	$(BIN)/python -m coverage run -m pytest $(TWO_AT_A_TIME) $(PYTEST_ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report
	$(BIN)/python -m gcovr --filter custom_ops/ --merge-lines \
	    --exclude-throw-branches --exclude-unreachable-branches $(COUNTERS)

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: environment
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# The site, in build/site. The variable silences an advertisement.
docs: environment
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs -q build --strict

wheel: environment
	build_ops/wheel.sh $(BIN)/python $(PY)

# One wheel for every TensorFlow, tried with every Python: an hour.
wheels: environment
	$(BIN)/python -m build_ops.wheels $(WHEELS_ARGS)

bench: build
	$(BIN)/python -m benchmarks.$(if $(WORKLOAD),run --workload \
	    $(WORKLOAD),all) $(BENCH_ARGS)

# The kernels alone, on a GPU: any Python with numpy, and nvcc.
gpu-check:
	$(firstword $(wildcard $(BIN)/python) $(PY)) -m benchmarks.gpu.check $(GPU_CHECK_ARGS)

clean:
	rm -rf build dist *.egg-info .venv .venv-* tfdist_ext/_build_info.py \
	    tfdist_ext/ops/*.so .coverage .coverage.* report.png
	find . -name __pycache__ -prune -exec rm -rf {} +
