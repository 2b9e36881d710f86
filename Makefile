# `make train`, `make test`, and `make quick` before a first patch. Each sets .venv up first if it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# Containers often set it: then every process of a run compiles torch, vLLM and transformers again, 40 s of CPU a run.
unexport PYTHONDONTWRITEBYTECODE
# 21 s of one core without a cache of types, 13 s of two.
export MYPY_NUM_WORKERS ?= 2

.PHONY: train test quick check setup dist clean

train: $(READY)
	$(BIN)/rlctl train grpo $(ARGS)

# Left out here, for time: `make test ARGS='-m long'`; with RLCTL_TEST_KILLS=10 before it, faults by the dozen.
test: $(READY) check
	$(BIN)/python -m pytest $(ARGS)

# Linters, types, and unit tests without Ray and without engines. Left out: tests/system, tests/faults, tests/gpu, and
# tests that took two seconds when durations were recorded.
quick: $(READY) check
	$(BIN)/python -m pytest tests/unit -m 'not slow and not long' $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(READY)
	@echo "ready: $(BIN)/rlctl; next: recipes/TUTORIAL.md"

# pip must be able to find torch 2.13.0+cpu: in a local folder (find-links) or on PyTorch's CPU index.
$(READY): pyproject.toml rlctl/preflight/stub_wheels.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rlctl needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "no venv module: apt-get install python3-venv"; exit 2; }
	@$(PYTHON) rlctl/preflight/stub_wheels.py .stubs >/dev/null
	@echo "setting up $(VENV) (1-4 minutes, once)"
	@$(BIN)/pip install -qq --disable-pip-version-check --no-compile --find-links .stubs -r .stubs/requirements.txt -e '.[cpu,dev]' || \
	  { echo "set-up failed. If torch 2.13.0+cpu was not found: add PyTorch's CPU index to pip's configuration"; \
	    echo "(its address is in PyTorch's own install guide), for example PIP_EXTRA_INDEX_URL=ADDRESS make setup"; exit 1; }
	@command -v bwrap >/dev/null || .ci/bubblewrap || true
	@touch $(READY)

# Wheel and sdist of this version, tried in a fresh environment: CONTRIBUTING.md says when.
dist:
	PYTHON=$(PYTHON) .ci/dist

clean:
	rm -rf $(VENV) .stubs dist
