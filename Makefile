# make demo: set up, convert the embedded model through all seven stages, print the results table
# make test: set up, run the tests    (make slow: the ones that take minutes)
PYTHON ?= python3

.PHONY: demo test slow lint clean

.venv/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q -r requirements-dev.txt
	touch $@

demo: .venv/ready
	PYTHON=.venv/bin/python bash pipelines/demo.sh

test: .venv/ready
	.venv/bin/python -m pytest

slow: .venv/ready
	.venv/bin/python -m pytest -m slow

lint: .venv/ready
	.venv/bin/ruff check

clean:
	rm -rf runs/demo
