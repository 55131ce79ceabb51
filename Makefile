# make demo | install | test | torture | mutants | lint | docs | bench | wheel

PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt
DEMO = .venv/.demo
READY = .venv/.ready

.PHONY: demo install test torture mutants lint docs bench wheel clean

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
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 # Two processes on two cores
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tests tools

torture: $(READY)
	$(BIN)/python tools/torture.py --kills 200 --signals 100
	HYPOTHESIS_PROFILE=others $(BIN)/pytest -n 2

mutants: $(READY)
	$(BIN)/python tools/mutants.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tests tools
	$(BIN)/nbdev-clean

docs: $(READY)
	$(BIN)/python tools/save_outputs.py
	$(BIN)/python tools/list_callbacks.py
	$(BIN)/python tools/coverage.py

bench: $(READY)
	$(BIN)/python $(if $(AGAINST),tools/bench_commits.py $(AGAINST),tools/bench.py)

wheel: $(READY)
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --wheel --outdir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install -qq --disable-pip-version-check -c constraints.txt dist/*.whl
	cd dist && ../.venv-wheel/bin/python -m isaac_loop --epochs 5
	rm -rf .venv-wheel

clean:
	rm -rf .venv .venv-wheel dist build *.egg-info
