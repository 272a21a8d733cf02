# One command to train, one to test; `make help` lists the rest.
PYTHON ?= python3
MPI    ?= openmpi
RANKS  ?= 2
VENV    = .venv
BIN     = $(VENV)/bin

.PHONY: help train check test test-all test-drawn bench notebook notebooks docs gallery lint format mutants clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

train: $(VENV)/.train  ## train a CNN on real handwritten digits on 2 ranks (RANKS=n for others)
	$(BIN)/python scripts/train.py --ranks $(RANKS)

# Several files at a time: most of a test on ranks is waiting for processes to start, or for each other.
PYTEST  = $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

# Gradients of every layer, every algorithm on every number of ranks to 9, every strategy against one process.
CHECKS  = tests/nn/test_checks.py tests/collectives/test_algorithms.py tests/parallel/test_declared.py

check: $(VENV)/.test  ## the core alone: gradients, algorithms, a run of each strategy; under a minute
	$(PYTEST) -m "not exhaustive" $(CHECKS)

test: $(VENV)/.test  ## run the tests, on as many local ranks as each needs
	$(PYTEST) -m "not exhaustive"

test-all: $(VENV)/.test  ## and those that try the same on more: all sizes, victims, dtypes, large models
	$(PYTEST)

test-drawn: $(VENV)/.test  ## test, and one in five of those that test-all adds, drawn by the code
	$(PYTEST) --exhaustive 5

notebooks: $(VENV)/.test  ## run the course, each exercise unsolved, with wrong answers, and solved
	$(BIN)/python scripts/course.py

notebook: $(VENV)/.course  ## open the course in Jupyter: the students' notebooks, with gaps
	cd notebooks/student && ../../$(BIN)/python -m jupyter lab

bench: $(VENV)/.bench  ## compare with the peers, all suites, into runs/bench.json
	mkdir -p runs
	$(BIN)/python scripts/bench.py all --json runs/bench.json

docs: $(VENV)/.docs  ## write the documentation, docs/_build/html/index.html: no network is needed to read it
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going docs docs/_build/html
	@echo "docs/_build/html/index.html"

gallery: $(VENV)/.train  ## draw the pictures of docs/pictures again, after a change of what they show
	$(BIN)/python scripts/gallery.py

lint: $(VENV)/.lint  ## ruff check and format check; the order of imports; mypy on the public names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy --strict --ignore-missing-imports --follow-imports=silent tests/typed_program.py

format: $(VENV)/.lint  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mutants: $(VENV)/.mutation  ## change the code in 200 places, one at a time: does a test fail? (hours; goes on where it ended)
	$(BIN)/python scripts/mutants.py

clean:  ## remove the virtual environment and what tools left
	rm -rf $(VENV) build docs/_build docs/notebooks docs/api/*.rst *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Stamps: the environment is made once, and again when setup.cfg changes.
$(VENV)/.train: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$(MPI)]"
	@touch $@

$(VENV)/.test: $(VENV)/.train
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$(MPI),test]"
	@touch $@

$(VENV)/.course: $(VENV)/.train
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$(MPI),course]"
	@touch $@

$(VENV)/.bench: $(VENV)/.train
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$(MPI),reference]"
	@touch $@

$(VENV)/.lint: $(VENV)/.train
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[lint]"
	@touch $@

$(VENV)/.docs: $(VENV)/.train
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$(MPI),docs]"
	@touch $@

$(VENV)/.mutation: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$(MPI),test,mutation]"
	@touch $@
