# SPDX-License-Identifier: MIT
# The front door of kmatrix. Every target below is one call of the program `kmatrix` (python -m kmatrix TARGET);
# NAME=value on the command line reaches it through MAKEFLAGS. `make` alone prints the list: kmatrix.cli.commands.

# make expands $ in the values of variables: NAME='$(shell cmd)' would run cmd as soon as a recipe begins, because make
# puts every NAME= of its command line into the environment. So these values become literal text here, before the first
# use, and those of the environment that are read below. All other names that are used here have `override`: no value of
# a user takes their place. tests/project/test_no_shell.py tries every name.
override GIVEN := $(foreach .each,$(.VARIABLES),$(if $(filter command,$(origin $(.each))),$(.each)))
override READ := KCONFIG_CONFIG O V TORCH_INDEX PART ON PEER CURDIR VPATH GPATH
override READ := $(GIVEN) $(foreach .each,$(READ),$(if $(filter environment,$(origin $(.each))),$(.each)))
$(foreach .each,$(READ),$(eval override $(.each) := $$(value $(.each))))
# Those that make would expand once more for the environment, if a variable there has their name.
unexport quote KMATRIX

.DEFAULT_GOAL := help
# No built-in rules: `make defconfig-` is not made from defconfig-.o, and `make -B` does not make the Makefile.
.SUFFIXES:
Makefile: ;
override SHELL := /bin/sh
override .SHELLFLAGS := -c
# Commands are printed with V=1 only, as in Linux.
override Q := $(if $(filter 1,$(V)),,@)
# Whatever a user passes is one word for the shell, with quotes, $ and blanks. make ends a command at a line break.
override define LINE_BREAK :=


endef
override quote = '$(subst ','\'',$(subst $(LINE_BREAK), ,$(1)))'

# PYTHON=<interpreter that has everything> skips .venv. Otherwise .venv is made in stages by the first target that
# needs one: core (configuration, plans, reports), train (torch), trackers (W&B, Trackio, TensorBoard), dev (checks).
# PYTHONPATH comes first: a copied checkout must run its own code, and the .venv in it may name the original's.
override OURS := PYTHONPATH=$(call quote,$(CURDIR)/lib:$(CURDIR))"$${PYTHONPATH:+:$$PYTHONPATH}"
ifeq ($(filter PYTHON,$(GIVEN)),)
override PY := $(OURS) .venv/bin/python
override CONTROL := .venv/.core
override TRAIN := .venv/.train
override TRACKERS := .venv/.trackers
override KUBERNETES := .venv/.kubernetes
override DEV := .venv/.dev
else
override PY := $(OURS) $(call quote,$(PYTHON))
override CONTROL :=
override TRAIN :=
override TRACKERS :=
override KUBERNETES :=
override DEV :=
endif
# The device of check-gpu, from the command line alone. ON=cpu: the CPU in the place of a GPU.
override CHECKED := $(if $(filter ON,$(GIVEN)),$(ON))
# Trackers are installed by the first target that runs with one: chosen on the command line, else in .config.
override CONFIG_FILE := $(or $(KCONFIG_CONFIG),$(if $(O),$(O)/).config)
# Read by make itself (4.2 or newer), not by a shell: the name of the file is the user's.
ifneq ($(filter TRACKER,$(GIVEN)),)
override CHOSEN := $(filter-out none,$(TRACKER))
else
override CHOSEN := $(if $(wildcard $(CONFIG_FILE)/.),,$(filter CONFIG_TRACKER_%=y,$(file <$(CONFIG_FILE))))
endif
override TRACKED := $(if $(CHOSEN),$(TRACKERS))
# So is the client of Kubernetes, with ENGINE=kubernetes.
ifneq ($(filter ENGINE,$(GIVEN)),)
override CLUSTER := $(if $(filter kubernetes,$(ENGINE)),$(KUBERNETES))
else
override CLUSTER := $(if $(wildcard $(CONFIG_FILE)/.),,$(if $(filter CONFIG_ENGINE_KUBERNETES=y,$(file <$(CONFIG_FILE))),$(KUBERNETES)))
endif
override KMATRIX = $(Q)$(PY) -m kmatrix --make $(call quote,$@)
# The checks run make themselves: the variables of this make would become arguments of those.
override QUIET_MAKE := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL $(PY)

.venv/.core .venv/.train .venv/.trackers .venv/.kubernetes .venv/.dev: .venv/.%: pyproject.toml constraints.txt
	@TORCH_INDEX=$(call quote,$(TORCH_INDEX)) sh scripts/setup.sh $*
# core creates .venv; dev, the tools of the checks, contains the other three.
.venv/.train .venv/.trackers .venv/.kubernetes .venv/.dev: .venv/.core
.venv/.dev: .venv/.train .venv/.trackers .venv/.kubernetes

# Set-up and checks
.PHONY: help setup setup-trackers setup-kubernetes quickstart doctor check check-all check-nightly check-gpu bench bench-gpu
# The help needs no .venv: it is printed by any Python 3.11, in a fresh clone too.
help:
	@$(if $(CONTROL),$(OURS) $(or $(wildcard .venv/bin/python),python3),$(PY)) -m kmatrix --make help
setup: $(CONTROL) $(TRAIN)
setup-trackers: $(CONTROL) $(TRACKERS)
setup-kubernetes: $(CONTROL) $(KUBERNETES)
quickstart: $(CONTROL) $(TRAIN)
	$(KMATRIX)
doctor: $(CONTROL)
	$(KMATRIX)
check: $(CONTROL) $(TRAIN) $(DEV)
	$(QUIET_MAKE) -m ruff format --check .
	$(QUIET_MAKE) -m ruff check .
	$(QUIET_MAKE) -m mypy
	$(QUIET_MAKE) -m pytest -n logical -m "not story and not nightly and not gpu and not slow and not accept"
# loadfile: the tests of a file share its fixtures, which train models. -rs: why a test was skipped.
check-all: check
	$(QUIET_MAKE) -m pytest -n logical --dist loadfile -rs -m "(story or slow or accept) and not nightly and not gpu"
# What may be random: new examples in any order, real clusters, browsers, loads. All of it runs, whatever fails.
check-nightly: $(CONTROL) $(TRAIN) $(DEV)
	export KMATRIX_NIGHTLY=1; status=0; \
	$(QUIET_MAKE) -m pytest -n logical --shuffle $$(date +%s) -m "not story and not nightly and not gpu" || status=1; \
	$(QUIET_MAKE) -m pytest -n logical --dist loadfile -rs -m "nightly and not gpu" || status=1; \
	$(QUIET_MAKE) tests/support/check_gpu.py cpu || status=1; \
	exit $$status
# Without a GPU it says so before it installs the tools of the tests.
check-gpu: .look-for-gpu $(DEV)
	$(Q)$(QUIET_MAKE) tests/support/check_gpu.py $(call quote,$(CHECKED))
.PHONY: .look-for-gpu
.look-for-gpu: $(CONTROL) $(TRAIN)
	$(Q)$(QUIET_MAKE) tests/support/check_gpu.py --look $(call quote,$(CHECKED))
bench: $(CONTROL) $(TRAIN)
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
	$(QUIET_MAKE) bench/scale.py
bench-gpu: $(CONTROL) $(TRAIN)
	$(Q)$(QUIET_MAKE) bench/gpu.py --part=$(call quote,$(PART)) --on=$(call quote,$(ON)) --peer=$(call quote,$(PEER))

# Configuration
override CONFIGS := menuconfig defconfig olddefconfig savedefconfig diffconfig list-defconfigs
override DEFCONFIGS := $(filter-out fragments,$(notdir $(wildcard defconfigs/*)))
.PHONY: $(CONFIGS) $(addprefix defconfig-,$(DEFCONFIGS)) $(addsuffix _defconfig,$(DEFCONFIGS))
$(CONFIGS) $(addprefix defconfig-,$(DEFCONFIGS)) $(addsuffix _defconfig,$(DEFCONFIGS)): $(CONTROL)
	$(KMATRIX)
defconfig-%: $(CONTROL)
	$(KMATRIX)
%_defconfig: $(CONTROL)
	$(KMATRIX)

# Running
.PHONY: prepare-data test-matrix-dry-run plan test-matrix test_matrix train continue test-rerun add status estimate \
	logs stop skip hold release reproduce gputop gpu-exporter
prepare-data: $(CONTROL) $(TRAIN)
	$(KMATRIX)
test-matrix-dry-run: $(CONTROL)
	$(KMATRIX)
plan: $(CONTROL) $(CLUSTER)
	$(KMATRIX)
test-matrix: $(CONTROL) $(TRAIN) $(TRACKED) $(CLUSTER)
	$(KMATRIX)
test_matrix: $(CONTROL) $(TRAIN) $(TRACKED) $(CLUSTER)
	$(KMATRIX)
train: $(CONTROL) $(TRAIN) $(TRACKED)
	$(KMATRIX)
continue: $(CONTROL) $(TRAIN) $(TRACKED) $(CLUSTER)
	$(KMATRIX)
test-rerun: $(CONTROL) $(TRAIN) $(TRACKED) $(CLUSTER)
	$(KMATRIX)
add: $(CONTROL) $(TRAIN) $(TRACKED) $(CLUSTER)
	$(KMATRIX)
status: $(CONTROL) $(CLUSTER)
	$(KMATRIX)
estimate: $(CONTROL)
	$(KMATRIX)
logs: $(CONTROL)
	$(KMATRIX)
stop: $(CONTROL) $(CLUSTER)
	$(KMATRIX)
skip: $(CONTROL)
	$(KMATRIX)
hold: $(CONTROL)
	$(KMATRIX)
release: $(CONTROL)
	$(KMATRIX)
reproduce: $(CONTROL) $(TRAIN) $(TRACKED)
	$(KMATRIX)

gputop: $(CONTROL)
	$(KMATRIX)
gpu-exporter: $(CONTROL)
	$(KMATRIX)

# Results
.PHONY: report gallery summary update-graphs compare
report: $(CONTROL)
	$(KMATRIX)
gallery: $(CONTROL)
	$(KMATRIX)
summary: $(CONTROL)
	$(KMATRIX)
update-graphs: $(CONTROL)
	$(KMATRIX)
compare: $(CONTROL)
	$(KMATRIX)

# Trackers
.PHONY: track-sync trackio-view tensorboard wandb-test trackio-test
trackio-view: $(CONTROL) $(TRACKERS)
	$(KMATRIX)
tensorboard: $(CONTROL) $(TRACKERS)
	$(KMATRIX)
track-sync: $(CONTROL) $(TRACKERS)
	$(KMATRIX)
wandb-test: $(CONTROL) $(TRACKERS)
	$(KMATRIX)
trackio-test: $(CONTROL) $(TRACKERS)
	$(KMATRIX)

# Checkpoints
.PHONY: list-checkpoints
list-checkpoints: $(CONTROL)
	$(KMATRIX)

# Models
.PHONY: sample serve export import-model
sample: $(CONTROL) $(TRAIN)
	$(KMATRIX)
serve: $(CONTROL) $(TRAIN)
	$(KMATRIX)
export: $(CONTROL) $(TRAIN)
	$(KMATRIX)
import-model: $(CONTROL) $(TRAIN)
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
	@$(if $(CONTROL),$(OURS) $(or $(wildcard .venv/bin/python),python3),$(PY)) -m kmatrix --make $(call quote,$@)
