# Targets for a fresh machine: Python 3.11+, make, git and a C compiler; no GPU needed.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.7.1
MODEL  ?=
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup parity test gpu lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed "$(TORCH)" "$(TRITON)"
	$(BIN)/python -m pip install --quiet -e ".[triton,tokenizer,oracle,test]"
	touch $(STAMP)

# The main job: a checkpoint directory, both engines layer by layer, verdicts, report.
parity: setup
	$(BIN)/v4parity run $(if $(MODEL),--model "$(MODEL)")

test: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

# On a machine with a GPU: the kernel tests on it, then every kernel beside its roofline.
gpu: setup
	$(BIN)/python -m pytest -q -m gpu
	$(BIN)/v4parity bench kernels --device cuda

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) reports/runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
