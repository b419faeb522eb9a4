# Everything sets up what it needs: `make demo` and `make test` are all a fresh machine wants.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
RUN := $(VENV)/bin

.PHONY: demo test lint format setup engine docs constraints clean

demo: engine  ## 64 real rollouts of a real agent on this machine
	$(RUN)/rollout demo

test: lint engine  ## the whole suite
	$(RUN)/pytest

lint: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: setup
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

setup: $(READY)

$(READY): pyproject.toml constraints/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints/dev.txt -e '.[dev]'
	@touch $(READY)

engine: setup  ## SGLang for the CPU and a small model, in the cache folder; at once if they are there
	@$(RUN)/rollout engine install

docs: setup  ## pages that are made from the code
	$(RUN)/python docs/make_settings.py

constraints: setup  ## pin anew what the extras install
	$(RUN)/pip install --quiet uv
	for extra in agent trainer dev; do \
	  $(RUN)/uv pip compile pyproject.toml --extra $$extra --python-version 3.11 --universal --upgrade \
	    --no-annotate --no-header --quiet -o constraints/$$extra.txt; \
	done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info runs
