# make train: the quickstart; make test: the whole suite; make lint: format, lint and types.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A fresh run folder each time: an existing run is never overwritten.
RUN_DIR ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: train test lint clean

train: $(VENV)/installed
	$(BIN)/python train.py --config configs/quickstart.yaml --run_dir $(RUN_DIR)

test: $(VENV)/installed-dev
	# Two files at a time, each on a process of its own: most of a test is compiling.
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@
