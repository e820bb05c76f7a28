# Every target sets up what it needs: `make sweep` and `make test` work in a fresh clone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install sweep test lint format bench docs clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' \
	  || { echo "Paceline needs Python 3.11 or 3.12, $(PYTHON) is `$(PYTHON) --version`: make PYTHON=python3.12 ..."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv \
	  || { rm -rf .venv; echo "no virtual environment could be made: apt-get install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples,test]'
	@touch $@

sweep: install
	$(BIN)/python -m tune examples/digits/sweep.yaml

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[peers]'
	$(BIN)/python -m benchmarks.loop

docs: install
	$(BIN)/python docs/make.py > docs/config.md

clean:
	rm -rf .venv build dist *.egg-info
