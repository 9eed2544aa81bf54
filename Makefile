# make demo: set up and run the main job.  make test: set up and run every check.
# make results: write README, docs/results.md and the presets' receipts from results/.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: setup demo test lint results clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "oqc needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: $(READY)
	$(VENV)/bin/oqc demo

test: $(READY) lint
	$(VENV)/bin/python -m pytest -n auto -m 'not gpu'

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

results: $(READY)
	$(VENV)/bin/python docs/generate.py

clean:
	rm -rf $(VENV) build dist runs
