# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PY := .venv/bin/python
SAN ?= address
# A test that fails is run once more, alone; a worker that dies is replaced; an hour and a quarter ends the run.
TESTS = $(PY) -m pytest --dist loadgroup --no-loadscope-reorder --max-worker-restart 20 --second-look --run-limit 4500
export SEED
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes; each would compile what it imports

.PHONY: help setup dist demo docs docs-serve test test-all rehearse budgets mutants lint bench soak soak-fs3 soak-hai native-test fuzz sim sim-mutants sim-kv soak-kv torch-suite cluster-histories stubs clean
help:
	@grep -E '^[a-z0-9-]+: .*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 22

setup:  ## create .venv, install, build the native module (once a change of the build files)
	@scripts/setup.sh

demo: setup  ## train a model, lose a worker, carry on; ARGS="--seconds 60" passes options
	@.venv/bin/fireflyer demo $(ARGS)

test: setup  ## the tests for each change, as CI runs them; ARGS=tests/hfreduce for one part, ARGS=--costs, SEED=7
	@scripts/setup.sh --test-packages
	@$(TESTS) -n $(or $(JOBS),3) $(ARGS)

test-all: setup  ## all tests, by hand: real services, sanitizers, demo, benchmarks, all random cases, newly drawn
	@scripts/setup.sh --all-test-packages
	@$(TESTS) -n $(or $(JOBS),4) --full --deadline 600 --run-limit 14400 $(ARGS)

dist:  ## source archive and manylinux wheel in build/dist; the wheel is tried in a clean environment
	@scripts/dist.sh

rehearse:  ## what CI does, to HEAD: in a fresh clone, without compiler cache; build/rehearsed names what passed
	@scripts/rehearse.sh

budgets:  ## compare the last whole run of each tier with tests/budget.toml
	@$(PY) scripts/budget.py

mutants: setup  ## change one line of PART=hfreduce at a time; its tests must fail (COUNT=12 SEED=1; ARGS=--full, --help)
	@$(PY) scripts/mutants.py $(or $(PART),hfreduce) --count $(or $(COUNT),12) --seed $(or $(SEED),1) $(ARGS)

torch-suite: setup  ## torch's own tests of collectives and DDP, over hfreduce
	@$(PY) -m tests.torch_suite $(ARGS)

lint: setup  ## ruff, clang-format, mypy strict, import contracts, size limits, prose, links of the documentation, C++ warnings as errors
	@scripts/lint.sh

bench: setup  ## allreduce on this machine against gloo
	@.venv/bin/fireflyer bench allreduce $(ARGS)

soak: setup  ## half an hour of random collectives and deaths (SECONDS=60 for less), a million operations, 3,000 killed writers, power cuts
	@FIREFLYER_SOAK_S=$(or $(SECONDS),1800) $(PY) -m pytest tests/hfreduce/test_soak.py
	@FIREFLYER_SOAK_OPERATIONS=1000000 $(PY) -m pytest tests/hfreduce/collectives/test_memory.py
	@FIREFLYER_SOAK=1 $(PY) -m pytest tests/ffrecord/columns/test_v2_crash.py tests/checkpoint/directory/test_crash.py tests/checkpoint/formats/test_dcp.py tests/checkpoint/save/test_kills.py tests/checkpoint/directory/test_manifests.py tests/checkpoint/save/test_modes.py tests/checkpoint/directory/test_power_cut.py tests/checkpoint/save/test_ranks.py tests/hai/server/crashes/test_crashes.py tests/hai/server/crashes/test_storms.py

soak-fs3: setup  ## fs3 in five lab hosts, shot at: SECONDS=600 within the rules, as many with faults of all kinds, as many under a mount (SEED=1)
	@$(PY) -m tests.fs3.soak.soak kills --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)
	@$(PY) -m tests.fs3.soak.soak anything --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)
	@$(PY) -m tests.fs3.soak.mount_soak --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)

soak-hai: setup  ## tasks of all kinds while everything of the platform is killed: SECONDS=600 SEED=1, ARGS=--postgresql
	@$(PY) -m tests.hai.soak.soak --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1) $(ARGS)

native-test: setup  ## the C++ tests under a sanitizer: SAN=address|thread
	@scripts/native-test.sh $(SAN)

fuzz: setup  ## ten minutes of damaged bytes for the native parsers, ten for those in Python, 10^6 frames a port of fs3 (SECONDS=60 for less)
	@scripts/fuzz.sh $(or $(SECONDS),1200)

sim: setup  ## fs3 under a deterministic simulator: N=1000 histories, or the one of SEED=x with its transcript
	@$(PY) -m tests.fs3.sim.simulate --histories $(or $(N),1000) $(if $(SEED),--seed $(SEED)) $(ARGS)

sim-mutants: setup  ## takes one rule of fs3's protocol away at a time; the simulator must notice (minutes each)
	@$(PY) -m tests.fs3.sim.mutation.mutants $(ARGS)

sim-kv: setup  ## the key-value store's protocol: N=10000 simulated histories, or the one of SEED=x with its transcript
	@$(PY) -m tests.kv.sim.simulate --histories $(or $(N),10000) $(if $(SEED),--seed $(SEED)) $(ARGS)

cluster-histories: setup  ## the scheduler's promises over N=50000 random histories of clusters
	@$(PY) -m tests.hai.plan.histories --count $(or $(N),50000) $(ARGS)

soak-kv: setup  ## the key-value store and the page cache on fs3, shot at: SECONDS=600 SEED=1
	@$(PY) -m tests.kv.soak.soak --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)

docs: setup  ## build the documentation site, build/site/index.html; a dead link fails
	@scripts/site.sh

docs-serve: setup  ## show the documentation while its pages change
	@scripts/site.sh --serve

stubs: setup  ## regenerate the committed type stubs of the native module
	@scripts/stubs.sh

clean:  ## remove the virtual environment and all build output
	rm -rf .venv build
