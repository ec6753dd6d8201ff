# Every target sets up what it needs in .venv and skips what is already there.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PINS := -c constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS)
# What torch, triton or Python may break.
VERSION_TESTS := tests/flash_versions/dispatch tests/flash_versions/integrations \
	tests/flash_versions/versions tests/flash_versions/tools/test_inspect.py tests/compile \
	tests/simulator/language tests/simulator/rules tests/documents/notebooks/test_lessons.py \
	tests/transformer/kernels/test_gemv.py
WORKERS := -q -n auto --maxprocesses 8 --dist loadgroup

.PHONY: help generate chat puzzles test test-all test-wide test-gpu test-versions test-trl test-trainers fuzz mutants lint bench plot lab notebooks docs kernels-hub clean

help: ## say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or later is needed; name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing flash-versions into $(VENV); torch and triton take a minute or more, once."
	@$(PIP) -e .
	@touch $@

# With an extra of pyproject.toml: .ready-docs installs flash-versions[docs].
$(VENV)/.ready-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing flash-versions[$*] into $(VENV); torch and triton take a minute or more, once."
	@$(PIP) -e ".[$*]"
	@touch $@

generate: $(VENV)/.ready-transformer ## a small language model answers a question through our attention kernels
	@echo "Asking the shipped model a question: python -m transformer.generate"
	@$(BIN)/python -m transformer.generate
	@echo "Next: make lab explains these kernels, make puzzles lets you write them, make chat talks on."

chat: $(VENV)/.ready-transformer ## talk to it
	@$(BIN)/python -m transformer.generate --chat

puzzles: $(VENV)/.ready ## kernels to write, from a masked copy to a small FlashAttention 3
	@$(BIN)/python -m flash_versions.puzzles

test: $(VENV)/.ready-test ## every version and feature once, kernels simulated and compiled: no GPU, 3 to 8 minutes
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(WORKERS) -m "not (slow or wide)" $(ARGS)

test-all: $(VENV)/.ready-test ## everything that needs no GPU
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(WORKERS) -m "not wide" $(ARGS)

test-wide: $(VENV)/.ready-test ## what repeats for more dtypes and sizes what `make test-all` shows
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(WORKERS) -m wide

test-gpu: $(VENV)/.ready-test ## the same equivalence cases and more on an NVIDIA GPU: ARGS="--failures=FILE"
	$(BIN)/python -m pytest -q -n auto --dist loadgroup -m gpu $(ARGS)

# In an environment of their own, of several GB, which pip's cache need not hold again. A limit on
# torch in pip's settings does not count: what is asked for here may be newer.
test-versions: OTHER = .venv-torch-$(TORCH)-$(TRITON)
test-versions: ## kernels and operators with other versions: make test-versions TORCH=2.10.0 TRITON=3.6.0 PYTHON=python3.11
	@test -n "$(TORCH)" -a -n "$(TRITON)" || { \
		echo "Say which: make test-versions TORCH=2.10.0 TRITON=3.6.0"; exit 1; }
	@PIP_CONSTRAINT=/dev/null PIP_NO_CACHE_DIR=1 $(MAKE) --no-print-directory VENV=$(OTHER) \
		PINS="torch==$(TORCH) triton==$(TRITON)" $(OTHER)/.ready-test
	CUDA_VISIBLE_DEVICES= $(OTHER)/bin/python -m pytest $(WORKERS) $(VERSION_TESTS) \
		-m "not (slow or wide)" $(ARGS)

test-trl: $(VENV)/.ready-test $(VENV)/.ready-trl ## the GRPO loss, log-probabilities and advantages against TRL's
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q tests/transformer/rl/test_grpo_trl.py

test-trainers: $(VENV)/.ready-test $(VENV)/.ready-trainers ## Trainer, TRL and PEFT with our attention, step by step against SDPA
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q tests/trainers $(ARGS)

fuzz: $(VENV)/.ready-test ## 600 random calls of each version, forward and backward, against the fp64 oracle
	CUDA_VISIBLE_DEVICES= HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q -n 2 tests/flash_versions/versions/test_property.py

mutants: $(VENV)/.ready-test ## plant about 100 bugs, one at a time, and say which test finds each: ARGS="--jobs 8"
	$(BIN)/python -m tests.mutants $(ARGS)

lint: $(VENV)/.ready-test ## format, lint and type checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.ready ## time every version on this machine's GPU: make bench ARGS="--suite quick"
	$(BIN)/python -m flash_versions.bench $(ARGS)

plot: $(VENV)/.ready-plot ## redraw figures and tables of the documents from docs/results; needs no GPU
	$(BIN)/python -m docs.report
	$(BIN)/python -m flash_versions.plot

lab: $(VENV)/.ready-notebooks ## read and run the notebooks in JupyterLab
	cd notebooks && $(abspath $(BIN))/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) 00_start.ipynb $(ARGS)

notebooks: $(VENV)/.ready-notebooks ## run notebooks and write them with outputs: make notebooks NAMES="00_start"
	cd notebooks && CUDA_VISIBLE_DEVICES= $(abspath $(BIN))/python -m lessons.build $(NAMES)

docs: $(VENV)/.ready-docs ## build the site, warnings being errors: docs/_build/html/index.html
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

kernels-hub: $(VENV)/.ready ## write the kernel for Hugging Face's Kernels Hub: dist/kernels-hub
	$(BIN)/python -m flash_versions.integrations.hub dist/kernels-hub

clean: ## remove what the other targets made
	rm -rf $(VENV) .venv-torch-* .pytest_cache .mypy_cache .ruff_cache
	rm -rf docs/_build docs/_made docs/learn/versions docs/learn/walkthroughs
