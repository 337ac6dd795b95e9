# make demo      set up, convert the demo model through all seven stages, print the results table
# make test      set up, run the quick tests (less than three minutes on two cores)
# make test-all  the slow tests too: whole commands, every model family, related/, bench/
# make mutants   check that the tests notice faults: mutate one line at a time
PYTHON ?= python3
PYTEST = .venv/bin/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-all mutants lint clean

.venv/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q -r requirements-dev.txt
	touch $@

demo: .venv/ready
	PYTHON=.venv/bin/python bash pipelines/demo.sh

test: .venv/ready
	$(PYTEST)

test-all: .venv/ready
	$(PYTEST) -m "slow or not slow"

mutants: .venv/ready
	.venv/bin/python tests/mutants.py

lint: .venv/ready
	.venv/bin/ruff check

clean:
	rm -rf runs/demo
