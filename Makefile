SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
# More threads than free cores make vLLM and torch many times slower.
export OMP_NUM_THREADS ?= 1
# Examples and tests run on the CPU, for which a machine with a GPU needs the CPU build of vLLM too.
run test test-all bench doctor chaos chaos-matrix: export REPERTORY_DEVICE ?= cpu
gpu-check: export REPERTORY_DEVICE ?= cuda
# What works with either keeps the one that is installed: changing it takes minutes.
lint format type docs: export REPERTORY_DEVICE ?= $(shell cat .venv/device 2>/dev/null)

.PHONY: help install run test test-all lint format type bench doctor gpu-check chaos chaos-matrix docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install:  ## make or update both environments (REPERTORY_DEVICE=cpu|cuda, PYTHON=…)
	@deployments/install.sh

run: install  ## train the two policies of examples/quickstart and print the result
	@.venv/bin/repertory up examples/quickstart/config.yaml

test: install  ## all tests but those that take minutes
	@$(PY) -m pytest -m "not slow and not gpu"

test-all: install  ## every test a machine without a GPU can run
	@$(PY) -m pytest -m "not gpu"

lint: install  ## ruff: rules and format
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .

format: install  ## apply what `lint` wants
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

type: install  ## pyright
	@.venv/bin/pyright

bench: install  ## every benchmark, one after the other
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(PY) "$$script"; done

doctor: install  ## what this machine lacks for the quickstart
	@.venv/bin/repertory doctor examples/quickstart/config.yaml

gpu-check: install  ## one NVIDIA GPU: CUDA vLLM, swap, exactness, a training step (8 minutes at most), gpu tests
	@$(PY) deployments/gpu_check.py
	@$(PY) -m pytest -m gpu -k "not cuda_build"

chaos: install  ## kill, stop and break what runs, by seed, and check the books (an hour)
	@$(PY) -m tests.chaos.driver --seeds 1 2 3 4 5 --faults 8 --steps 20 --stop-s 60

chaos-matrix: install  ## every process × kill -9, SIGTERM, 60 s of SIGSTOP: what is missing of it (an hour)
	@$(PY) -m tests.chaos.matrix --run

docs: install  ## write the pages that are made from the code
	@$(PY) docs/generate.py

clean:  ## remove the environments and caches; runs stay
	rm -rf .venv .venv-vllm .repertory/install.lock .ruff_cache .pytest_cache .hypothesis
