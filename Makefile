# make setup | demo | test | site | run-page | test-gpu | torch-suite | soak | mutants | lint
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMP_NUM_THREADS := 1
# Some images set it, and each rank would then compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test suite site run-page test-gpu torch-suite soak mutants lint

setup: .venv/installed

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: setup
	mpirun -n 4 python -m minidist train --config demo.toml --dp 4 --verify --metrics runs/demo/losses.jsonl
	mpirun -n 4 python -m minidist stages --config demo.toml --dp 4 --steps 12 --metrics runs/demo/stages.jsonl
	mpirun -n 4 python -m minidist layouts --config demo.toml --steps 12
	python -m minidist picture --losses runs/demo/losses.jsonl runs/demo/losses.serial.jsonl \
		--stages runs/demo/stages.jsonl --to runs/demo/demo.png

# The page that runs the package, alone, in runs/page: serve it by `python -m http.server`. PYODIDE=FOLDER puts a copy of Pyodide beside it.
run-page: setup
	python docs/run_here/build.py --to runs/page $(if $(PYODIDE),--pyodide "$(PYODIDE)")

# The suite leaves a part of the cores idle: lint takes that.
test: setup
	$(MAKE) --jobs 2 lint suite

suite: setup
	python -m pytest --numprocesses 3 --dist loadfile

# site/, and all of it as one file that can be put anywhere. PYODIDE=FOLDER puts a copy of Pyodide beside the pages.
site: setup
	python docs/site/build.py --to site --zip site.zip $(if $(PYODIDE),--pyodide "$(PYODIDE)")

# With the Python at hand: it needs pytest, numpy, torch and safetensors, and installs nothing.
# PART=1/3, 2/3, 3/3: each is meant to take less than ten minutes. DEVICE=cpu tries the tests themselves, over gloo.
test-gpu:
	MINIDIST_TEST_PART=$(PART) MINIDIST_TEST_DEVICE=$(DEVICE) $(PYTHON) -m pytest -m gpu -vv -s -rs --durations 20 tests/gpu

# torch's own tests of torch.distributed, from the installed wheel, on the backend "minidist".
torch-suite: setup
	python tests/torch_suite/run.py

lint: setup
	ruff format --check .
	ruff check .
	mypy

soak: setup
	python -m pytest -m soak --timeout 3600

mutants: setup
	python tests/mutations/run.py
