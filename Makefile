# `make demo` and `make test` need python3 (3.11 or newer), make and git; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK := requirements/cpu.lock
TORCH := requirements/torch-cpu.txt
# Used only if pip does not find the CPU build of torch in its configured sources.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := --extra train --extra spark --extra fast --extra plot --extra baselines --extra dashboard --extra export --extra serve --extra qdrant --extra tune
UV_COMPILE := $(BIN)/uv pip compile -q --generate-hashes pyproject.toml $(EXTRAS) --extra docs --extra dev --universal --python-version 3.11 --custom-compile-command "make lock"
GPU_VENV ?= .venv-gpu
DEMO_DIR ?= runs
PAPER_DIR ?= runs/paper

.DEFAULT_GOAL := help
.PHONY: help install demo test types suite test-long test-gpu docs bench paper notebooks lint fuzz soak mutants bounds lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## create .venv and install the pinned environment (again only if a lock changed)

$(STAMP): $(LOCK) $(TORCH) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"recsys_topk needs Python 3.11 or newer, and {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.11 ...") if v < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned environment into $(VENV) (once; a minute or two)"
	@$(PIP) install -q --no-deps -r $(TORCH) || $(PIP) install -q --no-deps -r $(TORCH) --index-url $(TORCH_INDEX)
	$(PIP) install -q --no-deps -r $(LOCK)
	$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: $(STAMP)  ## simulate a small world, train a cascade with DFTopK on it, test it
	$(BIN)/recsys-topk demo --out $(DEMO_DIR)

test: $(STAMP)  ## ruff, mypy --strict, pytest and the doctests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory -j 2 types suite

types: $(STAMP)
	$(BIN)/mypy

suite: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

test-long: $(STAMP)  ## the long cases that make test leaves out: all kernels, kills, shardings, browsers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

docs: $(STAMP)  ## the documentation site, into docs/_build/html
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

test-gpu:  ## checks that need a GPU, in a separate environment (.venv-gpu), with a table for docs/benchmarks.md
	@test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r requirements/gpu.lock
	$(GPU_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation -e .
	$(GPU_VENV)/bin/python -m tests.gpu --device cuda

bench: $(STAMP)  ## time operators, losses, data and training steps (on an idle machine; half an hour)
	mkdir -p runs/bench
	for suite in operators losses data step; do $(BIN)/recsys-topk bench $$suite --json runs/bench/$$suite.json || exit 1; done

paper: $(STAMP)  ## the experiments of the paper on a small simulated world, and a report (ten minutes on two idle cores)
	OMP_NUM_THREADS=1 $(BIN)/recsys-topk experiment all --jobs 2 --out $(PAPER_DIR)
	$(BIN)/recsys-topk report $(PAPER_DIR) --out $(PAPER_DIR)/report.html

notebooks: $(STAMP)  ## run the notebooks of the docs and store their output
	$(BIN)/python docs/run_notebooks.py

lint: $(STAMP)  ## format and lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

fuzz: $(STAMP)  ## damaged and random input for readers, configs, manifests, HTTP and losses (five minutes)
	$(BIN)/python -m tests.tools.fuzz --seconds 300 --out runs/fuzz.json

soak: $(STAMP)  ## 100 kills and 30 failing disks under every command; results must equal undisturbed ones (hours)
	RECSYS_TOPK_KILLS=20 $(BIN)/python -m pytest -q -m long tests/experiments/test_online.py -k kills
	$(BIN)/python -m tests.tools.soak --kills 100 --faults 30 --out runs/soak-$$(date +%s)

mutants: $(STAMP)  ## 400 small changes of the code, each with the tests of its line; the same command resumes (hours)
	$(BIN)/python -m tests.tools.mutants --number 400 --out runs/mutants

bounds: $(STAMP)  ## resolve the lower bounds of pyproject.toml and the newest versions, for Python 3.11 to 3.13
	@for python in 3.11 3.12 3.13; do for bound in lowest-direct highest; do \
	  $(BIN)/uv pip compile -q pyproject.toml $(EXTRAS) --python-version $$python --resolution $$bound > /dev/null \
	    && echo "Python $$python $$bound: resolves" || exit 1; done; \
	  command -v python$$python > /dev/null || echo "Python $$python: no interpreter here, so nothing was run with it"; done

lock: $(STAMP)  ## resolve the locks again
	$(UV_COMPILE) requirements/cpu.in --overrides requirements/cpu-overrides.txt --no-emit-package torch --no-emit-package fbgemm-gpu -o $(LOCK)
	$(subst "make lock","make lock (CUDA: resolved, not run by the tests)",$(UV_COMPILE)) requirements/gpu.in --overrides requirements/gpu-overrides.txt -o requirements/gpu.lock
	$(BIN)/uv pip compile -q --generate-hashes requirements/serve.in --universal --python-version 3.11 --custom-compile-command "make lock" -o requirements/serve.lock

clean:  ## remove the environments and the files of the tools
	rm -rf $(VENV) $(GPU_VENV) dist build docs/_build docs/generated .mypy_cache .ruff_cache .pytest_cache .hypothesis
