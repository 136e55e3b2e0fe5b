# make demo    run the demo model: sets everything up first
# make test    lint, types and the whole suite: sets everything up first
# make check   lint and types only
# make bench   speed against llama.cpp on this machine (minutes)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test check format bench clean

demo: $(VENV)/.run
	$(BIN)/headrace run --echo -n 96 --temp 0 -p "$$(printf 'def read_lines(path):\n    """Read a line')"

test: $(VENV)/.test $(VENV)/triton-3.6.0 check
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.test
	$(BIN)/python bench/against_llamacpp.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "headrace needs Python 3.11 to 3.13: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $@ $(VENV)/.run

# the oldest Triton that must work, beside the installed one; there are builds for Linux only
$(VENV)/triton-3.6.0: | $(VENV)/bin/python
	[ "$$(uname -s)" != Linux ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.6.0

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
