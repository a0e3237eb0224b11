# Everything runs in .venv, which the first target that needs it sets up. PYTHON chooses the interpreter to make it with.
# TORCH=2.x runs any target with that torch instead, in .venv-torch-2.x.
PYTHON ?= python3
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1
unexport PYTHONDONTWRITEBYTECODE  # or every program that a test starts compiles everything again

export NO_MKDOCS_2_WARNING := 1  # advertises another generator

.PHONY: setup setup-bench validate validate-hardware validate-paper scaling test test-all test-axolotl test-automodel lint prove fuzz soak exits chaos train train-dit bench bench-quick bench-engine bench-memory bench-train long-context docs dist clean

setup: $(VENV)/ready

# torch first and by itself, so that nothing else chooses another build of it.
$(VENV)/ready: pyproject.toml constraints.txt tests/integrations/torchtitan.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),echo "torch~=$(TORCH).0",cat constraints.txt) > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet -r $(VENV)/constraints.txt
	$(BIN)/pip install --quiet -c $(VENV)/constraints.txt -e ".[dev]"
	$(if $(TORCH),,$(BIN)/pip install --quiet --no-deps -r tests/integrations/torchtitan.txt)
	touch $@

setup-bench: $(VENV)/ready-bench

# The peers name torch without a version; the constraint keeps the one that is there.
$(VENV)/ready-bench: $(VENV)/ready
	$(BIN)/pip install --quiet -c $(VENV)/constraints.txt -e ".[bench]"
	touch $@

# Several at a time on two cores, since many tests wait; then, one by one, those that measure the machine. Tests that
# import transformers run by themselves: ranks are forked from the workers, and a larger process takes longer to fork.
PYTEST := $(BIN)/python -m pytest -q --durations=10
LARGE := tests/integrations tests/diagnostics

test: setup            ## every test, plans x shapes pairwise (tests/README.md)
	$(PYTEST) -n 4 --dist loadgroup -m "not alone" $(addprefix --ignore=,$(LARGE)) tests
	$(PYTEST) -n 4 --dist loadgroup $(LARGE) src workshop validation
	$(PYTEST) -m alone tests/workshop/lab

test-all: setup        ## the same with whole products instead of pairs
	STARTRAIL_TEST_ALL=1 $(MAKE) test

# axolotl pins its own versions of transformers, accelerate and TRL: in a folder that only this test sees.
test-axolotl: $(VENV)/axolotl/ready ## the plugin for axolotl, with axolotl itself, which it installs first (450 MB)
	PYTHONPATH=$(VENV)/axolotl $(PYTEST) tests/integrations/test_axolotl.py

$(VENV)/axolotl/ready: $(VENV)/ready tests/integrations/axolotl.txt
	rm -rf $(VENV)/axolotl
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/axolotl -r tests/integrations/axolotl.txt
	touch $@

# NeMo Automodel without what it depends on: the contract is plain torch.
test-automodel: $(VENV)/automodel/ready ## the adapter to NeMo Automodel, with its own code, which it installs first
	PYTHONPATH=$(VENV)/automodel $(PYTEST) tests/integrations/test_automodel.py

$(VENV)/automodel/ready: $(VENV)/ready tests/integrations/automodel.txt
	rm -rf $(VENV)/automodel
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/automodel -r tests/integrations/automodel.txt
	touch $@

lint: setup            ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

prove: setup           ## check every schedule of two levels and many of three up to 64 ranks (a quarter of an hour)
	STARTRAIL_PROVE_ALL=1 $(BIN)/python -m pytest -q -rP -k test_prove tests/schedule/test_proof.py

fuzz: setup            ## 500 random plans x shapes x masks against float64, 1,000 of the token helpers, 500 of hybrid layers (CASES=n SEED=n)
	$(BIN)/python -m tests.fuzz --cases $(or $(CASES),500) --seed $(or $(SEED),0)
	$(BIN)/python -m tests.fuzz_tokens --cases $(or $(CASES),1000) --seed $(or $(SEED),0)
	$(BIN)/python -m tests.fuzz_layers --cases $(or $(CASES),500) --seed $(or $(SEED),0)

soak: setup            ## 20,000 calls of ever new kinds: memory, descriptors, threads and store keys stay flat
	$(BIN)/python -m tests.soak

exits: setup           ## 200 processes of examples and training end on a loaded machine, none by an abort (EXITS=n)
	$(BIN)/python -m tests.exits --exits $(or $(EXITS),200)

chaos: setup           ## a training run under 64 faults, locally and on an emulated cluster: 10 minutes (FAULTS=n SEED=n)
	$(BIN)/python -m tests.chaos --faults $(or $(FAULTS),64) --seed $(or $(SEED),0)

bench: setup-bench     ## all contenders on emulated clusters: report/report.html, 25 minutes; then sparse masks, recurrences, latents
	$(BIN)/startrail bench --out report
	$(BIN)/startrail bench sparse --out report
	$(BIN)/startrail bench hybrid --out report
	$(BIN)/startrail bench latents --out report

bench-quick: setup-bench ## the same on 4 nodes of 4 ranks only (3 minutes)
	$(BIN)/startrail bench --quick --out report

bench-engine: setup    ## speed, memory and host time of the engine on this machine (ARGS="--against TREE": two trees)
	$(BIN)/startrail bench engine $(ARGS)

train: setup           ## a small GPT on 8 local ranks: about two minutes on 2 cores (ARGS="--steps 50 --plan 1x8" ...)
	$(BIN)/startrail train gpt-tiny $(ARGS)

train-dit: setup       ## a small DiT on 4 local ranks, which paints a grid of digits
	$(BIN)/startrail train dit-tiny $(ARGS)

long-context: setup    ## a small model's context from 1,024 to 32,768 tokens on 4 local ranks, with a plot
	$(BIN)/torchrun --nproc-per-node 4 examples/long_sft/train.py $(ARGS)

bench-memory: setup    ## peak memory of a rank in training against its estimate
	$(BIN)/startrail bench memory

bench-train: setup     ## tokens/s and exposed communication in training, Ring Attention against the default plan
	$(BIN)/startrail bench train

validate: setup-bench  ## predictions against the lab: validation/lab/results.md, scatter.png (10 minutes; ARGS=--quick: 2)
	$(BIN)/python -m validation.lab $(ARGS)

validate-hardware: setup-bench ## predictions against published figures of real GPUs: validation/hardware/results.md
	$(BIN)/python -m validation.hardware

validate-paper: setup  ## the paper's byte counts, and its Figure 7 as predicted: validation/paper/results.md
	$(BIN)/python -m validation.paper

scaling: setup-bench   ## weak scaling to 16,384 GPUs as predicted: validation/scaling.md, scaling.png
	$(BIN)/python -m validation.scaling

docs: setup            ## the documentation site, offline, with strict checks of links: build/site/index.html
	$(BIN)/python -m mkdocs build --quiet --strict

dist: setup            ## wheel and sdist in dist/, installed into an empty environment and tried there
	rm -rf dist
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(BIN)/python -m tests.release dist

clean:
	rm -rf .venv .venv-torch-* build dist src/*.egg-info .mypy_cache .ruff_cache
