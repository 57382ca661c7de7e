# make demo | test | lint | clean. The first run creates .venv with any python3 >= 3.10; later runs start at once.
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(BIN)/python examples/lineage.py $(ARGS)

# one thread per worker: several test processes that each take all cores only slow one another down
test: lint
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache lineage_results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: once it is there, nothing that asks for plain `torch` brings another build
$(INSTALLED): setup.py constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make needs Python 3.10 or newer, and found no '$(PYTHON)'; set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "make needs Python 3.10 or newer, $(PYTHON) is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3")'
	@echo "installing into $(VENV) (first run only, a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,demo]"
	@touch $@
