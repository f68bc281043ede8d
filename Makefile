# Two commands do everything on a fresh machine with python3, make and g++: `make test` and `make lab`.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := $(wildcard trimtab/ops/*.cpp trimtab/ops/*.h) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: test lab bench clean

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

lab: .venv/installed
	$(BIN)/trimtab doctor
	rm -rf runs/lab
	$(BIN)/trimtab train gpt-tiny --out runs/lab
	$(BIN)/trimtab sample runs/lab --tokens 200

bench: .venv/installed
	$(BIN)/python -m bench.ops
	$(BIN)/python -m bench.optim
	$(BIN)/python -m bench.nn
	$(BIN)/python -m bench.train

# torch first and alone, so that nothing else can pick another one. The peers, whose states we read and whose speed we
# compare with, come without their dependencies for the same reason.
.venv/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt bitsandbytes torchao torch-optimi
	touch $@

clean:
	rm -rf .venv build
