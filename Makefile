# Everything runs in .venv, which the first target that needs it sets up. PYTHON chooses the interpreter to make it with.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1

.PHONY: setup test lint prove fuzz bench-engine clean

setup: .venv/ready

# torch first and by itself, so that nothing else chooses another build of it.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -r constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

test: setup            ## every test
	$(BIN)/python -m pytest -q

lint: setup            ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

prove: setup           ## check every schedule of two levels up to 64 ranks (ten minutes)
	STARTRAIL_PROVE_ALL=1 $(BIN)/python -m pytest -q tests/unit/test_schedule.py

fuzz: setup            ## 500 random plans x shapes x masks against float64 (CASES=n SEED=n)
	$(BIN)/python -m tests.fuzz --cases $(or $(CASES),500) --seed $(or $(SEED),0)

bench-engine: setup    ## speed and memory of the engine on this machine
	$(BIN)/python -m benchmarks.engine

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache
