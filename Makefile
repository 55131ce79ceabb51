# make demo | install | test | torture | mutants | lint | pages | site | bench | wheel

PYTHON ?= python3
BIN = .venv/bin
# Hundreds of modules are never imported; what is, Python compiles then
INSTALL = install -qq --disable-pip-version-check --no-compile -c constraints.txt
PIP = $(BIN)/pip $(INSTALL)
DEMO = .venv/.demo
READY = .venv/.ready
SITE = .venv/.site
BENCH = .venv-bench/.ready

unexport PYTHONDONTWRITEBYTECODE # Hundreds of short processes import the library; let them find it compiled

.PHONY: demo install test torture mutants lint pages site bench wheel clean

demo: $(DEMO)
	@echo "Training on handwritten digits ..."
	@$(BIN)/python -m isaac_loop

install: $(READY)

$(DEMO): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Making .venv ..."; $(PYTHON) -m venv .venv; }
	@echo "Installing torch (about a minute, most of it the download) ..."
	@$(PIP) torch
	@echo "Installing the library, with datasets and matplotlib (half a minute) ..."
	@$(PIP) -e .
	@touch $@

$(READY): pyproject.toml constraints.txt | $(DEMO)
	@echo "Installing the development tools (a minute or two) ..."
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps aitoolbox # With its dependencies it brings torchvision
	@touch $@

test: $(READY)
	$(BIN)/python tools/check_exported.py
	$(BIN)/python tools/test_notebooks.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m 'not processes' # Two processes on two cores
	OMP_NUM_THREADS=1 $(BIN)/pytest -m processes # Each begins several, so these run alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tests tools docs benchmarks setup.py

torture: $(READY)
	$(BIN)/python tools/torture.py --kills 200 --signals 100
	$(BIN)/python tools/torture_two.py --kills 50 --signals 30 --ends 50 --laws 1
	HYPOTHESIS_PROFILE=others $(BIN)/pytest -n 2

mutants: $(READY)
	$(BIN)/python tools/mutants.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tests tools docs benchmarks setup.py
	$(BIN)/nbdev-clean

pages: $(READY)
	$(BIN)/python tools/save_outputs.py
	$(BIN)/python tools/list_callbacks.py
	$(BIN)/python tools/write_stubs.py
	$(BIN)/python tools/draw_loop.py
	$(BIN)/python tools/coverage.py

$(SITE): $(READY)
	@$(PIP) -e '.[docs]'
	@touch $@

site: $(SITE) # From the outputs that the notebooks hold; a link that leads nowhere is an error
	$(BIN)/python docs/pages.py _docs/pages
	$(BIN)/python -m sphinx -q -W --keep-going -j 2 -c docs _docs/pages _docs/site
	@echo "Open _docs/site/index.html"

bench: $(if $(AGAINST),$(READY),$(BENCH)) # Half an hour and more; `BENCH_ARGS=--quick` to see that all runs
	$(if $(AGAINST),$(BIN)/python tools/bench_commits.py $(AGAINST),.venv-bench/bin/python -m benchmarks.bench $(BENCH_ARGS))

$(BENCH): benchmarks/requirements.txt benchmarks/requirements-alone.txt constraints.txt
	@test -x .venv-bench/bin/python || { echo "Making .venv-bench ..."; $(PYTHON) -m venv .venv-bench; }
	@echo "Installing torch, and then what the library is compared with (a few minutes) ..."
	@.venv-bench/bin/pip install -qq --disable-pip-version-check -c constraints.txt torch numpy
	@.venv-bench/bin/pip install -qq --disable-pip-version-check -c constraints.txt -r benchmarks/requirements.txt
	@.venv-bench/bin/pip install -qq --disable-pip-version-check --no-deps -r benchmarks/requirements-alone.txt
	@touch $@

wheel: $(READY)
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --outdir dist . # The source distribution, and the wheel from it
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/check_dist.py dist
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip $(INSTALL) dist/*.whl
	cd dist && ../.venv-wheel/bin/python -m isaac_loop --epochs 5
	rm -rf .venv-wheel

clean:
	rm -rf .venv .venv-wheel .venv-bench dist build _docs *.egg-info
