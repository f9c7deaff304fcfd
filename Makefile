# SPDX-License-Identifier: MIT
# The front door of kmatrix: a target is one call of `python -m kmatrix`, which reads NAME=value from MAKEFLAGS.
# `make` alone prints the list, which is in lib/kmatrix/cli/commands.py.

# make expands $ in what it exports: it exports no value of its command line, so that each arrives as it was typed.
$(foreach .each,$(.VARIABLES),$(if $(filter command,$(origin $(.each))),$(eval unexport $(.each))))
.DEFAULT_GOAL := help
.SUFFIXES:
Makefile: ;
# Commands are printed with V=1 only, as in Linux.
Q := $(if $(filter 1,$(V)),,@)
given = $(if $(filter command,$(origin $(1))),$($(1)))

# PYTHON=<interpreter that has everything> skips .venv. Otherwise the first target that needs a stage of .venv makes it:
# core (configuration, plans, reports), train (torch), trackers, dev (checks).
ifeq ($(call given,PYTHON),)
PY := .venv/bin/python
CONTROL := .venv/.core
TRAIN := .venv/.train
TRACKERS := .venv/.trackers
DEV := .venv/.dev
else
PY := '$(PYTHON)'
endif
# First in the path: a copied checkout must run its own code, and the .venv in it may name the original's.
OURS := PYTHONPATH='$(CURDIR)/lib:$(CURDIR)'"$${PYTHONPATH:+:$$PYTHONPATH}"
# exec: make ends its own child with a signal, and no shell must be between.
KMATRIX = $(Q)exec env $(OURS) $(PY) -m kmatrix --make '$@'
# The checks run make themselves: the variables of this make would become arguments of those.
QUIET_MAKE := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL $(OURS) $(PY)
# Trackers are installed by the first target that runs with them.
CONFIGURED := $(file <$(or $(call given,KCONFIG_CONFIG),$(if $(call given,O),$(O)/).config))
TRACKED := $(if $(filter-out none,$(or $(call given,TRACKER),$(filter CONFIG_TRACKER_%=y,$(CONFIGURED)))),$(TRACKERS))

CONFIGURE := menuconfig defconfig olddefconfig savedefconfig diffconfig list-defconfigs
CONFIGURE += $(foreach .each,$(filter-out fragments,$(notdir $(wildcard defconfigs/*))),defconfig-$(.each) $(.each)_defconfig)
WATCH := doctor test-matrix-dry-run plan status estimate logs stop hold release gputop gpu-exporter \
	report gallery summary update-graphs compare list-checkpoints trackio-web
USE := quickstart prepare-data sample serve export import-model
RUN_MATRIX := test-matrix test_matrix train continue test-rerun add reproduce
TRACK := track-sync trackio-view tensorboard wandb-test trackio-test
TARGETS := $(CONFIGURE) $(WATCH) $(USE) $(RUN_MATRIX) $(TRACK)
.PHONY: $(TARGETS) help setup setup-trackers check check-all check-nightly check-gpu bench clean mrproper
$(TARGETS): $(CONTROL)
$(USE): $(TRAIN)
$(RUN_MATRIX): $(TRAIN) $(TRACKED)
$(TRACK): $(TRACKERS)
$(TARGETS):
	$(KMATRIX)
defconfig-% %_defconfig: $(CONTROL)
	$(KMATRIX)
# These need no .venv: any Python 3.11 prints the help, and the targets that an unknown one resembles.
help .DEFAULT:
	@$(OURS) $(if $(CONTROL),$(or $(wildcard .venv/bin/python),python3),$(PY)) -m kmatrix --make '$@'

setup: $(CONTROL) $(TRAIN)
setup-trackers: $(CONTROL) $(TRACKERS)
.venv/.core .venv/.train .venv/.trackers .venv/.dev: .venv/.%: pyproject.toml constraints.txt
	@TORCH_INDEX='$(TORCH_INDEX)' sh scripts/setup.sh $*
.venv/.train .venv/.trackers: .venv/.core
.venv/.dev: .venv/.train .venv/.trackers

check: $(CONTROL) $(TRAIN) $(DEV)
	$(QUIET_MAKE) -m ruff format --check .
	$(QUIET_MAKE) -m ruff check .
	$(QUIET_MAKE) -m mypy
	$(QUIET_MAKE) -m pytest -n logical -m "not story and not nightly and not gpu"
# loadfile: the tests of a file share its fixtures, which train models. -rs: why a test was skipped.
check-all: check
	$(QUIET_MAKE) -m pytest -n logical --dist loadfile -rs -m "story and not nightly and not gpu"
# What may be random: new examples in any order, real clusters, browsers, loads. All of it runs, whatever fails.
check-nightly: $(CONTROL) $(TRAIN) $(DEV)
	export KMATRIX_NIGHTLY=1; status=0; \
	$(QUIET_MAKE) -m pytest -n logical --shuffle $$(date +%s) -m "not story and not nightly and not gpu" || status=1; \
	$(QUIET_MAKE) -m pytest -n logical --dist loadfile -rs -m "nightly and not gpu" || status=1; \
	$(QUIET_MAKE) tests/support/check_gpu.py cpu || status=1; \
	exit $$status
# Without a GPU it says so before it installs the tools of the tests.
check-gpu: .look-for-gpu $(DEV)
	$(Q)$(QUIET_MAKE) tests/support/check_gpu.py $(call given,ON)
.PHONY: .look-for-gpu
.look-for-gpu: $(CONTROL) $(TRAIN)
	$(Q)$(QUIET_MAKE) tests/support/check_gpu.py --look $(call given,ON)
BENCHES := step kernels profile checkpoint runner scale monitor verdict
# Each program has options of its own: python bench/<name>.py --help.
bench: $(CONTROL) $(TRAIN)
	status=0; for each in $(BENCHES); do $(QUIET_MAKE) bench/$$each.py || status=1; done; exit $$status

clean:
	$(Q)rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis lib/*.egg-info
# Not below .venv: its byte code belongs to installed packages.
	$(Q)find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
mrproper: clean
	$(Q)rm -f .config .config.old .config.refused .config.quickstart .config.quickstart.old
