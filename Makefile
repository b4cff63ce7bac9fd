# Every verb sets up what it needs by itself: a virtual environment in .venv, filled with the releases that
# constraints.txt names, once per change of it and of pyproject.toml.
#   make test                     make caption IN=photos ARGS="--model llava-hf/llava-1.5-7b-hf"
# JOBS=... says how many processes share the tests, 0 being none (for --pdb and -s).
# LOCK= (empty) takes the newest releases that pyproject.toml allows instead, in .venv-newest.
# PYTHON=... names the interpreter, VENV=... another environment; with LOCK= one that has torch already keeps it.

LOCK ?= constraints.txt
VENV ?= $(if $(LOCK),.venv,.venv-newest)
RUN := $(VENV)/bin
INSTALL = $(RUN)/python -m pip install --disable-pip-version-check --no-compile \
  $(if $(LOCK),-c $(LOCK),$(if $(filter .venv-newest,$(VENV)),--upgrade --upgrade-strategy eager))
# Bytecode is written when a module is first imported (even where the caller's shell turns that off), not at set-up
# for the thousands of modules that no verb needs.
export PYTHONDONTWRITEBYTECODE :=
IN ?=
PROMPT ?= a small red striped circle left of a large blue square on a grey background
ARGS ?=
JOBS ?= 2
OFFLINE := HF_HUB_OFFLINE=1
TESTS = $(OFFLINE) $(RUN)/python -m pytest -n $(JOBS) --dist loadfile

.PHONY: help check types test test-all bench gpu demo caption generate zoo docs lock newest
.DELETE_ON_ERROR:

help:
	@echo "make check | test | test-all | bench | gpu | demo | caption [IN=folder] | generate [PROMPT=text] | zoo | docs | lock; all but check take ARGS=options"

check: $(VENV)/.mmspec-dev types
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

# mypy knows packages by their folders, so the four are linked into one, as they are when installed.
types: $(VENV)/.mmspec-dev
	rm -rf build/types && mkdir -p build/types/mmspec
	ln -s $(addprefix ../../../,$(wildcard mmspec/*) pipelines kernels app) build/types/mmspec/
	ln -s ../../benchmarks build/types/
	$(RUN)/mypy

test: $(VENV)/.mmspec-dev
	$(TESTS) $(ARGS)

test-all: $(VENV)/.mmspec-dev
	$(TESTS) --full $(ARGS)

bench: $(VENV)/.mmspec-dev
	$(OFFLINE) $(RUN)/python -m mmspec.app.cli bench vlm --json benchmarks/results/vlm.json $(ARGS)

# Installs nothing, so that it runs offline, on a machine that has torch already: in $(VENV) where there is one.
gpu:
	$(OFFLINE) PYTHONPATH=. $(or $(wildcard $(RUN)/python),$(PYTHON),python3) -m benchmarks gpu $(ARGS)

zoo: $(VENV)/.mmspec-dev
	$(OFFLINE) $(RUN)/python -m benchmarks zoo $(ARGS)

docs: $(VENV)/.mmspec-docs
	NO_MKDOCS_2_WARNING=1 $(OFFLINE) $(RUN)/python -m mkdocs build --strict $(ARGS)

# Keeps what constraints.txt has where pyproject.toml still allows it; ARGS="-P transformers" takes the newest release
# of one package, ARGS=--upgrade those of all. Only this verb needs uv; it reads metadata and downloads no package.
lock: | $(RUN)/python
	$(RUN)/python -m venv build/uv
	build/uv/bin/python -m pip install --disable-pip-version-check --quiet uv
	UV_CUSTOM_COMPILE_COMMAND="make lock" build/uv/bin/uv pip compile pyproject.toml --universal -p 3.11 \
	  --extra dev --extra docs --no-annotate --quiet -o constraints.txt $(ARGS)

demo: $(VENV)/.mmspec-base
	$(OFFLINE) $(RUN)/python -m mmspec.app.cli demo $(ARGS)

# Online, because --model may name a model on the Hub; the embedded one needs no network.
caption: $(VENV)/.mmspec-base
	$(RUN)/python -m mmspec.app.cli caption $(if $(IN),"$(IN)") $(ARGS)

generate: $(VENV)/.mmspec-base
	$(RUN)/python -m mmspec.app.cli generate "$(PROMPT)" --compare $(ARGS)

$(VENV)/.mmspec-base: pyproject.toml $(or $(LOCK),newest) | $(RUN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/.mmspec-dev: pyproject.toml $(or $(LOCK),newest) | $(RUN)/python
	$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.mmspec-base

$(VENV)/.mmspec-docs: pyproject.toml $(or $(LOCK),newest) | $(RUN)/python
	$(INSTALL) -e ".[docs]"
	@touch $@ $(VENV)/.mmspec-base

# The first interpreter that is new enough; its venv module is a package of its own on Debian and Ubuntu.
$(RUN)/python:
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "$(VENV): made with $$("$$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	    "$$python" -m venv "$(VENV)" && exit 0; \
	    echo "make: $$python cannot make a virtual environment; on Debian or Ubuntu: apt install python3-venv" >&2; \
	    rm -rf "$(VENV)"; exit 1; \
	  fi; \
	done; \
	echo "make: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	exit 1
