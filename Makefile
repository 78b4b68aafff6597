PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint types imports docs unit oldest clean

# Everything is installed with pinned versions: the same tree gives the same environment.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "replayssm needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed

install: .venv/installed

demo: install
	$(BIN)/replayssm generate --speculate lookup:8 --max-new-tokens 200 --stats </dev/null

test: lint types imports docs unit oldest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

imports: install
	$(BIN)/lint-imports

docs: install
	$(BIN)/mkdocs build --strict --quiet

unit: install
	$(BIN)/pytest -n 2

# The oldest transformers that is supported, beside the pinned one.
OLDEST := 5.17.0

.venv/transformers-$(OLDEST): .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ \
		transformers==$(OLDEST) huggingface_hub==1.31.0 httpx==0.28.1 httpcore==1.0.9 h11==0.16.0

oldest: .venv/transformers-$(OLDEST)
	PYTHONPATH=$< $(BIN)/pytest -n 2 tests/integrations tests/models

clean:
	rm -rf .venv site build .pytest_cache .ruff_cache .hypothesis
