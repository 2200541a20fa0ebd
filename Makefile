# Each target does its own set-up in .venv, from nothing. PYTHON=... chooses the interpreter.
#
#   make demo          a real model, its keys and values on two workers
#   make test          all tests but those of the other targets; ARGS="-k name" is handed to pytest,
#                      TEST_PROCESSES=8 has as many processes share them, 0 only its own (--pdb)
#   make test-processes  commands, Ray, a browser, Prometheus: the service as its own processes
#   make test-matrix   every model family and decoding strategy
#   make test-oldest   the caches of decoders with the oldest transformers that is supported
#   make chaos         kill, freeze and cut off real processes; prints a table of what it cost
#   make simulate      2,000 seeds of a simulated service; ARGS="--seed N" replays one
#   make soak          open and close 20,000 sessions, and look for leaks
#   make gpu-check     on a machine with a GPU: kernels, a worker, bandwidth, the demo
#   make fuzz          random bytes at every door, for ten minutes; FUZZ_SECONDS=60 for one
#   make bench         what the service costs, as ratios to local attention
#   make check-deploy  chart, image file, compose file: schemas, policies, and run for real
#   make check-image   the container image, built and run without an engine; needs root, and long
#   make check         format, lint, types, protocol, generated code
#   make format        rewrite what `check` would complain about, as far as tools can
#   make proto         regenerate kvservice/v1 from proto/
#   make clean         drop environments, caches and builds

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
ARGS ?=
TEST_PROCESSES ?= 2
FUZZ_SECONDS ?= 600

.PHONY: help
help:
	@sed -n 's/^#   //p' Makefile

.PHONY: setup
setup:
	@.ci/setup dev

.PHONY: setup-proto
setup-proto:
	@.ci/setup proto

.PHONY: demo
demo: setup
	@$(BIN)/kvservice demo $(ARGS)

.PHONY: test
test: setup setup-proto
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile \
	  -m "not processes and not matrix and not chaos and not soak and not deploy" $(ARGS)

.PHONY: test-processes
test-processes: setup
	$(BIN)/python -m pytest -m processes $(ARGS)

.PHONY: test-matrix
test-matrix: setup
	$(BIN)/python -m pytest -m matrix $(ARGS)

# The package alone, in a folder that is looked at before the environment's own.
.PHONY: test-oldest
test-oldest: setup
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade \
	  --target .venv-oldest 'transformers==5.20.*'
	PYTHONPATH=.venv-oldest $(BIN)/python -m pytest tests/e2e tests/unit/test_hf_mask.py \
	  tests/unit/test_hf_compat.py -m "not matrix" $(ARGS)

.PHONY: chaos
chaos: setup
	KVSERVICE_CHAOS_RESULTS=tests/chaos/RESULTS.md \
	  $(BIN)/python -m pytest tests/chaos -m "not soak" $(ARGS)

.PHONY: simulate
simulate: setup
	$(BIN)/python -m tests.simulation $(ARGS)

.PHONY: soak
soak: setup
	$(BIN)/python -m pytest tests/chaos -m soak -s $(ARGS)

.PHONY: gpu-check
gpu-check: setup
	@.ci/gpu_check

.PHONY: fuzz
fuzz: setup
	@end=$$((SECONDS + $(FUZZ_SECONDS))); while ((SECONDS < end)); do \
	  HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q -m fuzz --timeout 600 $(ARGS); \
	done

.PHONY: bench
bench: setup
	$(BIN)/python -m bench $(ARGS)

.PHONY: check
check: setup setup-proto
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python .ci/proto.py lint
	.venv-proto/bin/python .ci/proto.py compare

.PHONY: setup-deploy
setup-deploy:
	@.ci/setup deploy

.PHONY: check-deploy
check-deploy: setup setup-deploy
	$(BIN)/python -m pytest -m "deploy and not image" $(ARGS)

.PHONY: check-image
check-image: setup setup-deploy
	$(BIN)/python -m pytest -m image -s $(ARGS)

.PHONY: format
format: setup
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

.PHONY: proto
proto: setup-proto
	.venv-proto/bin/python .ci/proto.py generate

.PHONY: clean
clean:
	rm -rf .venv .venv-proto .venv-deploy .venv-oldest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
