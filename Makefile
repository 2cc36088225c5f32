# On a fresh machine `make demo` or `make test` alone creates .venv, installs and runs.
# PYTHON=python3.12 make test: another interpreter for the environment.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := models/smollm2-135m-instruct

# Which extras are installed is kept in stamp files, so that pip, and with it the network, is used
# only when pyproject.toml changed.
RUN_STAMP  := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test

.PHONY: help demo test model lint format clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make demo    generate with a real small model, on a question about a long text"
	@echo "make test    check style and types, run the tests"
	@echo "make model   fetch and convert the demo's model into $(MODEL)"
	@echo "make lint    style and types only"
	@echo "make format  rewrite the sources in the project's style"
	@echo "make clean   remove the environment and caches (models/ stays)"

demo: model
	$(BIN)/triforce-generate --config=configs/smollm2_cpu.py

model: $(RUN_STAMP)
	$(BIN)/python tools/fetch_model.py smollm2

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(TEST_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(TEST_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ $(RUN_STAMP)
