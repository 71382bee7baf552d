# `make test` and `make demo` set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup test lint typecheck demo test-gpu clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[test,lint]"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup
	$(BIN)/mypy

test: lint typecheck
	$(BIN)/python -m pytest -n 2

demo: setup
	$(BIN)/python -m benchmarks.demo

# On a machine with a GPU, with the Python that has its CUDA plugin: make test-gpu PYTHON=python3
test-gpu:
	$(PYTHON) -m pytest tests -m gpu

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
