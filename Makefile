# Each target does the set-up that it needs, once: a virtual environment in .venv with the tested versions.
# pip takes the torch build of its index; on Linux without a GPU, this one saves some gigabytes of CUDA libraries:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

VENV := .venv
PY := $(VENV)/bin/python
RUNTIME := $(VENV)/installed-runtime
DEV := $(VENV)/installed-dev
JOURNEY := $(VENV)/installed-journey

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
CUDA := .venv-cuda
CUDA_TORCH := 2.13.0

.PHONY: help demo journey quick test check suite cuda fake evidence lint format types api site bench release matrix browser clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUNTIME)  ## train the convolutional network on MNIST, on every accelerator or on two CPU workers; write its page
	@devices="--devices 2xcpu"; \
	if $(PY) -c "import sys, torch; sys.exit(not torch.accelerator.is_available())"; then devices=""; fi; \
	echo "meshwise run mnist-cnn $$devices"; \
	$(PY) -m meshwise run mnist-cnn $$devices && \
	echo && echo "meshwise report --html" && \
	$(PY) -m meshwise report --html && \
	echo "Open this page in a browser: all ranks on one clock, loss, memory, findings."

journey: $(JOURNEY)  ## from a download to a smaller model, in eight stations: five minutes, and a page
	$(PY) examples/journey/journey.py

quick: lint types  ## lint, format, types, and the tests that start no process: an answer in three minutes
	$(PY) -m pytest -q -n 2 -m "not workers and not seconds and not slow" --hypothesis-profile=quick

test: lint types  ## what CI runs: lint, format, types, and all tests but the slow ones and those of tests/night.txt
	$(PY) -m pytest -q -n 2 -m "not workers and not seconds and not slow and not night"
	$(PY) -m pytest -q -n 2 --dist loadfile -m "(workers or seconds) and not slow and not night"

check: test  ## the same as test

cuda: $(CUDA)/built  ## every test that needs a GPU, on a fake one: torch's CUDA wheel without a GPU (1.9 GB, installed once)
	MESHWISE_FAKE_CUDA=$(CURDIR)/$(CUDA)/fake LD_LIBRARY_PATH=$(CURDIR)/$(CUDA)/fake PYTHONPATH=$(CURDIR)/$(CUDA)/fake/site \
		FAKE_CUDA_DEVICES=2 $(CUDA)/bin/python -m pytest -q -n 2 -p no:cacheprovider -m "gpu or cuda" \
		tests/cuda tests/transfer tests/training/recovery

fake: $(CUDA)/built  ## the fake GPU of make cuda, to run a script of one's own on it: docs/internals/fake-gpu.md

evidence: export MESHWISE_KEEP_EVIDENCE := $(CURDIR)/bench/results/evidence.json
evidence: cuda  ## make cuda, and write docs/internals/evidence.md of what passed
	$(CUDA)/bin/python bench/evidence.py

suite: lint types cuda  ## everything, for a night: the slow tests too, hypothesis with 400 examples; goes on where it stopped
	$(PY) bench/suite.py

lint: $(DEV)  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV)  ## write what ruff would have
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(DEV)  ## mypy
	$(PY) -m mypy

api: $(DEV)  ## write docs/api.md from the docstrings
	$(PY) docs/make_api.py

site: | $(PY)  ## build the pages of docs/ into site/, with a search: open site/index.html
	$(PY) -m pip install -q -c constraints.txt -e ".[site]"
	$(PY) -m mkdocs build --strict

BENCHES := arrays checkpoint_kills checkpoints edge equivalence faults frozen_ranks journey overhead pairs path predict startup whole whole_overhead
bench: $(DEV)  ## every benchmark that needs no GPU, no programs of others and no published runs; results go to bench/results
	@set -e; for script in $(BENCHES); do echo "$(PY) bench/$$script.py"; $(PY) bench/$$script.py; done

release: | $(PY)  ## build sdist and wheel, check them with twine, install the wheel into a clean environment and use it there
	$(PY) bench/release.py

matrix: | $(PY)  ## the quick tests on Python 3.11, 3.12, 3.13 with torch 2.11, 2.13, 2.15; goes on where it stopped
	$(PY) bench/matrix.py

browser:  ## install Chromium, in which the tests of the report's page are run (Debian and Ubuntu)
	@if command -v chromium chromium-browser google-chrome; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
		echo "there is no apt-get here: install Chromium or Chrome, so that one of chromium, google-chrome is found" >&2; exit 1; fi; \
	if [ "$$(id -u)" = 0 ]; then run=; else run=sudo; fi; \
	$$run apt-get update && $$run apt-get install -y chromium

clean:  ## remove the virtual environment and every cache
	rm -rf $(VENV) $(CUDA) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are older than pyproject.toml or constraints.txt only when those have changed since.
$(RUNTIME): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -c constraints.txt -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -c constraints.txt -e ".[dev]"
	@touch $(RUNTIME) $@

$(JOURNEY): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -c constraints.txt -e ".[journey,tensorboard]"
	@touch $(RUNTIME) $@

# The wheel alone: NVIDIA's libraries (4 GB) would only be replaced. === takes the CUDA build, not one with +cpu.
$(CUDA)/installed: constraints.txt | $(PY)
	$(PY) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --no-deps "torch===$(CUDA_TORCH)"
	grep -v "^torch==" constraints.txt > $(CUDA)/constraints.txt
	$(CUDA)/bin/python -m pip install --no-deps -r $(CUDA)/constraints.txt setuptools nvidia-ml-py
	$(CUDA)/bin/python -m pip install --no-deps -e .
	$(CUDA)/bin/python -m pip install --no-deps --target $(CUDA)/headers "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-crt==13.0.*"
	@touch $@

$(CUDA)/built: $(CUDA)/installed tests/cuda/build.py $(wildcard tests/cuda/lib/*)
	$(CUDA)/bin/python tests/cuda/build.py $(CUDA)/fake $(CUDA)/headers
	@touch $@

$(PY):
	@for python in python3.11 python3 python3.12 python3.13 python3.14 python; do \
		if $$python -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then \
			echo "$$python -m venv $(VENV)"; \
			$$python -m venv $(VENV) && exit 0; \
			rm -rf $(VENV); \
			echo "$$python cannot make a virtual environment here. On Debian and Ubuntu: apt install python3-venv" >&2; \
			exit 1; \
		fi; \
	done; \
	echo "meshwise needs Python 3.11 or newer; none of python3.11, python3, python3.12 to python3.14, python is one." >&2; \
	echo "Install it (https://www.python.org/downloads/) and run make again." >&2; \
	exit 1
