# Everything sets up what it needs: `make demo` and `make test` are all a fresh machine wants.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
RUN := $(VENV)/bin
UV := $(RUN)/uv

VERL := .venv-verl
VERL_READY := $(VERL)/.ready

DOCS := .venv-docs
DOCS_READY := $(DOCS)/.ready

CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.ready
TRL := .venv-trl
TRL_READY := $(TRL)/.ready

.PHONY: demo test quick test-loaded test-slow test-all chaos train train-service train-smoke learn-gpu bench results lint format audit setup engine \
  verl trl clients docs constraints clean

# The engine of `make demo` and `make engine`: sglang or vllm.
ENGINE ?= sglang

demo: engine  ## 64 real rollouts of a real agent on this machine; `ENGINE=vllm` with vLLM
	$(RUN)/rollout demo --engine $(ENGINE)

# `make test ROOM=model/gateway` runs the tests of one folder of tests/, `ROOM=model/rendering/families` those of a folder in it.
ROOM ?=
IN_VERL := $(filter verl verl/%,$(ROOM))
# Files are spread over processes by ByFile in tests/conftest.py.
SPREAD := --dist loadscope --no-loadscope-reorder
# Property tests draw the same examples in each run, except with --hypothesis-profile=explore.
FIXED := --hypothesis-profile=fixed
EXPLORE := --hypothesis-profile=explore
# Tests start hundreds of Python processes, which would compile this package each time.
unexport PYTHONDONTWRITEBYTECODE

# dev's agent frameworks hold the SDKs back; users install the newest.
SDK_TESTS := $(addprefix tests/,model/dialects/test_fields.py model/dialects/test_sdk_clients.py model/dialects/test_through_the_gateway.py \
  agent_wrapper/test_app.py agent_wrapper/test_outcome.py model/gateway/test_server.py \
  model/gateway/test_retries.py workbench/local/test_pytest_plugin.py model/relay/test_gateway.py)
MAIN_TESTS := $(RUN)/pytest $(FIXED)
CLIENTS_TESTS := $(CLIENTS)/bin/pytest $(SDK_TESTS) $(FIXED) --numprocesses 2 $(SPREAD) -m "not slow or engine" \
  -o cache_dir=$(CLIENTS)/.pytest_cache
VERL_TESTS := $(VERL)/bin/pytest tests/verl --numprocesses 0 $(FIXED) -o cache_dir=$(VERL)/.pytest_cache
# Both environments' tests of one kind, at the same time: $(call both,MARKER,PROCESSES,FIRST). FIRST are more tests, which
# run before those of the main environment. Many quick tests wait, so four processes keep two cores busy. Each more costs
# 15 s of CPU: it collects all tests, and starts servers of its own.
define both
@echo "the tests of tests/verl run meanwhile, and print their output last"
@$(VERL_TESTS) -m "$(1)" --durations 10 > $(VERL)/tests.log 2>&1 & verl=$$!; trap "kill $$verl" INT TERM; \
first=0; $(if $(3),$(3) || first=$$?;) \
$(MAIN_TESTS) --numprocesses $(2) $(SPREAD) -m "$(1)" --durations 20; main=$$?; \
wait $$verl; verl=$$?; cat $(VERL)/tests.log; exit $$((first | main | verl))
endef

ifeq ($(ROOM),)
# mypy keeps one core busy, and many of the tests wait.
test:  ## lint, types and the quick tests, each invariant at least once; `ROOM=model/gateway` runs one folder
	@$(MAKE) --jobs=2 lint quick
else
test: setup $(if $(IN_VERL),verl)
	$(if $(IN_VERL),$(VERL)/bin,$(RUN))/pytest tests/$(ROOM) --numprocesses 4 $(SPREAD) $(FIXED) -m "not slow and not engine" --durations 10
endif

quick: engine verl
	$(call both,not slow,4)

test-loaded: engine verl  ## the quick tests beside two busy processes per core, then on one core: load decides no test
	@for each in $$(seq $$((2 * $$(nproc)))); do timeout 3600 sh -c 'while :; do :; done' & busy="$$busy $$!"; done; \
	trap "kill $$busy" EXIT; $(MAKE) quick
	taskset --cpu-list 0 $(MAKE) quick

test-slow: engine verl clients  ## the tests that `make test` leaves out, and those of our APIs with the newest SDKs
	$(call both,slow and not release,2,$(CLIENTS_TESTS))

test-all: lint engine verl clients trl  ## every test, those on vLLM and TRL too, with property tests on new examples
	$(RUN)/rollout engine install --engine vllm
	$(RUN)/pytest --numprocesses 3 $(SPREAD) $(EXPLORE) --durations 20
	$(VERL)/bin/pytest tests/verl --numprocesses 3 $(SPREAD) $(EXPLORE) --durations 10

# `make chaos SEED=17` plays one seed, `MUTANT=list` names what can be broken on purpose.
SEEDS ?= 1000
SEED ?=
MUTANT ?=
NEW ?=
FIRST ?= 0
chaos: setup  ## simulated runs with faults of every kind, in virtual time: `SEEDS=1000` from `FIRST=0`, `NEW=1` for new ones
	$(RUN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST) $(if $(NEW),--new) $(if $(SEED),--seed $(SEED)) $(if $(MUTANT),--mutant $(MUTANT))

train: engine verl  ## verl trains a small model on sums: some 15 minutes
	$(VERL)/bin/python examples/train_arithmetic/train.py

train-service: engine  ## a training service on the CPU trains a small model on sums, through Tinker's API
	PATH="$(CURDIR)/$(RUN):$$PATH" $(RUN)/python examples/train_service/train.py

train-smoke: engine verl  ## two steps of a tiny model, on both of verl's trainers and in a plain loop
	$(VERL)/bin/python examples/train_arithmetic/train.py --tiny --work runs/smoke-v1
	$(VERL)/bin/python examples/train_arithmetic/train.py --tiny --trainer legacy --work runs/smoke-legacy
	$(VERL)/bin/python examples/plain_loop/train.py --tiny

bench: engine verl  ## all benchmarks, against other projects: an hour; the tables and a picture are in runs/bench
	$(RUN)/python benchmarks/run_all.py

results: engine verl  ## docs/results.md: all experiments again but the long runs, against other projects; three hours
	rm -rf runs/results
	$(RUN)/python benchmarks/faults.py --json runs/results/faults.json
	$(RUN)/python docs/make_results.py --from runs/results/faults.json
	$(VERL)/bin/python benchmarks/many_turns.py --json runs/results/many_turns.json
	$(RUN)/python docs/make_results.py --from runs/results/many_turns.json
	$(VERL)/bin/python benchmarks/identity.py --json runs/results/identity.json
	$(RUN)/python docs/make_results.py --from runs/results/identity.json
	$(VERL)/bin/python benchmarks/learning_curves.py --json runs/results/learning.json
	$(RUN)/python docs/make_results.py --from runs/results/learning.json
	$(VERL)/bin/python benchmarks/learning_curves.py --parts --json runs/results/parts.json
	$(RUN)/python docs/make_results.py --from runs/results/parts.json
	$(VERL)/bin/python benchmarks/lost_rollouts.py --json runs/results/losses.json
	$(RUN)/python docs/make_results.py --from runs/results/losses.json

# On a GPU machine with verl's environment: `make learn-gpu PYTHON=python3`. Stopped, it continues when it is run again.
LEARN_MINUTES ?= 40
learn-gpu:  ## train a small model on a task with a tool on one GPU, with verl's own loop and through the backend
	$(if $(wildcard $(VERL)),$(VERL)/bin/python,$(PYTHON)) benchmarks/gpu_learning.py --minutes $(LEARN_MINUTES) --json runs/results/gpu_learning.json

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

# $(call install,FOLDER,ARGUMENTS) installs with uv, which takes a tenth of pip's time. Where no process may write bytecode,
# as in many images, each of verl's processes would compile what it imports again, in eight seconds.
define install
$(UV) pip install --quiet $(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode) --python $(1)/bin/python $(2)
@touch $(1)/.ready
endef

$(UV): constraints/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	sed -n '/^uv==/,/[^\\]$$/p' constraints/dev.txt > $(VENV)/uv.txt
	$(RUN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement $(VENV)/uv.txt
	@touch $(UV)

$(READY): $(UV) pyproject.toml constraints/dev.txt
	@echo "installing in $(VENV): a minute the first time"
	$(call install,$(VENV),-c constraints/dev.txt -e '.[dev]')

engine: setup  ## SGLang, or `ENGINE=vllm`, for the CPU and a small model, in the cache folder; at once if they are there
	@$(RUN)/rollout engine install --engine $(ENGINE)

verl: $(VERL_READY)

# torch first, with pip: uv, or what asks for a range of torch, would take a build with gigabytes of GPU libraries.
$(VERL_READY): $(UV) pyproject.toml constraints/verl.txt
	@echo "installing verl in $(VERL), 2.5 GB: a minute the first time"
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(call install,$(VERL),-c constraints/verl.txt -e '.[verl-local]')

trl: $(TRL_READY)  ## TRL in a separate environment, and the tests of examples/trl_loop
	$(TRL)/bin/pytest tests/trl

$(TRL_READY): $(UV) pyproject.toml constraints/trl.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(call install,$(TRL),-c constraints/trl.txt -e '.[trl]')

clients: $(CLIENTS_READY)

$(CLIENTS_READY): $(UV) pyproject.toml constraints/clients.txt
	$(PYTHON) -m venv --without-pip $(CLIENTS)
	$(call install,$(CLIENTS),-c constraints/clients.txt -e '.[clients]')

docs: setup $(DOCS_READY)  ## the pages that are made from the code, and the site in build/site; a broken link fails
	for page in settings api cli calls clients contract_schema columns models performance results; do $(RUN)/python docs/make_$$page.py || exit; done
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html; to search the pages, serve them: python -m http.server -d build/site"

$(DOCS_READY): $(UV) constraints/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(call install,$(DOCS),-r constraints/docs.txt)

# Hashes too, so that no index can replace what was pinned. torch's own needs differ by its build.
LOCK := $(RUN)/uv pip compile --upgrade --no-annotate --no-header --quiet --generate-hashes
WITHOUT_TORCH := sed -E '/^(nvidia-|cuda-|torch==|triton==)/,/[^\\]$$/d'
constraints: setup  ## pin anew what the extras install
	for extras in "agent --group build" "relay --group build" "trainer --extra otel" clients dev; do \
	  $(LOCK) pyproject.toml --extra $$extras --python-version 3.11 --universal -o constraints/$${extras%% *}.txt; \
	done
	$(LOCK) --group docs --constraint constraints/dev.txt --python-version 3.11 --universal -o constraints/docs.txt
	$(LOCK) pyproject.toml --extra agent --group agentcore --constraint constraints/agent.txt \
	  --python-version 3.11 --universal -o constraints/agentcore.txt
	$(RUN)/python tests/support/harnesses.py
	# verl and SGLang on GPUs: see infra/trainer.Dockerfile.
	$(LOCK) pyproject.toml infra/trainer-requirements.in --extra verl --group build \
	  --override infra/trainer-overrides.txt --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
	  > infra/trainer-requirements.txt
	$(LOCK) pyproject.toml infra/trainer-vllm-requirements.in --extra verl --group build \
	  --python-version 3.12 --python-platform x86_64-manylinux_2_39 > infra/trainer-vllm-requirements.txt
	$(LOCK) pyproject.toml --extra verl-local --extra otel --python-version 3.11 | $(WITHOUT_TORCH) > constraints/verl.txt
	$(LOCK) pyproject.toml --extra trl --python-version 3.11 | $(WITHOUT_TORCH) > constraints/trl.txt

clean:
	rm -rf $(VENV) $(VERL) $(TRL) $(CLIENTS) $(DOCS) build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info runs
