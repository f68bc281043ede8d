# On a fresh machine with python3, make and g++ two commands are enough: `make test` and `make lab`.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := $(shell find trimtab/ops -name '*.cpp' -o -name '*.h') trimtab/ops/native/table.py \
	CMakeLists.txt pyproject.toml constraints.txt
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)

.PHONY: test test-slow test-oldest lab docs wheel bench clean

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

# Real training, long searches, and the built wheel in an empty environment.
test-slow: .venv/installed
	$(BIN)/pytest -m slow

# The fast rooms with the oldest torch that pyproject.toml allows, in an environment of their own.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/pytest -n 2 tests/ops tests/optim tests/nn

# The default study and its page. If it was stopped, the same command resumes it.
lab: .venv/ready
	$(BIN)/trimtab lab --out runs/lab

# The documentation site in site/. --strict: a broken link or an unknown name is an error.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# An sdist and a wheel in dist/. The wheel is built from the sdist, so a file missing there is noticed.
wheel: .venv/installed
	$(BIN)/python -m build

bench: .venv/installed
	$(BIN)/python -m bench.ops
	$(BIN)/python -m bench.optim
	$(BIN)/python -m bench.nn
	$(BIN)/python -m bench.train
	$(BIN)/python -m bench.watch
	$(BIN)/python -m bench.hosts
	$(BIN)/python -m bench.lab
	$(BIN)/python -m bench.memory

# torch is installed first and alone, so that no other package selects another version.
.venv/ready: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[lab]'
	touch $@

# What tests and benchmarks need. Libraries that would select another torch are installed without their dependencies:
# those that we compare with, and trainers. PyPI's torchvision needs the CUDA build of torch, and transformers fails
# where it is broken, so what imports it is in a folder of its own (tests/hosts/vision.py).
.venv/installed: .venv/ready
	$(BIN)/pip install --quiet -c constraints.txt 'trimtab[dev]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt bitsandbytes torchao torch-optimi \
		deepspeed einops hjson ninja py-cpuinfo spmd_types torchtitan
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/vision -c constraints.txt \
		torchvision open_clip_torch timm mosaicml mosaicml-cli arrow argcomplete backoff coolname ftfy gql graphql-core \
		pytorch_ranger questionary ruamel.yaml termcolor torch_optimizer validators websockets
	touch $@

.venv/docs: .venv/ready
	$(BIN)/pip install --quiet -c constraints.txt 'trimtab[docs]'
	touch $@

.venv-oldest/installed: $(SOURCES)
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	grep -v '^torch==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet 'torch==$(OLDEST).*'
	.venv-oldest/bin/pip install --quiet -c .venv-oldest/constraints.txt -e '.[hf]' hypothesis pytest pytest-xdist triton
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist site
