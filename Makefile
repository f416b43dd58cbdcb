# Needs Python 3.11 or newer and make, nothing else: `make run` and `make test` set .venv up the first time.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: run test clean

run: $(INSTALLED)
	$(BIN)/fa4gen run --config d512.yaml

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy -p fa4gen
	$(BIN)/fa4gen check
	$(BIN)/pytest -n auto

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; say which with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
