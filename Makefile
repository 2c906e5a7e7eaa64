# Every target does its own set-up: a Python 3.12, 3.13 or 3.11 with pip and the venv module is all that has to be there.
# uv is used where it is installed, pip otherwise; both install the same pinned versions.

# PYTHON=python3.13 names the Python of all environments. Otherwise it is asked once, when an environment is made.
python = $(eval python := $(or $(PYTHON),$(shell requirements/find_python '$(patsubst torch==%,%,$(TORCH))' '$(TORCH_INDEX)'),$(error no Python)))$(python)
VENV := .venv
DOCS_VENV := .venv-docs
AGENTS_VENV := .venv-agents
MUTANTS_VENV := .venv-mutants
NEWEST_VENV := .venv-newest
TE_VENV := .venv-te
NEWEST := megatron-core ray transformers
# What meets upstream's names and files first: patches and stand-ins, options, layouts, loaders, training.
NEWEST_TESTS ?= tests/house/test_patches.py tests/device tests/scenarios/device tests/config tests/weights tests/train tests/rollout tests/data
BIN := $(VENV)/bin
UV ?= $(shell command -v uv 2>/dev/null)
MAKE_VENV = $(if $(UV),$(UV) venv -q --clear --seed --python $(python),$(python) -m venv)
# $(call install,<folder of the environment>) <arguments of pip install>
install = $(if $(UV),$(UV) pip install -q --python $(1)/bin/python,$(1)/bin/python -m pip --disable-pip-version-check -qq install)
INSTALL = $(call install,$(VENV))
TORCH := $(shell sed -n 's/^torch==/&/p' requirements/cpu.txt)
# These declare Python 3.12 and run on 3.11 as well.
MEGATRON := $(shell sed -n 's/^megatron-core==/&/p; s/^emerging-optimizers==/&/p' requirements/cpu.txt)
BUILDERS := $(shell sed -n 's/^setuptools==/&/p' requirements/cpu.txt) $(shell sed -n 's/^pybind11==/&/p' requirements/dev.txt)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
SEED ?= 0
MINUTES ?= 60
# Three keep two cores busy, as tests wait for processes, and four are slower. The tests of a file stay together, as they
# share sessions and engines.
TEST_WORKERS ?= 3
ONE_PROCESS := not gloo and not e2e and not gpu and not slow
# Fewer random examples a test; the nightly lane draws all.
QUICK := --hypothesis-profile=quick
RUN ?= runs/quickstart$(if $(LORA),_lora)_seed$(SEED)

# Two small matrix products at once gain nothing from threads that fight for the cores of the ranks beside them.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help venv lint check changed-tests test test-all quickstart gpu-check warm-start gpu-lock te-wheel docs agents-venv bench clean layers patches options-doc published-steps console-picture view-picture versions mutants-venv mutants newest

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(VENV)/.installed ## .venv with pinned versions, for a machine without CUDA

# torch goes first and alone, from the index of CPU builds where that can be reached: what asks for a plain torch later
# then finds it instead of gigabytes of CUDA. megatron-core and its optimizers declare Python 3.12, and run on 3.11.
$(VENV)/.installed: pyproject.toml requirements/cpu.txt requirements/dev.txt
	@$(python) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13) and "the pinned wheels exist for Python 3.11, 3.12 and 3.13, $(python) is %d.%d: make PYTHON=<one of them>" % v)'
	@echo "installing into $(VENV) with $(if $(UV),uv,pip) (1 to 4 minutes)"
	@$(MAKE_VENV) $(VENV)
	@$(INSTALL) --no-deps --index-url $(TORCH_INDEX) $(if $(UV),,--retries 0) '$(TORCH)' 2>/dev/null || $(INSTALL) --no-deps '$(TORCH)'
	@$(INSTALL) --no-deps $(BUILDERS:%='%')
	@grep -v '^megatron-core==\|^emerging-optimizers==' requirements/cpu.txt > $(VENV)/others.txt
	@$(INSTALL) --no-deps --no-build-isolation -r $(VENV)/others.txt -r requirements/dev.txt
	@$(BIN)/python -m pip --disable-pip-version-check -qq install --no-deps --no-build-isolation --ignore-requires-python $(MEGATRON:%='%')
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# The compiler of GPU kernels, for their tests, in the version that a GPU node installs. Nothing else may import it: on a
# CPU SGLang runs with a stand-in of that name.
$(VENV)/triton: $(VENV)/.installed requirements/gpu.txt
	@rm -rf $@.new
	@$(INSTALL) --no-deps --target $@.new '$(shell grep '^triton==' requirements/gpu.txt)'
	@rm -rf $@ && mv $@.new $@

lint: venv ## ruff, pyright, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

# Three lanes of tests (tests/README.md). Their tests start some hundred processes; each would compile this package's modules
# anew without bytecode on disk.
changed-tests test test-all: export PYTHONDONTWRITEBYTECODE =
# A process of tests that crashes ends the run by name; with one in its place, pytest-xdist 3.8 waits for ever at the end.
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

check: venv ## before a commit: lint, and the tests of one process in the rooms that differ from main
	@$(MAKE) -j 2 --output-sync=target lint changed-tests

changed-tests: venv
	rooms=$$($(BIN)/python -m tests.support.changed_rooms) && $(BIN)/python -m pytest -q -m "$(ONE_PROCESS)" $(QUICK) $$rooms

test: lint agents-venv mutants-venv $(VENV)/triton ## what CI runs for a change: lint, then all tests but those that need a GPU or a night
	$(PYTEST) -m "not gpu and not slow" $(QUICK)

test-all: lint agents-venv mutants-venv $(VENV)/triton ## each night, some hours: lint, then all tests but those that need a GPU
	$(PYTEST) -m "not gpu"

quickstart: venv ## train a small mixture-of-experts model with GRPO and show its reward rise; LORA=1 trains low-rank factors
	$(BIN)/mcore-rl data arithmetic --out data/arithmetic
	$(BIN)/mcore-rl sft recipe=tiny_moe_grpo model.init=random run.seed=$(SEED) run.dir=$(RUN)/warm_start
ifdef LORA
	$(BIN)/mcore-rl train recipe=tiny_moe_lora model.path=$(RUN)/warm_start/hf run.seed=$(SEED) run.dir=$(RUN)
else
	$(BIN)/mcore-rl train recipe=tiny_moe_grpo model.path=$(RUN)/warm_start/hf run.seed=$(SEED) run.dir=$(RUN)
endif

gpu-check: ## what a run needs from this machine's GPU, checked without a network: STAGES=sync,probes or CHECKS=te:speed
	$(or $(wildcard $(BIN)/python),$(PYTHON),python3) -m mcore_rl.tools.doctor --gpu $(if $(STAGES),--stages $(STAGES)) $(if $(CHECKS),--checks '$(CHECKS)')

warm-start: venv ## data/warm_start: a small model that learns within 40 steps, made here for gpu-check elsewhere
	$(BIN)/python -m mcore_rl.tools.doctor.warm_start

patches: venv ## docs/patches.md: every name of other packages that is replaced
	$(BIN)/python -m mcore_rl.device.replaced.document > docs/patches.md

options-doc: venv ## docs/options.md: every option of a recipe, with its bounds, default and meaning
	$(BIN)/mcore-rl options --markdown > docs/options.md

console-picture: venv ## docs/console.svg: what a terminal shows in the quickstart, of a run that is stopped for it
	rm -rf runs/console
	$(BIN)/mcore-rl data arithmetic --out data/arithmetic
	$(BIN)/mcore-rl sft recipe=tiny_moe_grpo model.init=random run.seed=$(SEED) run.dir=runs/console/warm_start
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.support.console_picture "   41  0." docs/console.svg \
	  mcore-rl train recipe=tiny_moe_grpo model.path=runs/console/warm_start/hf run.seed=$(SEED) run.dir=runs/console/run

view-picture: venv ## docs/view.png, docs/view_curves.png: the page of a run, RUN=runs/quickstart_seed0, in Chromium
	$(BIN)/python -m tests.support.view_picture $(RUN) docs

versions: venv ## docs/versions.md: what is pinned, the newest that the package index knows, and what binds it
	$(BIN)/python -m tests.support.versions_page

layers: venv ## the picture of layers in docs/, from pyproject.toml
	$(BIN)/python -m tests.support.layers

published-steps: venv ## the table of published and simulated step times in docs/simulate.md
	$(BIN)/python benchmarks/published_steps.py --write

# uv keeps the versions of the file that it finds, as long as they lie in the ranges of pyproject.toml.
gpu-lock: venv ## requirements/gpu.txt: every version that a GPU node installs; UPGRADE=1 takes the newest in the ranges
	@cp requirements/gpu.txt requirements/gpu.txt.new
	$(BIN)/uv pip compile -q pyproject.toml --extra gpu --extra tracking --python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-header --no-annotate $(if $(UPGRADE),--upgrade) -o requirements/gpu.txt.new > /dev/null
	@(sed -n '/^#/p' requirements/gpu.txt; sed '/^#/d' requirements/gpu.txt.new) > requirements/gpu.txt.made
	@mv requirements/gpu.txt.made requirements/gpu.txt && rm requirements/gpu.txt.new

# GPU nodes and the image have Python 3.12. The environment takes 6 GiB, and each compiler 1.5 GiB of memory.
te-wheel: ## dist/: Transformer Engine's PyTorch half, which has no wheel elsewhere, for torch of requirements/gpu.txt; MAX_JOBS=2
	@$(or $(PYTHON),python3.12) -m venv $(TE_VENV)
	MAX_JOBS=$(or $(MAX_JOBS),2) requirements/te_wheel $(TE_VENV)/bin/python dist

# The locked environment with the newest of the packages that are pinned exactly. SGLang comes without its requirements,
# which name CUDA wheels; of the others, only what they need is upgraded.
newest: ## the newest sglang, megatron-core, ray and transformers in .venv-newest, and the tests that fail with them
	@$(MAKE) venv VENV=$(NEWEST_VENV)
	$(NEWEST_VENV)/bin/uv pip install -q --python $(NEWEST_VENV)/bin/python $(foreach name,$(NEWEST),--upgrade-package $(name)) $(NEWEST)
	$(NEWEST_VENV)/bin/uv pip install -q --python $(NEWEST_VENV)/bin/python --no-deps --upgrade sglang
	@$(NEWEST_VENV)/bin/uv pip list --python $(NEWEST_VENV)/bin/python | grep -iE '^(sglang|megatron-core|ray|transformers|tokenizers|huggingface-hub|torch) '
	$(NEWEST_VENV)/bin/python -m pytest -q -m "not gpu and not slow and not e2e" -rfE --tb=line $(NEWEST_TESTS)

docs: $(DOCS_VENV)/.installed ## the documentation site with an API reference, into site/; fails on a dead link
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build -q

$(DOCS_VENV)/.installed: requirements/docs.txt
	@$(MAKE_VENV) $(DOCS_VENV)
	@$(call install,$(DOCS_VENV)) --no-deps -r requirements/docs.txt
	@touch $@

agents-venv: $(AGENTS_VENV)/.installed ## .venv-agents with the packages that environments of episodes come from, for the tests of their adapters

# verl lies apart: importing it needs torch and ray, so its tests run under .venv with this folder beside it.
$(AGENTS_VENV)/.installed: requirements/agents.txt requirements/verl.txt
	@echo "installing into $(AGENTS_VENV) (about a minute)"
	@rm -rf $(AGENTS_VENV)
	@$(MAKE_VENV) $(AGENTS_VENV)
	@$(call install,$(AGENTS_VENV)) --no-deps -r requirements/agents.txt
	@$(call install,$(AGENTS_VENV)) --no-deps --target $(AGENTS_VENV)/verl -r requirements/verl.txt
	@touch $@

mutants-venv: $(MUTANTS_VENV)/.installed ## .venv-mutants with cosmic-ray, for the next target and its test

$(MUTANTS_VENV)/.installed: $(VENV)/.installed requirements/mutants.txt
	@rm -rf $(MUTANTS_VENV)
	@$(INSTALL) --no-deps --target $(MUTANTS_VENV) -r requirements/mutants.txt
	@touch $@

mutants: venv mutants-venv ## plant small faults and list those that no test notices: MINUTES=60, goes on where it stopped
	$(BIN)/python benchmarks/mutants.py --minutes $(MINUTES)

bench: venv ## tokens per second of a GRPO step, beside TRL's
	$(BIN)/python benchmarks/grpo_step.py

clean: ## remove what make and the runs made, .venv included
	rm -rf $(VENV) $(DOCS_VENV) $(AGENTS_VENV) $(MUTANTS_VENV) .mutants $(NEWEST_VENV) $(TE_VENV) site benchmarks/.trl runs data .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
