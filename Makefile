# The course's commands; `make` alone lists them. The first command that needs .venv sets it up.
# Nothing is written outside this folder, with two exceptions: JupyterLab keeps its user's settings (`make lab`), and a
# model that you ask for by name is downloaded into the cache of Hugging Face.

PYTHON ?= python3
SHELL  := bash
VENV   := .venv
STAMP  := $(VENV)/.set-up
RUN    := $(VENV)/bin/python
CLUSTER := $(VENV)/.cluster
# The oldest supported transformers is installed here and comes first on the path; torch is shared with .venv.
OLDEST := $(CURDIR)/build/oldest
OLDEST_TESTS := families models kv_cache executor batch_invariant sampling ragged ragged_exactness engine_exactness beam_search quantized_kv_cache
# The slow tests run in two streams. Most tests of the second one wait, for a browser or for processes that start. Those
# of checks, figures and reinforcement learning compute; they are there because the first stream is the longer one.
SLOW := $(shell grep -ls pytest.mark.slow tests/test_*.py)
IN_SECOND := checks cluster page playground published_figures reinforcement_learning simulator site tensor_parallel
SECOND := $(filter $(foreach name,$(IN_SECOND),tests/test_$(name).py),$(SLOW))
LESSON_FILES := $(foreach names,[0-9]_* [0-9][0-9]_* extra/*,$(sort $(wildcard notebooks/$(names).ipynb)))
# Copies, because running a notebook changes its file. `make lab` never overwrites them, and `make clean` keeps them.
LAB_FILES := $(patsubst notebooks/%,%,$(LESSON_FILES) $(sort $(wildcard notebooks/exercises/release/*/*.ipynb)))

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# Idle threads of PyTorch wait in a busy loop, so two processes on the same cores slow each other down many times over.
# Passive waiting avoids that. Benchmarks run alone and are faster without it.
course test test-lessons test-slow soak test-oldest support-matrix notebooks lab serve cluster release grade: export OMP_WAIT_POLICY := PASSIVE

# Compiled kernels stay in this folder, too; without this variable they go to the user's cache folder.
export COURSE_KERNEL_CACHE := $(CURDIR)/build/kernels

# These commands should do the same everywhere, so they ignore personal settings of Jupyter and matplotlib.
CACHE := $(CURDIR)/build/cache
course test test-lessons test-slow notebooks images release grade bench: | build/cache
course test test-lessons test-slow notebooks images release grade bench: export MPLCONFIGDIR := $(CACHE)/matplotlib
course test test-lessons test-slow notebooks images release grade: export IPYTHONDIR := $(CACHE)/ipython
course test test-lessons test-slow notebooks images release grade: export JUPYTER_CONFIG_DIR := $(CACHE)/jupyter/config
course test test-lessons test-slow notebooks images release grade: export JUPYTER_DATA_DIR := $(CACHE)/jupyter/data
course test test-lessons test-slow notebooks images release grade: export JUPYTER_RUNTIME_DIR := $(CACHE)/jupyter/runtime
# With this setting PyTorch allocates weights in huge pages, which makes every engine on PyTorch a few percent faster.
bench: export THP_MEM_ALLOC_ENABLE := 1
# The stored outputs come from the embedded model.
test test-lessons test-slow soak test-oldest: export COURSE_MODEL :=

.DEFAULT_GOAL := help
.PHONY: help course site slides lab serve cluster test test-lessons test-slow soak test-oldest support-matrix bench notebooks images release handout grade colab tiny-model tiny-adapters clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# The lessons that LESSONS leaves out come from their stored outputs, unless these are another model's.
course: $(STAMP)  ## run the lessons and build a site from them in build/site/ [LESSONS="1 3"] [MODEL=folder-or-hub-id]
	@rm -rf build/course
	@$(RUN) notebooks/run_course.py $(if $(LESSONS),--lessons "$(LESSONS)") $(if $(MODEL),--model "$(MODEL)"); ran=$$?; \
	[ $$ran -gt 1 ] || $(RUN) docs/build_site.py --notebooks build/course $(if $(LESSONS),$(if $(MODEL),,notebooks)) --show || exit; \
	exit $$ran

site: $(STAMP)  ## build the site in build/site/ from the stored outputs, without running the lessons [ARGS=--serve] [REPO=owner/name]
	@$(RUN) docs/build_site.py --strict $(if $(REPO),--repo "$(REPO)") $(ARGS)

slides: $(STAMP)  ## make a deck of slides from each lesson's pictures and questions in build/slides/, which works offline
	@$(RUN) docs/build_slides.py

# Without nbgrader's menus and the question about Jupyter's news. Your own settings of Jupyter still apply.
lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/.jupyter
lab: $(STAMP)  ## open lesson 1 in JupyterLab; your copies of the notebooks are in lab/
	@[ "$$(id -u)" != 0 ] || [[ "$(ARGS)" == *--allow-root* ]] || { echo >&2 \
	    'JupyterLab does not run as root. Be another user or, in a container of your own, say make lab ARGS=--allow-root'; \
	    exit 1; }
	@$(RUN) notebooks/copy_to_lab.py $(LAB_FILES)
	$(VENV)/bin/jupyter lab $(ARGS) $(addprefix lab/,$(firstword $(filter 1_%,$(LAB_FILES))))

serve: $(STAMP)  ## serve the embedded model to OpenAI clients, with a live view at http://127.0.0.1:8000 [ARGS="--rows 16"]
	$(RUN) -m helpers.server $(ARGS)

cluster: $(CLUSTER)  ## serve it from two replicas, with a live view at http://127.0.0.1:8100 [ARGS="--replicas 4"]
	$(RUN) -m helpers.cluster $(ARGS)

# $(1) and $(2) are two commands that run beside each other.
IN_TWO_STREAMS = @echo "The tests run in two streams, and the results of the second one follow."; \
	mkdir -p build; $(2) >build/second.log 2>&1 & second=$$!; \
	trap "kill $$second 2>/dev/null" EXIT; \
	$(1); first=$$?; \
	wait $$second; second=$$?; cat build/second.log; \
	exit $$((first || second))

# Many tests of a server wait for minutes before they fail. After ten, the others would tell nothing new.
UNIT := $(RUN) -m pytest tests -rR --maxfail 10
test: $(STAMP)  ## lint, and run the unit tests that are not slow
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(call IN_TWO_STREAMS,$(UNIT) --ignore-glob 'tests/test_[a-f]*',$(UNIT) --ignore-glob 'tests/test_[g-z]*')

# The model of the lessons is so small that it is faster with one thread. The lessons' kernels are forks of one process:
# the import of PyTorch would take a fifth of their time.
LESSONS_RUN := OMP_NUM_THREADS=1 $(RUN) -m pytest -p tests.support.forked_kernels --nbval
test-lessons: $(STAMP)  ## run every lesson, and compare it with its stored outputs
	$(call IN_TWO_STREAMS,$(LESSONS_RUN) $(filter notebooks/1%,$(LESSON_FILES)),$(LESSONS_RUN) $(filter-out notebooks/1%,$(LESSON_FILES)))

# Browsers and killed processes depend on how busy the machine is, so a test that fails is run once more, and reported.
SLOW_RUN := $(RUN) -m pytest -m slow --timeout 900 --reruns 1 -rRs --durations 10
test-slow: $(STAMP) $(CLUSTER)  ## run the slow tests: grading, Colab, the live view in a browser, an installed wheel, killed processes
	$(call IN_TWO_STREAMS,$(SLOW_RUN) $(filter-out $(SECOND),$(SLOW)),$(SLOW_RUN) $(SECOND))

soak: $(STAMP)  ## overload a server with clients that misbehave, kill it twice, and report; takes minutes [ARGS="--requests 1000"]
	$(RUN) -m tests.tools.soak $(ARGS)

test-oldest: $(OLDEST)/.set-up  ## test caches, models and engine on the oldest supported transformers
	PYTHONPATH=$(OLDEST) $(RUN) -m pytest $(addprefix tests/test_,$(addsuffix .py,$(OLDEST_TESTS)))

support-matrix: $(OLDEST)/.set-up  ## measure every model family on both versions of transformers, and write the table of SUPPORT.md
	$(RUN) -m tests.tools.support_matrix

bench: $(STAMP)  ## measure every installed engine in turn; needs an idle machine [ARGS="--dtype float32 bfloat16"]
	$(RUN) -m benchmarks $(ARGS)

notebooks: $(STAMP)  ## run the lessons and store their outputs in notebooks/ [LESSONS=3]
	@$(RUN) notebooks/run_course.py --save $(if $(LESSONS),--lessons "$(LESSONS)")

release: $(STAMP)  ## write the student notebooks in notebooks/exercises/release/ from their sources
	$(RUN) notebooks/exercises/grade.py release

# Without the solutions, and without the page that says what a grader cannot notice.
handout: ZIP ?= build/course.zip
handout:  ## write build/course.zip, the course for students: the last commit without solutions
	@mkdir -p $(dir $(ZIP))
	git archive -o $(ZIP) HEAD . ':!INSTRUCTOR.md' ':!notebooks/exercises/source' ':!tests/answers'

grade: $(STAMP)  ## grade SUBMITTED=folder of <student>/<exercise>.ipynb into build/grades/ [ARGS="--jobs 2 --seed 7"]
	@test -n "$(SUBMITTED)" || { echo >&2 'Name the folder of the submissions: make grade SUBMITTED=folder'; exit 1; }
	@$(RUN) notebooks/exercises/grade.py grade $(ARGS) "$(SUBMITTED)"

images: $(STAMP)  ## redraw the figures in images/
	$(RUN) images/draw.py $(ARGS)

colab: $(STAMP)  ## write the repository's name and Colab badges into all notebooks and README.md [REPO=owner/name]
	@$(RUN) notebooks/colab.py $(if $(REPO),--repo "$(REPO)")

tiny-model: $(STAMP)  ## retrain the embedded model, which takes under half an hour on two cores
	$(RUN) -m helpers.tiny_model.train $(ARGS)

tiny-adapters: $(STAMP)  ## retrain the adapters of the embedded model, which takes under ten minutes
	$(RUN) -m helpers.tiny_model.train_adapters $(ARGS)

# Matplotlib lists the fonts of a machine once. It warns if that takes more than 5 s, and a lesson may not print warnings.
build/cache: | $(STAMP)
	@mkdir -p $@
	@MPLCONFIGDIR=$(CACHE)/matplotlib $(RUN) -c "import matplotlib.font_manager" 2>/dev/null

clean:  ## remove everything that the commands wrote, except .venv and lab/
	rm -rf build *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name .venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -exec rm -rf {} +

$(CLUSTER): constraints.txt | $(STAMP)
	@$(RUN) -m pip install -q --no-cache-dir --disable-pip-version-check -c constraints.txt ray
	@touch $@

$(OLDEST)/.set-up: requirements-oldest.txt $(STAMP)
	rm -rf $(OLDEST)
	$(RUN) -m pip install -q --no-cache-dir --disable-pip-version-check --no-deps --target $(OLDEST) -r requirements-oldest.txt
	@touch $@

# Newer Pythons than the last tested one lack wheels for the versions in constraints.txt.
# The tested pip comes first, because the one that Python brings along may take three times as long to find the versions.
# pip reports hundreds of lines. A terminal shows one line that changes, a log file one line per package. pip compiles
# modules on one core, compileall on all of them. `helpers` itself is installed as a link to this folder, so that a script
# elsewhere finds it; that fetches nothing. A few templates in packages are no valid Python and stay as they are.
# Modules that hardly any program imports, a fifth of the whole, are left to Python, which compiles them when needed.
# In setuptools' other modes, a copy of the package would find its missing parts in this folder.
LINK := --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
RARE := /(tests?|torch/testing|transformers/models)/
$(STAMP): requirements.txt requirements-dev.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { echo >&2 \
	    'The course needs Python 3.11 to 3.14, which "$(PYTHON)" is not: name one, as in make PYTHON=python3.12'; \
	    exit 1; }
	@echo "Setting up .venv. This happens once and takes one to three minutes."
	@$(PYTHON) -m venv $(VENV) || { echo >&2 \
	    '"$(PYTHON) -m venv" failed: install python3-venv (Debian, Ubuntu), or name another Python with make PYTHON=...'; \
	    exit 1; }
	@set -o pipefail; \
	show() { if [ -t 1 ]; then printf '\r\033[K  %s' "$$1"; else echo "  $$1"; fi; }; \
	pip="$(RUN) -m pip install --no-compile --no-cache-dir --disable-pip-version-check -c constraints.txt"; \
	$$pip -q --upgrade pip || exit; \
	$$pip -r requirements-dev.txt \
	| while read -r word name _; do case $$word in \
	    Collecting) show "$$((++count)) fetching $$name" ;; \
	    Installing) show "installing the packages" ;; \
	  esac; done || exit; \
	PYTHONWARNINGS=ignore $$pip -q $(LINK) || exit; \
	show "compiling the packages"; $(RUN) -m compileall -q -j 0 -x '$(RARE)' $(VENV)/lib >/dev/null 2>&1; \
	show "done in $$SECONDS s"; echo
	@touch $@
