# Commands for users (demo) and for work on the package. Each sets up what it needs in .venv first, with the versions
# of constraints.txt, and again when that file or pyproject.toml changes.

PYTHON ?= python3
# another PyTorch than that of constraints.txt, in an environment of its own: make test TORCH=2.15.0
TORCH ?=
TORCH_VERSION = $(or $(TORCH),$(shell sed -n s/^torch==//p constraints.txt))
VENV := .venv$(TORCH:%=-%)
WILD := .venv-wild$(TORCH:%=-%)
BIN := $(VENV)/bin
# processes of the test run: a third gains nothing on two cores. A file stays in one process, as its tests share what
# they set up, and files come in the order of tests/conftest.py. A process that a test ends is started again, twice at
# most. WORKERS= runs all in this one
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 2
# threads of operators in each of them: with two, the processes wait for each other on two cores, a fifth of the time.
# `make ground` leaves PyTorch's own number, with which programs run
THREADS ?= 1

# the other versions of PyTorch that are supported: `make matrix` runs all tests on each
OTHERS := 2.14.1 2.15.0

.PHONY: help demo test test-cuda-compile cuda-compile scenarios ground matrix lint ruff-check ruff-format mypy docs pictures bench wild conformance interruptions soak release clean
# two pips in one environment would get in each other's way
.NOTPARALLEL:

help:
	@echo "make demo    train a convolutional network on handwritten digits, on device=\"lazy\""
	@echo "make test    run the tests; ARGS are passed to pytest, as in: make test ARGS='-k views'"
	@echo "make scenarios  the tests of whole programs, which take as long again"
	@echo "make test TORCH=2.15.0  the same with another PyTorch, in an environment of its own"
	@echo "make matrix  the tests with every supported PyTorch; make ground: those that concern its internals"
	@echo "make test-cuda-compile  compile steps for a GPU that is not there, run their kernels by Triton's interpreter"
	@echo "make lint    ruff and mypy"
	@echo "make docs    build the documentation into site/"
	@echo "make pictures  draw the pictures of the documentation anew, with Graphviz"
	@echo "make bench   time per recorded operator, per sync and per step, next to eager and torch.compile"
	@echo "make wild    documented programs of twenty other packages, next to eager; ARGS='--wild geometric_gcn'"
	@echo "make conformance  PyTorch's own tests of operators, modules and optimizers; ARGS='--help' tells more"
	@echo "make interruptions  exceptions and handlers at every place of a step, of which the tests try one in 24"
	@echo "make soak    train while processes are killed, disks are full, steps are interrupted; ARGS='--hours 2'"
	@echo "make release  sdist and wheel in dist/, each checked in an empty environment with every supported PyTorch"
	@echo "make clean   remove the environment and everything built"

demo: $(VENV)/demo.installed
	$(BIN)/python examples/train_digits.py --device lazy $(ARGS)

test: $(VENV)/test.installed
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest $(WORKERS) -m "not scenario" $(ARGS)

# whole programs: compiled, of several processes, installed, trained for long
scenarios: $(VENV)/test.installed
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest $(WORKERS) -m scenario $(ARGS)

# what concerns PyTorch's internals: the self-check, all of tests/ir, and files of tests/cpu that touch ports
ground: $(VENV)/test.installed
	$(BIN)/python -m lazy_backend
	$(BIN)/python -m pytest $(WORKERS) tests/ir tests/ground tests/test_ports.py tests/test_package.py \
		tests/cpu/test_autocast.py tests/cpu/test_runs_beside.py tests/cpu/test_modules.py \
		tests/cpu/test_torch_compile.py tests/cpu/test_data_parallel.py tests/cpu/test_torch_lazy.py $(ARGS)

matrix: test scenarios
	for version in $(OTHERS); do $(MAKE) test scenarios TORCH=$$version || exit 1; done

# PyTorch comes with CUDA where pip's index has such builds, as PyPI has for Linux
test-cuda-compile:
	$(MAKE) cuda-compile TORCH=$(or $(TORCH),$(lastword $(OTHERS)))

cuda-compile: $(VENV)/demo.installed
	$(BIN)/python tools/cuda_compile.py $(ARGS)

lint: ruff-check ruff-format mypy

ruff-check: $(VENV)/dev.installed
	$(BIN)/ruff check .

ruff-format: $(VENV)/dev.installed
	$(BIN)/ruff format --check .

# mypy knows no package-dir: it is shown the files as they are installed
mypy: $(VENV)/dev.installed
	rm -rf .typed
	mkdir -p .typed/lazy_backend
	cd .typed/lazy_backend && ln -s ../../lazy_backend/* ../../lowering ../../cache .
	ln -s ../lazy_backend_autoload.py .typed
	$(BIN)/mypy

# the variable silences the theme's advertisement of its successor
docs: $(VENV)/docs.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# needs Graphviz; what it draws is kept, so that the documentation is built without it
pictures:
	python3 tools/structure.py
	for source in docs/images/*.dot; do dot -Tsvg "$$source" -o "$${source%.dot}.svg"; done

bench: $(VENV)/test.installed
	$(BIN)/python tools/bench.py $(ARGS)

# in an environment of its own, since twenty packages need many others; pytorch-forecasting wants an older pandas
wild: $(WILD)/wild.installed
	mkdir -p build
	$(WILD)/bin/python tools/bench.py --wild --markdown --raw build/wild.json $(ARGS)

$(WILD)/wild.installed: pyproject.toml constraints.txt tools/benchmarks/wild_requirements.txt
	$(PYTHON) -m venv $(WILD)
	sed '/^pandas==/d; s/^torch==.*/torch==$(TORCH_VERSION)/' constraints.txt > $(WILD)/constraints.txt
	$(WILD)/bin/python -m pip install --no-compile --constraint $(WILD)/constraints.txt \
		--requirement tools/benchmarks/wild_requirements.txt --editable '.[trainers]'
	touch $@

conformance: $(VENV)/test.installed
	$(BIN)/python tools/conformance.py $(ARGS)

# takes long: an exception, a signal handler and a finalizer at every place that a step comes to
interruptions: $(VENV)/test.installed
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest $(WORKERS) --runslow -o faulthandler_timeout=0 \
		tests/cpu/test_interruption.py $(ARGS)

soak: $(VENV)/test.installed
	$(BIN)/python tools/soak.py $(ARGS)

# needs a network: environments are made for it alone
release:
	$(PYTHON) tools/release.py $(ARGS)

clean:
	rm -rf .venv .venv-* .typed site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .inductor_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# demo, test, docs and dev are the optional dependencies of pyproject.toml. No byte code of what is never imported: 20 s
$(VENV)/%.installed: pyproject.toml $(VENV)/constraints.txt
	$(BIN)/python -m pip install --no-compile --constraint $(VENV)/constraints.txt --editable '.[$*]'
	touch $@

$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	sed 's/^torch==.*/torch==$(TORCH_VERSION)/' $< > $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
