# make help lists the targets. Everything is set up on first use; the second call finds it done.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help run test gate simulate check clean

# Exported, so that the shell and not make takes care of quotes in it.
export PROMPT ?= Explain in two sentences why the sky is blue.
# One thread a process: two test processes on two cores are faster than two that share them.
TEST_PROCESSES ?= 2
TESTS ?=

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12
	@echo
	@echo 'PYTHON=python3.12           the interpreter for .venv (3.11 to 3.13)'
	@echo 'LAYLINE_TORCH_INDEX=URL     a package index to take torch from, such as one of CPU builds'
	@echo 'PROMPT="..."                what make run asks'
	@echo 'TESTS="tests/unit/cli -x"   arguments for pytest in make test'

# What make run re-creates at its end; layline gate --canary list has all.
CANARIES := slot_overwrite early_read lost_overlap neutered_counter

run: ## answer one question over two pipeline stages, and prove them on a small model
	@tools/setup_venv.sh run
	@.venv/bin/layline pull
	@.venv/bin/layline generate --pp-stages 2 --chat --stats "$$PROMPT"
	@echo
	@.venv/bin/layline gate config:tools/four_layers --pp-stages 2
	@.venv/bin/layline gate config:tools/four_layers --pp-stages 2 $(CANARIES:%=--canary %)

gate: ## prove every loop of the default model over its stages, and see every canary red
	@tools/setup_venv.sh run
	@.venv/bin/layline pull
	@.venv/bin/layline gate --pp-stages 2
	@.venv/bin/layline gate --pp-stages 2 --canary all

test: ## set up, fetch the default model and run the tests
	@tools/setup_venv.sh dev
	@.venv/bin/layline pull
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(TEST_PROCESSES) $(TESTS)

simulate: ## simulate every planned boundary path that make test has no time for (minutes)
	@tools/setup_venv.sh dev
	@.venv/bin/python tools/simulate.py

check: ## formatting, lint and types
	@tools/setup_venv.sh dev
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy

clean: ## remove the environment and everything built
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis build dist
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
