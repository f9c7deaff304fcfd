# SPDX-License-Identifier: MIT
# The front door of kmatrix. Every target below is one call of the program `kmatrix` (python -m kmatrix TARGET);
# NAME=value on the command line reaches it through MAKEFLAGS. `make` alone prints the list: kmatrix.cli.commands.

.DEFAULT_GOAL := help
SHELL := /bin/sh
# Commands are printed with V=1 only, as in Linux.
Q := $(if $(filter 1,$(V)),,@)
# Whatever a user passes is one word for the shell, with quotes, $ and blanks; tests/project/test_no_shell.py checks it.
quote = '$(subst ','\'',$(1))'

# PYTHON=<interpreter that has everything> skips .venv. Otherwise .venv is made in stages by the first target that
# needs one: core (configuration, plans, reports), train (torch), trackers (W&B, Trackio, TensorBoard), dev (checks).
# PYTHONPATH comes first: a copied checkout must run its own code, and the .venv in it may name the original's.
OURS := PYTHONPATH=$(call quote,$(CURDIR)/lib:$(CURDIR))"$${PYTHONPATH:+:$$PYTHONPATH}"
ifneq ($(origin PYTHON),command line)
PY := $(OURS) .venv/bin/python
CORE := .venv/.core
TRAIN := .venv/.train
TRACKERS := .venv/.trackers
DEV := .venv/.dev
else
PY := $(OURS) $(call quote,$(PYTHON))
endif
# Trackers are installed by the first target that runs with one: chosen on the command line, else in .config.
CONFIG_FILE = $(or $(KCONFIG_CONFIG),$(if $(O),$(O)/).config)
# Read by make itself (4.2 or newer), not by a shell: the name of the file is the user's.
ifeq ($(origin TRACKER),command line)
CHOSEN := $(filter-out none,$(TRACKER))
else
CHOSEN := $(if $(wildcard $(CONFIG_FILE)/.),,$(filter CONFIG_TRACKER_%=y,$(file <$(CONFIG_FILE))))
endif
TRACKED := $(if $(CHOSEN),$(TRACKERS))
KMATRIX = $(Q)$(PY) -m kmatrix --make $(call quote,$@)
# The checks run make themselves: the variables of this make would become arguments of those.
QUIET_MAKE = env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL $(PY)

.venv/.core .venv/.train .venv/.trackers .venv/.dev: .venv/.%: pyproject.toml constraints.txt
	@TORCH_INDEX=$(call quote,$(TORCH_INDEX)) sh scripts/setup.sh $*
# core creates .venv; dev, the tools of the checks, contains the other two.
.venv/.train .venv/.trackers .venv/.dev: .venv/.core
.venv/.dev: .venv/.train .venv/.trackers

# Set-up and checks
.PHONY: help setup setup-trackers quickstart doctor check check-slow accept bench
# The help needs no .venv: it is printed by any Python 3.11, in a fresh clone too.
help:
	@$(if $(CORE),$(OURS) $(or $(wildcard .venv/bin/python),python3),$(PY)) -m kmatrix --make help
setup: $(CORE) $(TRAIN)
setup-trackers: $(CORE) $(TRACKERS)
quickstart: $(CORE) $(TRAIN)
	$(KMATRIX)
doctor: $(CORE)
	$(KMATRIX)
check: $(CORE) $(TRAIN) $(DEV)
	$(QUIET_MAKE) -m ruff format --check .
	$(QUIET_MAKE) -m ruff check .
	$(QUIET_MAKE) -m mypy
	$(QUIET_MAKE) -m pytest -n 3 -m "not slow and not accept and not gpu"
# loadfile: the tests of a file share its fixtures, which train models.
check-slow: $(CORE) $(TRAIN) $(DEV)
	$(QUIET_MAKE) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "slow or accept"
accept: $(CORE) $(TRAIN) $(DEV)
	$(QUIET_MAKE) -m pytest -m accept
bench: $(CORE) $(TRAIN)
	$(QUIET_MAKE) bench/config.py
	$(QUIET_MAKE) bench/matrix.py
	$(QUIET_MAKE) bench/launch.py
	$(QUIET_MAKE) bench/schedule.py
	$(QUIET_MAKE) bench/recorder.py
	$(QUIET_MAKE) bench/reports.py 1000 10000
	$(QUIET_MAKE) bench/loader.py
	$(QUIET_MAKE) bench/model_step.py
	$(QUIET_MAKE) bench/published.py
	$(QUIET_MAKE) bench/cpu_memory.py
	$(QUIET_MAKE) bench/status.py
	$(QUIET_MAKE) bench/shape.py
	$(QUIET_MAKE) bench/scale.py

# Configuration
CONFIGS := menuconfig nconfig oldconfig olddefconfig defconfig savedefconfig alldefconfig allyesconfig allnoconfig \
	randconfig listnewconfig helpnewconfig diffconfig list-defconfigs
DEFCONFIGS := $(filter-out fragments,$(notdir $(wildcard defconfigs/*)))
.PHONY: $(CONFIGS) $(addprefix defconfig-,$(DEFCONFIGS)) $(addsuffix _defconfig,$(DEFCONFIGS))
$(CONFIGS) $(addprefix defconfig-,$(DEFCONFIGS)) $(addsuffix _defconfig,$(DEFCONFIGS)): $(CORE)
	$(KMATRIX)
defconfig-%: $(CORE)
	$(KMATRIX)
%_defconfig: $(CORE)
	$(KMATRIX)

# Running
.PHONY: prepare-data test-matrix-dry-run plan test-matrix test_matrix train continue test-rerun add status estimate \
	logs stop reproduce gputop
prepare-data: $(CORE) $(TRAIN)
	$(KMATRIX)
test-matrix-dry-run: $(CORE)
	$(KMATRIX)
plan: $(CORE)
	$(KMATRIX)
test-matrix: $(CORE) $(TRAIN) $(TRACKED)
	$(KMATRIX)
test_matrix: $(CORE) $(TRAIN) $(TRACKED)
	$(KMATRIX)
train: $(CORE) $(TRAIN) $(TRACKED)
	$(KMATRIX)
continue: $(CORE) $(TRAIN) $(TRACKED)
	$(KMATRIX)
test-rerun: $(CORE) $(TRAIN) $(TRACKED)
	$(KMATRIX)
add: $(CORE) $(TRAIN) $(TRACKED)
	$(KMATRIX)
status: $(CORE)
	$(KMATRIX)
estimate: $(CORE)
	$(KMATRIX)
logs: $(CORE)
	$(KMATRIX)
stop: $(CORE)
	$(KMATRIX)
reproduce: $(CORE) $(TRAIN) $(TRACKED)
	$(KMATRIX)

gputop: $(CORE)
	$(KMATRIX)

# Results
.PHONY: summary update-graphs compare
summary: $(CORE)
	$(KMATRIX)
update-graphs: $(CORE)
	$(KMATRIX)
compare: $(CORE)
	$(KMATRIX)

# Trackers
.PHONY: track-sync track-replay trackio-view trackio-web trackio-console tensorboard wandb-view wandb-test trackio-test
trackio-view: $(CORE) $(TRACKERS)
	$(KMATRIX)
trackio-web: $(CORE)
	$(KMATRIX)
trackio-console: $(CORE)
	$(KMATRIX)
tensorboard: $(CORE) $(TRACKERS)
	$(KMATRIX)
wandb-view: $(CORE) $(TRACKERS)
	$(KMATRIX)
track-sync: $(CORE) $(TRACKERS)
	$(KMATRIX)
track-replay: $(CORE) $(TRACKERS)
	$(KMATRIX)
wandb-test: $(CORE) $(TRACKERS)
	$(KMATRIX)
trackio-test: $(CORE) $(TRACKERS)
	$(KMATRIX)

# Checkpoints
.PHONY: list-checkpoints checkpoints-prune
list-checkpoints: $(CORE)
	$(KMATRIX)
checkpoints-prune: $(CORE)
	$(KMATRIX)

# Models
.PHONY: sample serve export import-model
sample: $(CORE) $(TRAIN)
	$(KMATRIX)
serve: $(CORE) $(TRAIN)
	$(KMATRIX)
export: $(CORE) $(TRAIN)
	$(KMATRIX)
import-model: $(CORE) $(TRAIN)
	$(KMATRIX)

# Cleaning
.PHONY: clean mrproper
clean:
	$(Q)rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis lib/*.egg-info
# Not below .venv: its byte code belongs to installed packages.
	$(Q)find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
mrproper: clean
	$(Q)rm -f .config .config.old .config.refused .config.quickstart .config.quickstart.old

# An unknown target: kmatrix names similar ones.
.DEFAULT:
	@$(if $(CORE),$(OURS) $(or $(wildcard .venv/bin/python),python3),$(PY)) -m kmatrix --make $(call quote,$@)
