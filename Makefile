# SPDX-License-Identifier: MIT
# The front door of kmatrix: a target is one call of `python -m kmatrix` with the NAME=value of make's command line.
# `make` alone prints the list, which is in lib/kmatrix/cli/commands.py.

# The words as make keeps them, not expanded. Not from MAKEFLAGS, which lacks them with make -e.
override export KMATRIX_WORDS := $(value -*-command-variables-*-)
# make expands $ in what it exports: it exports no value of its command line.
$(foreach .each,$(.VARIABLES),$(if $(filter command,$(origin $(.each))),$(eval unexport $(.each))))
.DEFAULT_GOAL := help
.SUFFIXES:
Makefile pyproject.toml constraints.txt: ; # no targets, also not with make -B
# Commands are printed with V=1 only, as in Linux.
Q := $(if $(filter 1,$(V)),,@)

# PYTHON=<interpreter that has everything> skips .venv. Otherwise the first target that needs a stage of .venv makes it:
# core (configuration, plans, reports), train (torch), trackers, dev (checks).
GIVEN := $(filter command,$(origin PYTHON))
PY := $(if $(GIVEN),'$(PYTHON)',.venv/bin/python)
stages = $(if $(GIVEN),,$(addprefix .venv/.,$(1)))
# First in the path: a copied checkout must run its own code, and the .venv in it may name the original's.
OURS := PYTHONPATH='$(CURDIR)/lib:$(CURDIR)'"$${PYTHONPATH:+:$$PYTHONPATH}"
# exec: make ends its own child with a signal, and no shell must be between.
KMATRIX = $(Q)exec env $(OURS) $(PY) -m kmatrix --make '$@'
# The checks run make themselves: the variables of this make would become arguments of those.
QUIET_MAKE := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u KMATRIX_WORDS $(OURS) $(PY)
PYTEST := $(QUIET_MAKE) -m pytest -n logical

CONFIGURE := menuconfig defconfig olddefconfig savedefconfig diffconfig list-defconfigs
CONFIGURE += $(foreach .each,$(filter-out fragments,$(notdir $(wildcard defconfigs/*))),defconfig-$(.each) $(.each)_defconfig)
WATCH := doctor test-matrix-dry-run plan status estimate logs stop hold release gputop gpu-exporter \
	gallery results-schema summary update-graphs compare list-checkpoints trackio-web
TRAINING := quickstart prepare-data test-matrix test_matrix train continue test-rerun add reproduce \
	sample serve export import-model
TRACKING := track-sync trackio-view tensorboard wandb-test trackio-test
.PHONY: $(CONFIGURE) $(WATCH) $(TRAINING) $(TRACKING) help setup setup-trackers check check-all check-nightly \
	check-gpu bench clean mrproper
$(CONFIGURE) $(WATCH): $(call stages,core)
$(TRAINING): $(call stages,core train)
$(TRACKING): $(call stages,core trackers)
$(CONFIGURE) $(WATCH) $(TRAINING) $(TRACKING):
	$(KMATRIX)
defconfig-% %_defconfig: $(call stages,core)
	$(KMATRIX)
# These need no .venv: any Python 3.11 prints the help, and the targets that an unknown one resembles.
help .DEFAULT:
	@$(OURS) $(if $(GIVEN),$(PY),$(or $(wildcard $(PY)),python3)) -m kmatrix --make '$@'

setup: $(call stages,core train)
setup-trackers: $(call stages,core trackers)
.venv/.core .venv/.train .venv/.trackers .venv/.dev: .venv/.%: pyproject.toml constraints.txt
	@TORCH_INDEX='$(TORCH_INDEX)' sh scripts/setup.sh $*
.venv/.train .venv/.trackers: .venv/.core
.venv/.dev: .venv/.train .venv/.trackers

check: $(call stages,dev)
	$(QUIET_MAKE) -m ruff format --check .
	$(QUIET_MAKE) -m ruff check .
	$(QUIET_MAKE) -m mypy
	$(PYTEST) -m "not story and not nightly and not gpu"
# loadfile: the tests of a file share its fixtures, which train models. -rs: why a test was skipped.
check-all: check
	$(PYTEST) --dist loadfile -rs -m "story and not nightly and not gpu"
# What may be random: new examples in any order, real clusters, browsers, loads. All of it runs, whatever fails.
check-nightly: $(call stages,dev)
	export KMATRIX_NIGHTLY=1; status=0; \
	$(PYTEST) --shuffle $$(date +%s) -m "not story and not nightly and not gpu" || status=1; \
	$(PYTEST) --dist loadfile -rs -m "nightly and not gpu" || status=1; \
	$(QUIET_MAKE) tests/support/check_gpu.py cpu || status=1; exit $$status
check-gpu: $(call stages,dev)
	$(Q)$(QUIET_MAKE) tests/support/check_gpu.py $(ON)
# Each program has options of its own: python bench/<name>.py --help.
bench: $(call stages,core train)
	status=0; for each in $(filter-out %/common.py,$(wildcard bench/*.py)); do $(QUIET_MAKE) $$each || status=1; done; exit $$status

clean:
	$(Q)rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis lib/*.egg-info
# Not below .venv: its byte code belongs to installed packages.
	$(Q)find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
mrproper: clean
	$(Q)rm -f .config .config.old .config.refused .config.quickstart .config.quickstart.old
