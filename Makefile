# Everything a developer types. As root on Debian 12 or 13 each target installs what it lacks.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Slurm's MPI plugin opens libpmix.so, a name that only libpmix-dev provides.
PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins libslurm-dev libpmix-dev munge openmpi-bin \
            iproute2 util-linux procps mawk debootstrap git make gcc libc6-dev clang-format shellcheck mandoc rpm logrotate \
            btrfs-progs python3-venv
TYPED    := jitmpi slurm_plugin testbed demo bench
SCRIPTS  := .ci/run $(wildcard sbatch_templates/*.sbatch) $(addprefix packaging/,srun wrapper install slurm-version build-deb build-rpm) \
            $(wildcard packaging/deb/p*)

.DEFAULT_GOAL := help
.PHONY: help deps venv spank lint check mpi test test-on demo bench wheel install deb rpm clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

deps: ## install the Debian packages that are missing and add the jobs' user (root)
	@missing=""; \
	for package in $(PACKAGES); do \
	    [ "$$(dpkg-query -W -f='$${db:Status-Status}' $$package 2>/dev/null)" = installed ] || missing+=" $$package"; \
	done; \
	id jituser >/dev/null 2>&1 && user="" || user=jituser; \
	[ -n "$$missing$$user" ] || exit 0; \
	[ "$$(id -u)" = 0 ] || { echo "run 'make deps' as root; missing:$$missing $$user" >&2; exit 1; }; \
	if [ -n "$$missing" ]; then \
	    echo "installing:$$missing"; export DEBIAN_FRONTEND=noninteractive; \
	    apt-get update -q </dev/null; apt-get install -q -y --no-install-recommends $$missing </dev/null; \
	fi; \
	[ -z "$$user" ] || useradd --create-home --shell /bin/bash jituser

venv: $(VENV)/.installed ## make .venv with everything of requirements-dev.txt

$(VENV)/.installed: requirements-dev.txt pyproject.toml | deps
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

spank: deps ## build the C plugin
	@$(MAKE) -C spank

lint: venv ## format, lint, types, layers, spelling, shell, C style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict $(TYPED:%=-p %)
	$(BIN)/lint-imports
	$(BIN)/codespell
	shellcheck $(SCRIPTS)
	mandoc -Tlint -W warning $(wildcard docs/man/*)
	clang-format --dry-run -Werror $(wildcard spank/*.[ch])

check: lint ## lint and the unit tests: under a minute
	$(BIN)/python -m pytest tests/unit

mpi: build/mpi/.installed ## install the MPI builds that ranks are killed under, each in a folder of build/mpi

# They would get into each other's way in one environment. One that is not to be had costs its test, which says why.
build/mpi/.installed: requirements-mpi.txt | venv
	rm -rf build/mpi && mkdir -p build/mpi
	for wheel in $$(grep '^[a-z].*==' requirements-mpi.txt); do \
	    folder=build/mpi/$${wheel/==/-}; \
	    $(BIN)/python -m pip install -q --no-deps --ignore-installed --no-warn-script-location --prefix "$$folder" \
	        "$$wheel" >"$$folder.log" 2>&1 || rm -rf "$$folder"; \
	done
	touch $@

test: $(if $(TESTS),venv,lint) spank mpi ## everything under tests/, on a real cluster made for it (root); TESTS=... only these, unlinted
	$(BIN)/python -m pytest $(or $(TESTS),tests)

test-on: deps ## `make test` in another Debian release: RELEASE=trixie, bookworm or forky; TESTS=... as above (root)
	@[ -n "$(RELEASE)" ] || { echo "which one? make test-on RELEASE=bookworm (Slurm 22.05), trixie (24.11) or forky" >&2; exit 1; }
	$(PYTHON) -m testbed.release $(if $(ROOTS),--roots '$(ROOTS)') $(RELEASE) make test $(if $(TESTS),'TESTS=$(TESTS)')

demo: venv spank ## a job that loses a node and goes on, told with times and pictures (root)
	$(BIN)/python -m demo

bench: venv spank ## measure what protection costs; writes build/bench/*.json (root)
	$(BIN)/python -m bench

wheel: venv ## build/wheel: what users install into their Python environments
	rm -rf build/wheel build/lib build/bdist.*
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/wheel .

install: ## put the cluster's side into place; DESTDIR, PREFIX, LIBDIR, SYSCONFDIR say where; WHEEL= adds a wheel
	packaging/install $(WHEEL)

deb: wheel ## build/packages/*.deb for the installed Slurm
	packaging/build-deb build/wheel/*.whl

rpm: wheel ## build/packages/*.rpm for the installed Slurm
	packaging/build-rpm build/wheel/*.whl

clean: ## remove what was built; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	$(MAKE) -C spank clean
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
