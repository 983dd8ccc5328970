# The course's commands; `make` alone lists them. The first one that needs it sets up .venv, once.
# Nothing is written outside this folder, apart from what JupyterLab keeps for its user (`make lab`) and from models
# that you ask for by name (Hugging Face's cache).

PYTHON ?= python3
SHELL  := bash
VENV   := .venv
STAMP  := $(VENV)/.set-up
RUN    := $(VENV)/bin/python
# transformers of another version lies here, beside the environment and in front of it on the path; torch is shared.
OLDEST := $(CURDIR)/build/oldest
OLDEST_TESTS := families models kv_cache batching batching_exactness generation ragged ragged_exactness
LESSON_FILES := $(sort $(wildcard notebooks/[0-9]*.ipynb))

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# Two torch processes on the same cores slow each other many times over while their idle threads spin.
# Passive waiting ends that; a benchmark, which runs alone, is better off without.
course test test-slow test-oldest support-matrix notebooks lab serve release grade: export OMP_WAIT_POLICY := PASSIVE

# Runs that should be the same everywhere see no personal settings of Jupyter and matplotlib, and leave no traces.
CACHE := $(CURDIR)/build/cache
course test test-slow notebooks images release grade bench: | build/cache
course test test-slow notebooks images release grade bench: export MPLCONFIGDIR := $(CACHE)/matplotlib
course test test-slow notebooks images release grade: export IPYTHONDIR := $(CACHE)/ipython
course test test-slow notebooks images release grade: export JUPYTER_CONFIG_DIR := $(CACHE)/jupyter/config
course test test-slow notebooks images release grade: export JUPYTER_DATA_DIR := $(CACHE)/jupyter/data
course test test-slow notebooks images release grade: export JUPYTER_RUNTIME_DIR := $(CACHE)/jupyter/runtime
# PyTorch then takes memory for weights in huge pages: a few percent for every engine that is built on it.
bench: export THP_MEM_ALLOC_ENABLE := 1
# The stored outputs are the embedded model's.
test test-slow test-oldest: export COURSE_MODEL :=

.DEFAULT_GOAL := help
.PHONY: help course lab serve test test-slow test-oldest support-matrix bench notebooks images release grade colab tiny-model clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

course: $(STAMP)  ## run the lessons and write pages to read to build/course/ [LESSONS="1 3"] [MODEL=folder-or-hub-id]
	@$(RUN) notebooks/run_course.py $(if $(LESSONS),--lessons "$(LESSONS)") $(if $(MODEL),--model "$(MODEL)")

lab: $(STAMP)  ## open lesson 1 in JupyterLab
	$(VENV)/bin/jupyter lab $(ARGS) $(firstword $(LESSON_FILES))

serve: $(STAMP)  ## the embedded model for OpenAI's clients, a window into the engine at http://127.0.0.1:8000 [ARGS="--rows 16"]
	$(RUN) -m helpers.server $(ARGS)

test: $(STAMP)  ## lint, unit tests, and every lesson run and compared with its stored outputs
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pytest tests
	$(RUN) -m pytest --nbval $(or $(LESSON_FILES),notebooks/no-lessons-found.ipynb)

test-slow: $(STAMP)  ## grading, lone notebooks as on Colab, the page in a browser, the server under fire: minutes
	$(RUN) -m pytest tests -m slow

test-oldest: $(OLDEST)/.set-up  ## the tests of caches and models, on the oldest transformers that is supported
	PYTHONPATH=$(OLDEST) $(RUN) -m pytest $(addprefix tests/test_,$(addsuffix .py,$(OLDEST_TESTS)))

support-matrix: $(OLDEST)/.set-up  ## measure every model family on both transformers and write SUPPORT.md
	$(RUN) -m tests.support_matrix

bench: $(STAMP)  ## measure every engine that is installed, in turns, on an idle machine [ARGS="--dtype float32 bfloat16"]
	$(RUN) -m benchmarks $(ARGS)

notebooks: $(STAMP)  ## run the lessons and store their outputs in notebooks/ [LESSONS=3]
	@$(RUN) notebooks/run_course.py --save $(if $(LESSONS),--lessons "$(LESSONS)")

release: $(STAMP)  ## write the student notebooks in notebooks/exercises/release/ from their sources
	$(RUN) notebooks/exercises/grade.py release

grade: $(STAMP)  ## grade SUBMITTED=folder of <student>/<exercise>.ipynb into build/grades/ [ARGS="--timeout 60 --jobs 2"]
	@test -n "$(SUBMITTED)" || { echo >&2 'Which submissions? make grade SUBMITTED=folder'; exit 1; }
	@$(RUN) notebooks/exercises/grade.py grade $(ARGS) "$(SUBMITTED)"

images: $(STAMP)  ## draw the figures in images/ anew
	$(RUN) images/draw.py $(ARGS)

colab: $(STAMP)  ## write the repository and its Colab badges into all notebooks and README.md [REPO=owner/name]
	@$(RUN) notebooks/colab.py $(if $(REPO),--repo "$(REPO)")

tiny-model: $(STAMP)  ## train the embedded model anew, under half an hour on two cores
	$(RUN) -m helpers.tiny_model.train $(ARGS)

build/cache:
	@mkdir -p $@

clean:  ## remove what the commands wrote; .venv stays
	rm -rf build .pytest_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -exec rm -rf {} +

$(OLDEST)/.set-up: requirements-oldest.txt $(STAMP)
	rm -rf $(OLDEST)
	$(RUN) -m pip install -q --no-cache-dir --disable-pip-version-check --no-deps --target $(OLDEST) -r requirements-oldest.txt
	@touch $@

# pip's own report is hundreds of lines: shown is one line that changes, or one a package where there is no terminal.
$(STAMP): requirements.txt requirements-dev.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo >&2 \
	    'The course needs Python 3.11 or newer and "$(PYTHON)" is not: name one that is, as in make PYTHON=python3.12'; \
	    exit 1; }
	@echo "Setting up .venv, once: about 140 packages, one to three minutes."
	@$(PYTHON) -m venv $(VENV) || { echo >&2 \
	    '"$(PYTHON) -m venv" failed: install it (Debian, Ubuntu: python3-venv) or name another Python with make PYTHON=...'; \
	    exit 1; }
	@set -o pipefail; \
	show() { if [ -t 1 ]; then printf '\r\033[K  %s' "$$1"; else echo "  $$1"; fi; }; \
	$(RUN) -m pip install --no-cache-dir --disable-pip-version-check -c constraints.txt -r requirements-dev.txt \
	| while read -r word name _; do case $$word in \
	    Collecting) show "$$((++count)) fetching $$name" ;; \
	    Installing) show "installing them, about half a minute" ;; \
	  esac; done; \
	show "done in $$SECONDS s"; echo
	@touch $@
