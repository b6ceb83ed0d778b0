# Everything runs in .venv, which the first command builds (minutes) and later ones find ready.
#   make demo       the engine on the embedded model      make lab        JupyterLab on the course
#   make test       lint, tests, notebooks                make notebooks  execute the notebooks again, in place
#   make lint       ruff only                             make clean      remove .venv and everything generated
# PYTHON=python3.12 picks another interpreter for .venv. pip follows your own configuration and PIP_* variables.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := requirements.lock.txt
READY := $(VENV)/ready
TORCH := $(shell sed -n 's/^torch==\([^ ;]*\).*/\1/p' $(PINS))
NOTEBOOKS = $(wildcard notebooks/[0-9]*.ipynb notebooks/solutions/[0-9]*.ipynb)
# An NVIDIA driver decides which build of torch is of use.
GPU := $(shell { nvidia-smi -L | grep -q GPU || test -e /proc/driver/nvidia/version; } 2>/dev/null && echo yes)
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
LAB_SETTINGS := $(VENV)/share/jupyter/lab/settings
ROOT_FLAG := $(shell test "$$(id -u)" != 0 || echo --allow-root)

.PHONY: demo test lint lab notebooks venv clean

demo: $(READY)
	@$(BIN)/python -m minispec demo

test: lint
	@echo "[test] package"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile
ifeq ($(NOTEBOOKS),)
	@echo "[test] no notebooks yet"
else
	@echo "[test] notebooks: run again, compared with what is stored"
	@$(BIN)/python -m pytest -q --nbval --nbval-current-env --nbval-cell-timeout 300 \
		--nbval-sanitize-with notebooks/sanitize.cfg $(NOTEBOOKS)
endif

lint: $(READY)
	@echo "[lint] ruff"
	@$(BIN)/python -m ruff check --quiet .
	@$(BIN)/python -m ruff format --quiet --check .

lab: $(READY)
	@$(BIN)/jupyter trust notebooks/*.ipynb notebooks/solutions/*.ipynb > /dev/null
	@mkdir -p $(LAB_SETTINGS) && cp notebooks/lab_settings.json $(LAB_SETTINGS)/overrides.json
	@$(BIN)/python -m jupyterlab $(ROOT_FLAG) --notebook-dir . notebooks/README.md

notebooks: $(READY)
	@$(BIN)/python -m minispec.course.run_notebooks

venv: $(READY)

# torch comes first: whatever depends on it would otherwise fetch the largest build.
$(READY): pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "minispec needs Python 3.10 or newer, but PYTHON=$(PYTHON) is" \
			"$$($(PYTHON) -c 'import sys; print(sys.version.split()[0])' 2>/dev/null || echo 'not there');" \
			"try make PYTHON=python3.12"; exit 1; }
	@echo "[1/3] $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
ifeq ($(GPU),yes)
	@echo "[2/3] torch $(TORCH) for the NVIDIA driver that is here (gigabytes: some minutes)"
	@$(PIP) install "torch==$(TORCH)"
	@echo "[3/3] minispec with its course, tests and GPU kernels"
	@$(PIP) install -c $(PINS) -e ".[dev,gpu]"
else
	@echo "[2/3] torch $(TORCH) for the CPU (some minutes)"
	@$(PIP) install "torch==$(TORCH)+cpu" 2>/dev/null || { \
		echo "      no +cpu build in this index: taking the ordinary one (it may be larger; it runs on a CPU too)"; \
		$(PIP) install "torch==$(TORCH)"; }
	@echo "[3/3] minispec with its course and tests"
	@$(PIP) install -c $(PINS) -e ".[dev]"
endif
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
