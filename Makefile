# SPDX-License-Identifier: MIT
# The front door of kmatrix. Every target below is one call of the program `kmatrix` (python -m kmatrix TARGET);
# NAME=value on the command line reaches it through MAKEFLAGS. `make` alone prints the list.

.DEFAULT_GOAL := help
SHELL := /bin/sh
Q := $(if $(filter 1,$(V)),,@)

# PYTHON=<interpreter that has everything> skips .venv. Otherwise .venv is made in stages by the first target that
# needs one: core (configuration, plans, reports), train (torch), trackers (W&B, Trackio, TensorBoard), dev (checks).
ifneq ($(origin PYTHON),command line)
PY := .venv/bin/python
CORE := .venv/.core
TRAIN := .venv/.train
TRACKERS := .venv/.trackers
DEV := .venv/.dev
else
PY := PYTHONPATH="$(CURDIR)/lib:$(CURDIR)" $(PYTHON)
endif
# Trackers are installed by the first target that runs with one: chosen on the command line, else in .config.
CONFIG_FILE = $(or $(KCONFIG_CONFIG),$(if $(O),$(O)/).config)
ifeq ($(origin TRACKER),command line)
CHOSEN := $(filter-out none,$(TRACKER))
else
CHOSEN := $(shell grep -s '^CONFIG_TRACKER_[A-Z]*=y' "$(CONFIG_FILE)")
endif
TRACKED := $(if $(CHOSEN),$(TRACKERS))
KMATRIX = $(Q)$(PY) -m kmatrix --make $@
QUIET_MAKE = env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL $(PY)

.venv/.core .venv/.train .venv/.trackers .venv/.dev: .venv/.%: pyproject.toml constraints.txt
	@TORCH_INDEX="$(TORCH_INDEX)" sh scripts/setup.sh $*
.venv/.train .venv/.trackers .venv/.dev: .venv/.core
.venv/.dev: .venv/.train .venv/.trackers

##@ Set-up and checks
.PHONY: help setup setup-trackers quickstart doctor check check-slow accept bench
help: ## this list
	@awk -f scripts/help.awk $(firstword $(MAKEFILE_LIST))
setup: $(CORE) $(TRAIN) ## make .venv with everything that training needs
setup-trackers: $(CORE) $(TRACKERS) ## W&B, Trackio and TensorBoard as well, for TRACKER=
quickstart: $(CORE) $(TRAIN) ## a real comparison of two optimizers on the CPU, in minutes, from nothing
	$(KMATRIX)
doctor: $(CORE) ## what this machine has, what is missing, and what to do (JSON=1)
	$(KMATRIX)
check: $(CORE) $(TRAIN) $(DEV) ## format, lint, types, import contracts, tests
	$(QUIET_MAKE) -m ruff format --check .
	$(QUIET_MAKE) -m ruff check .
	$(QUIET_MAKE) -m mypy
	$(QUIET_MAKE) -c "from importlinter.cli import lint_imports_command as main; main()"
	$(QUIET_MAKE) -m pytest -n 2 -m "not slow and not accept and not gpu"
check-slow: $(CORE) $(TRAIN) $(DEV) ## the slow tests, and what a user does from a fresh clone
	$(QUIET_MAKE) -m pytest -n 2 --dist loadfile -m "slow or accept"
accept: $(CORE) $(TRAIN) $(DEV) ## only what a user does, from a fresh clone
	$(QUIET_MAKE) -m pytest -m accept
bench: $(CORE) $(TRAIN) ## how long things take here (bench/*.py, without a peer)
	$(QUIET_MAKE) bench/config.py
	$(QUIET_MAKE) bench/matrix.py
	$(QUIET_MAKE) bench/launch.py
	$(QUIET_MAKE) bench/schedule.py
	$(QUIET_MAKE) bench/recorder.py
	$(QUIET_MAKE) bench/reports.py 1000 10000
	$(QUIET_MAKE) bench/loader.py
	$(QUIET_MAKE) bench/model_step.py

##@ Configuration (also O=dir KCONFIG=file KCONFIG_CONFIG=file, and NAME=value for any symbol)
CONFIGS := menuconfig nconfig oldconfig olddefconfig defconfig savedefconfig alldefconfig allyesconfig allnoconfig \
	randconfig listnewconfig helpnewconfig diffconfig list-defconfigs
DEFCONFIGS := $(filter-out fragments,$(notdir $(wildcard defconfigs/*)))
.PHONY: $(CONFIGS) $(addprefix defconfig-,$(DEFCONFIGS)) $(addsuffix _defconfig,$(DEFCONFIGS))
menuconfig: ## edit .config in the terminal (nconfig: the same)
list-defconfigs: ## the ready configurations and fragments
## defconfig-<name>[+fragment]: take a ready configuration, e.g. make defconfig-gpt2-cpu-quick+bf16
defconfig: ## the same with DEFCONFIG=<name or file>
oldconfig: ## ask for symbols that .config does not have yet
olddefconfig: ## give them their defaults
savedefconfig: ## write what .config has beyond the defaults to DEFCONFIG=
diffconfig: ## compare OLD= (.config.old) and NEW= (.config)
listnewconfig: ## symbols that .config does not have yet (helpnewconfig: with their help)
alldefconfig: ## all defaults (allyesconfig, allnoconfig: every bool y or n)
randconfig: ## a random legal configuration, from KCONFIG_SEED=
$(CONFIGS) $(addprefix defconfig-,$(DEFCONFIGS)) $(addsuffix _defconfig,$(DEFCONFIGS)): $(CORE)
	$(KMATRIX)
defconfig-%: $(CORE)
	$(KMATRIX)
%_defconfig: $(CORE)
	$(KMATRIX)

##@ Running (NAME=value overrides .config this time only; NAME=a,b makes an axis; GPUS=0,2 bounds the GPUs)
.PHONY: prepare-data test-matrix-dry-run plan test-matrix test_matrix train continue test-rerun status estimate logs \
	stop reproduce gputop
prepare-data: $(CORE) $(TRAIN) ## fetch or make the data of the matrix beforehand (runs do it by themselves)
	$(KMATRIX)
test-matrix-dry-run: $(CORE) ## list the runs, and what is cut and why
	$(KMATRIX)
plan: $(CORE) ## what each run needs: memory, time, money, disk (GPU=H100, TOKENS_PER_SECOND=, SECONDS_PER_STEP=, HOURS=)
	$(KMATRIX)
test-matrix: $(CORE) $(TRAIN) $(TRACKED) ## run the matrix (test_matrix: the same)
	$(KMATRIX)
test_matrix: $(CORE) $(TRAIN) $(TRACKED)
	$(KMATRIX)
train: $(CORE) $(TRAIN) $(TRACKED) ## run one configuration
	$(KMATRIX)
continue: $(CORE) $(TRAIN) $(TRACKED) ## go on with a matrix (TARGET=, RUN=<pattern>, RETRY_FAILED=1); its finished runs stay
	$(KMATRIX)
test-rerun: $(CORE) $(TRAIN) $(TRACKED) ## run runs of TARGET= anew (RUN=<pattern>, OPTIMIZER=); the old results are kept aside
	$(KMATRIX)
status: $(CORE) ## how each run stands, live on a terminal (TARGET=, JSON=1)
	$(KMATRIX)
estimate: $(CORE) ## when each run and the matrix end, memory of each GPU, cost (TARGET=, JSON=1)
	$(KMATRIX)
logs: $(CORE) ## follow what the running run prints (RUN=<pattern>)
	$(KMATRIX)
stop: $(CORE) ## end a running matrix from another terminal; its runs save a checkpoint first
	$(KMATRIX)
reproduce: $(CORE) $(TRAIN) $(TRACKED) ## run RUN=<run directory> again, from its own .config, and compare bit for bit
	$(KMATRIX)

gputop: $(CORE) ## watch every GPU on one screen (RUN=<run directory>, SIMULATE=<number>)
	$(KMATRIX)

##@ Results (TARGET=<matrix directory>; the newest by default)
.PHONY: summary update-graphs compare
summary: $(CORE) ## write and print the summary
	$(KMATRIX)
update-graphs: $(CORE) ## draw the graphs
	$(KMATRIX)
compare: $(CORE) ## BASE=<matrix or run> beside NEW=<matrix or run>: what was set, what came of it, what is evidence (JSON=1)
	$(KMATRIX)

##@ Trackers (TRACKER=wandb,trackio,tensorboard with a configuration or a running target chooses them)
.PHONY: track-replay trackio-view trackio-web trackio-console tensorboard wandb-view wandb-test trackio-test
trackio-view: $(CORE) $(TRACKERS) ## Trackio's page, on this machine alone (PROJECT=, PORT=7860, HOST=127.0.0.1)
	$(KMATRIX)
trackio-web: $(CORE) ## where that page is; starts nothing (PROJECT=, SHOW_TOKEN=1)
	$(KMATRIX)
trackio-console: $(CORE) ## what was measured so far, as a table (TARGET=, RUN=<pattern>: its last steps)
	$(KMATRIX)
tensorboard: $(CORE) $(TRACKERS) ## TensorBoard's page of TARGET=<matrix> (PORT=6006, HOST=127.0.0.1)
	$(KMATRIX)
wandb-view: $(CORE) $(TRACKERS) ## W&B's screen in the terminal, every run of a matrix on it (TARGET=, RUN=<pattern>)
	$(KMATRIX)
track-replay: $(CORE) $(TRACKERS) ## send what trackers lack of TARGET=<matrix> (RUN=<pattern>, TRACKER= for others)
	$(KMATRIX)
wandb-test: $(CORE) $(TRACKERS) ## is W&B ready? a made-up run, sent and read back
	$(KMATRIX)
trackio-test: $(CORE) $(TRACKERS) ## is Trackio ready? a made-up run, stored and read back
	$(KMATRIX)

##@ Checkpoints (TARGET=<matrix directory>, RUN=<run directory, name or pattern>)
.PHONY: list-checkpoints checkpoints-prune
list-checkpoints: $(CORE) ## list each run's: step, kinds, loss, size, file
	$(KMATRIX)
checkpoints-prune: $(CORE) ## remove those that newer ones have replaced (asks; YES=1)
	$(KMATRIX)

##@ Models (CHECKPOINT=<file, run or matrix directory>; the best of the newest matrix by default)
.PHONY: sample serve export import-model
sample: $(CORE) $(TRAIN) ## write a text (PROMPT=, TOKENS=, TEMPERATURE=, TOP_K=, TOP_P=, SEED=)
	$(KMATRIX)
serve: $(CORE) $(TRAIN) ## answer OpenAI's completions API on this machine (PORT=8000)
	$(KMATRIX)
export: $(CORE) $(TRAIN) ## write OUTPUT=<a new folder> in Hugging Face's layout
	$(KMATRIX)
import-model: $(CORE) $(TRAIN) ## make a checkpoint OUTPUT= of MODEL=<a folder in that layout>
	$(KMATRIX)

##@ Cleaning (results, checkpoints and datasets are never touched)
.PHONY: clean mrproper
clean: ## remove caches
	$(Q)rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis lib/*.egg-info
	$(Q)find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
mrproper: clean ## remove caches and .config
	$(Q)rm -f .config .config.old .config.refused .config.quickstart .config.quickstart.old
