# Two commands do everything on a fresh machine with python3, make and g++: `make test` and `make lab`.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := $(shell find trimtab/ops -name "*.cpp" -o -name "*.h") trimtab/ops/native/table.py CMakeLists.txt pyproject.toml constraints.txt

.PHONY: test lab bench clean

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

# The default study and its page; run again, it goes on where it was stopped.
lab: .venv/ready
	$(BIN)/trimtab lab --out runs/lab

bench: .venv/installed
	$(BIN)/python -m bench.ops
	$(BIN)/python -m bench.optim
	$(BIN)/python -m bench.nn
	$(BIN)/python -m bench.train
	$(BIN)/python -m bench.watch
	$(BIN)/python -m bench.lab

# torch first and alone, so that nothing else can pick another one.
.venv/ready: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[lab]'
	touch $@

# What tests and benchmarks need besides. The peers, whose states we read and whose speed we compare with, come without
# their dependencies: they must not choose the torch either.
.venv/installed: .venv/ready
	$(BIN)/pip install --quiet -c constraints.txt 'trimtab[dev]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt bitsandbytes torchao torch-optimi
	touch $@

clean:
	rm -rf .venv build
