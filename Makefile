# Everything sets up what it needs: `make demo` and `make test` are all a fresh machine wants.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
RUN := $(VENV)/bin

VERL := .venv-verl
VERL_READY := $(VERL)/.ready

.PHONY: demo test test-all train train-smoke lint format audit setup engine verl docs constraints clean

demo: engine  ## 64 real rollouts of a real agent on this machine
	$(RUN)/rollout demo

# Two at once, by rooms. What fails so is run again by itself, and must pass then: load is not what is tested.
SELECT := -m "not slow"
AGAIN := --last-failed --last-failed-no-failures none
CACHE := -o cache_dir=.pytest_cache/verl

test: lint engine verl  ## half an hour on two cores; `make test-all` adds what shows the same once more
	$(RUN)/pytest $(SELECT) --numprocesses 2 --durations 30 || $(RUN)/pytest $(SELECT) $(AGAIN)
	$(VERL)/bin/pytest tests/verl $(SELECT) $(CACHE) --numprocesses 2 --no-loadscope-reorder --durations 10 || \
	  $(VERL)/bin/pytest tests/verl $(SELECT) $(CACHE) $(AGAIN)

test-all:  ## the whole suite
	$(MAKE) test SELECT=

train: engine verl  ## verl trains a small model on sums: some 15 minutes
	$(VERL)/bin/python examples/train_arithmetic/train.py

train-smoke: engine verl  ## two steps of a tiny model, on both of verl's trainers
	$(VERL)/bin/python examples/train_arithmetic/train.py --tiny --work runs/smoke-v1
	$(VERL)/bin/python examples/train_arithmetic/train.py --tiny --trainer legacy --work runs/smoke-legacy

lint: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: setup
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

audit: setup  ## known vulnerabilities among the pinned versions; fails too where they cannot be looked up
	$(RUN)/python constraints/audit.py --required

setup: $(READY)

$(READY): pyproject.toml constraints/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints/dev.txt -e '.[dev]'
	@touch $(READY)

engine: setup  ## SGLang for the CPU and a small model, in the cache folder; at once if they are there
	@$(RUN)/rollout engine install

verl: $(VERL_READY)

# torch first: what asks for a range of it would take its newest build, with gigabytes of GPU libraries.
$(VERL_READY): pyproject.toml constraints/verl.txt
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VERL)/bin/pip install --quiet --disable-pip-version-check -c constraints/verl.txt -e '.[verl-local]'
	@touch $(VERL_READY)

docs: setup  ## pages that are made from the code
	$(RUN)/python docs/make_settings.py

constraints: setup  ## pin anew what the extras install
	$(RUN)/pip install --quiet uv
	for extra in agent trainer dev; do \
	  $(RUN)/uv pip compile pyproject.toml --extra $$extra --python-version 3.11 --universal --upgrade \
	    --no-annotate --no-header --quiet -o constraints/$$extra.txt; \
	done
	# Without torch's own needs, which differ by its build.
	$(RUN)/uv pip compile pyproject.toml --extra verl-local --python-version 3.11 --upgrade \
	  --no-annotate --no-header --quiet | grep -Ev '^(nvidia|cuda)-|^(torch|triton)==' > constraints/verl.txt

clean:
	rm -rf $(VENV) $(VERL) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info runs
