# `make box` and `make test` need nothing but Debian with Python 3.12 or 3.11: they set themselves up.
VENV ?= .venv
PY = $(VENV)/bin/python
JOBS ?= 2               # test files at once
# Files in the order that tests/conftest.py gives them.
TESTS = $(PY) -m pytest -n $(strip $(JOBS)) --dist loadfile --no-loadscope-reorder
.PHONY: help setup box study study-hard sweep-failed box-real test unit test-long torch test-octave sglang-env test-sglang harness-env test-harness test-hub lint fuzz drills clean peers bench-step drill-resume

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup:           ## Redis, virtual environment, pinned packages (repeating it takes no time)
	@VENV=$(VENV) launch/setup.sh

box: setup       ## the whole job on two cores: SFT, three RL stages, evaluation, export
	VENV=$(VENV) launch/box.sh

study: setup     ## what RoC does, beside five other arms: 5 seeds, figure and table with intervals
	VENV=$(VENV) launch/study.sh

study-hard: setup  ## the same on a harder task, with a model of two million parameters
	VENV=$(VENV) TASK=study_hard MODEL=box_2m launch/study.sh runs/study_hard

# A budget that cuts off some rollouts: without any there is nothing to filter.
sweep-failed: setup  ## the two attempts that the paper found to fail, beside RoC: overlong filtering, n-gram scoring
	VENV=$(VENV) ARMS="plain overlong_filtering ngram_repetition" BASELINE=plain SEEDS="0 1" STEPS=60 PROBLEMS=128 \
		FLAGS="--gin_bindings=Rollout.max_response_tokens=68" launch/study.sh runs/sweep_failed

# Its environment is its own, on Python 3.11 where there is one: torch's CPU build, for the check of the export, is for 3.11.
box-real:        ## the same job on real weights and real problems
	@VENV=$(VENV)-real PYTHON=$$(launch/find_python.sh python3.11) launch/setup.sh real
	VENV=$(VENV)-real launch/box_real.sh

test: setup      ## everything that needs no torch
	$(TESTS) -m "not torch and not sglang and not harness and not long"

unit: setup      ## the quick part of it
	$(TESTS) -q -m "not torch and not sglang and not harness and not long and not slow and not e2e"

test-long: setup ## what takes minutes: plans of the paper's models and of every part of its recipe
	$(PY) -m pytest -m long

torch: setup     ## live parity with transformers (Python 3.11: installs the CPU build of torch)
	$(PY) -m pip install -qq -c constraints-3.11.txt torch transformers
	$(PY) -m pytest -m torch

test-octave: setup ## the Octave tool with a real GNU Octave (apt-get installs it: some 100 MB)
	@launch/setup.sh octave
	$(PY) -m pytest -q tests/sandbox/test_octave.py

sglang-env:      ## an environment with a real SGLang server for the CPU (Python 3.11, 2.6 GB)
	@launch/sglang_env.sh

test-sglang: setup sglang-env ## the contract, the weight loader and a training step against that server
	$(PY) -m pytest -m sglang -o faulthandler_timeout=1800

harness-env:     ## an environment with sgl-eval and OpenAI's client (0.6 GB)
	@launch/harness_env.sh

test-harness: setup harness-env ## both of them against the endpoint, which a small model of its own answers
	$(PY) -m pytest -m harness -o faulthandler_timeout=1800

test-hub: setup  ## sets of problems and conversations through the datasets library, which it installs
	$(PY) -m pip install -qq datasets
	$(PY) -m pytest -q tests/data/test_catalog.py tests/data/test_talks.py

lint: setup      ## ruff, import rule, pyright
	$(PY) -m pytest -q tests/house

fuzz: setup      ## a million random and mutated inputs through everything that reads what others wrote
	PYTHONPATH=.:sandbox $(PY) tests/sandbox/fuzz.py 1000000

drills: setup    ## twenty kills and stops of engine processes in the middle of their rollouts
	PYTHONPATH=.:sandbox JAX_PLATFORMS=cpu $(PY) tests/e2e/drills.py 20

peers: setup     ## environments of tunix and of torch + transformers, for the benchmarks
	@PEERS=$(VENV)-peers benchmarks/peers.sh

bench-step: peers  ## a GRPO step beside tunix and Hugging Face
	$(PY) benchmarks/train_step.py --peers $(VENV)-peers

drill-resume: setup  ## a run that is killed 30 times, compared bit for bit with one that was not
	$(PY) benchmarks/resume_drill.py

clean:           ## what the targets above made, runs/ excepted
	rm -rf $(VENV) .venv-sglang .venv-harness build dist *.egg-info sandbox/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
