# Needs make and Python 3.11 or newer, nothing else. Everything is installed in .venv and written to build/.

PYTHON ?= python3
ARGS   ?=

VENV   := .venv
RUN    := $(VENV)/bin/python
PINS   := tests/requirements-dev.txt
# `ready` is written when a set-up has succeeded, `unfinished` lies there while one is under way.
READY      := $(VENV)/ready
UNFINISHED := $(VENV)/unfinished
# Files of tests that run at a time on two cores: tests wait for processes half of their time, slow ones and pages more.
NUM_WORKERS := 3
test-slow: NUM_WORKERS := 4
WORKERS    ?= -n $(NUM_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
RIVALS     := $(VENV)/rivals
# torch_xla belongs to an older torch than the rest is tested with. Colab's image has this version, Kaggle's 2.8.0.
XLA_VERSION ?= 2.9.0
XLA        := .venv-xla$(patsubst %,-%,$(filter-out 2.9.0,$(XLA_VERSION)))
XLA_PINS   := tests/requirements-xla.txt

# DeepSpeed with torchao and bitsandbytes, published trainers, and Ray, in environments of their own, in front of the
# packages of .venv: with them, `pip install` and tests of .venv would see another set of packages than users without
# them have.
WITH_DEEPSPEED := .venv-deepspeed
WITH_TRAINERS  := .venv-trainers
WITH_RAY       := .venv-ray
# The site is made from sources and saved outputs: its environment has neither torch nor this package.
DOCS       := .venv-docs
DOCS_PINS  := tests/requirements-docs.txt

# Packages are installed without compiled modules, and a module is compiled once, not by each process.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-device tests-of test-places test-deepspeed test-trainers test-ray test-xla package docs notebooks picture screenshots
.PHONY: soak lint format bench bench-deepspeed bench-ray clean

help: ## Show this list
	@$(PYTHON) -c 'import re; [print(f"  make {m[1]:<17}{m[2]}") for m in re.finditer(r"^([\w-]+):.*?## (.+)$$", open("Makefile").read(), re.M)]'
	@echo; \
	echo "  PYTHON=python3.12     the Python to set up with, the first time"; \
	echo "  ARGS='-k sampler'     more arguments for pytest, or the benchmarks to run"; \
	echo "  WORKERS='-n 0'        one test at a time, in this process"

setup: $(READY) ## Set up .venv; the others do it by themselves, once

demo: $(READY) ## Train the quickstart notebook on two ranks and write it as a page
	@$(RUN) notebooks/demo.py

# What needs a compiler of C++ has a target of its own.
test: $(READY) ## Run the tests, except the slow ones
	@$(RUN) -m pytest $(WORKERS) -m "not slow and not browser" --ignore tests/second_device --ignore tests/browser $(ARGS)

# pytest ends with 5 when it selected nothing, which is no failure here.
test-slow: $(READY) ## Run the slow tests and those that need a browser
	@$(RUN) -m pytest $(WORKERS) -m "slow or browser" --ignore tests/places --ignore tests/second_device $(ARGS) || [ $$? -eq 5 ]

test-device: $(READY) ## Run the tests on simgpu, the second device, which g++ compiles for half a minute the first time
	@$(RUN) -m pytest $(WORKERS) tests/second_device $(ARGS)

tests-of: $(READY) ## Run the tests that go through a file, FILE=nb_accelerate/notebook/worker/cell.py; the first time it finds them
	@$(RUN) tests/tests_of.py $(FILE) $(ARGS)

test-places: ## Run a session and quick tests with the versions of Colab, of Kaggle, the oldest and the newest; ARGS='colab lowest'
	@$(PYTHON) tests/places/run.py $(ARGS)

test-deepspeed: $(WITH_DEEPSPEED)/ready ## Run the tests that need DeepSpeed, torchao or bitsandbytes, in an environment with them
	@$(WITH_DEEPSPEED)/bin/python -m pytest tests/with_deepspeed $(ARGS)

test-trainers: $(WITH_TRAINERS)/ready ## Run published trainers with this package in accelerate's place, in an environment with them
	@$(WITH_TRAINERS)/bin/python -m pytest tests/with_trainers $(ARGS)

test-ray: $(WITH_RAY)/ready ## Run the tests of ranks that Ray places on machines, in an environment with it
	@$(WITH_RAY)/bin/python -m pytest tests/with_ray $(ARGS)

package: $(READY) ## Build the wheel and the source distribution, in dist/, and try what the README says with the wheel alone
	@$(RUN) tests/package/run.py

# Without --quiet, with which MkDocs counts no warnings and --strict fails for none.
docs: $(DOCS)/ready ## Build the documentation site, build/docs/index.html
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --config-file notebooks/site/mkdocs.yml
	@echo "build/docs/index.html"

notebooks: $(READY) ## Run the notebooks and keep their outputs in them; ARGS='02 05' for some of them
	@$(RUN) notebooks/site/execute.py $(ARGS)

screenshots: $(READY) ## Picture the states of the panel in JupyterLab or (ARGS=nb7) Notebook 7, narrow and wide, light and dark
	@$(RUN) tests/browser/screenshots.py $(ARGS)

picture: $(READY) ## Record the moving picture of the README in JupyterLab
	@$(RUN) tests/browser/moving_picture.py

test-xla: $(XLA)/ready ## Run the tests of TPUs, on the CPU device of their runtime
	@PJRT_DEVICE=CPU PYTHONPATH="$(CURDIR)" $(XLA)/bin/python -m pytest tests/xla $(ARGS)

soak: $(READY) ## Kill 50 runs at random instants, and compare how they go on with one left alone
	@$(RUN) tests/training/checkpoint/soak.py 50 $(ARGS)

lint: $(READY) ## Check style, format and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m mypy --python-version 3.10

format: $(READY) ## Put the sources into the format that lint asks for
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

bench: $(RIVALS) ## Measure; prints ratios taken within one run, beside those of the last release
	@$(RUN) tests/benchmarks/run.py $(ARGS)

bench-deepspeed: $(WITH_DEEPSPEED)/ready ## Measure what is added to a step of DeepSpeed, in an environment with it
	@$(WITH_DEEPSPEED)/bin/python tests/benchmarks/run.py deepspeed

bench-ray: $(WITH_RAY)/ready ## Measure cells on Ray beside a pool here and bare actors, in an environment with it
	@$(WITH_RAY)/bin/python tests/benchmarks/run.py ray

clean: ## Remove .venv, build/ and caches
	rm -rf $(VENV) $(WITH_DEEPSPEED) $(WITH_TRAINERS) $(WITH_RAY) $(XLA) .venv-places .venv-uv $(DOCS) build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis

# An environment whose set-up was cut off may hold half a package that pip takes for a whole one: begin again.
$(READY): $(PINS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"make needs Python 3.11 or newer, but {sys.executable} is {sys.version.split()[0]}. Run: make PYTHON=python3.12")'
	@if [ -e $(UNFINISHED) ] || ! $(RUN) -m pip --version >/dev/null 2>&1; then \
		echo "[1/2] creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); \
	fi
	@touch $(UNFINISHED)
	@echo "[2/2] installing PyTorch, Jupyter and the tools: a minute or two the first time"
	@$(RUN) tests/install.py $(VENV) --requirement $(PINS) --editable .
	@$(RUN) -c 'import torch._dynamo, ipykernel.kernelapp'  # compiled once, before tests import them at the same time
	@rm -f $(UNFINISHED)
	@touch $(READY)

$(XLA)/ready: $(XLA_PINS) $(PINS) tests/xla/cuda_stubs.py
	@echo "[1/3] creating $(XLA)"; $(PYTHON) -m venv --clear $(XLA)
	@echo "[2/3] installing torch and torch_xla: a gigabyte, a minute or two the first time"
	@$(PYTHON) tests/install.py $(XLA) --quiet --constraint $(PINS) --requirement $(XLA_PINS)
	@$(PYTHON) tests/install.py $(XLA) --quiet --no-deps torch==$(XLA_VERSION) torch_xla==$(XLA_VERSION)
	@$(XLA)/bin/python tests/xla/cuda_stubs.py
	@echo "[3/3] starting the runtime of XLA"
	@PJRT_DEVICE=CPU $(XLA)/bin/python -c 'import torch._dynamo, torch_xla.distributed.xla_multiprocessing, ipykernel.kernelapp, torch, torch_xla; print(torch.__version__, torch_xla.__version__, torch.ones(2, device="xla").device)'
	@touch $(XLA)/ready

$(DOCS)/ready: $(DOCS_PINS) $(PINS)
	@echo "[1/2] creating $(DOCS)"; $(PYTHON) -m venv --clear $(DOCS)
	@echo "[2/2] installing MkDocs"
	@$(PYTHON) tests/install.py $(DOCS) --quiet --constraint $(PINS) --requirement $(DOCS_PINS)
	@touch $(DOCS)/ready

$(RIVALS): $(READY) tests/requirements-bench.txt
	@echo "installing what is measured beside"
	@$(RUN) tests/install.py $(VENV) --quiet --constraint $(PINS) --requirement tests/requirements-bench.txt
	@touch $(RIVALS)

# pip sees the packages of .venv as installed, torch too, so it brings no second one.
$(WITH_DEEPSPEED)/ready $(WITH_TRAINERS)/ready $(WITH_RAY)/ready: .venv-%/ready: $(READY) tests/requirements-%.txt
	@echo "installing what is in tests/requirements-$*.txt in $(@D)"
	@$(RUN) -m venv --clear $(@D)
	@$(RUN) -c 'import pathlib, sysconfig; behind = sysconfig.get_path("purelib"); [site_packages] = pathlib.Path("$(@D)").glob("lib/python*/site-packages"); (site_packages / "packages_of_venv.pth").write_text(f"import site; site.addsitedir({behind!r})")'
	@$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --constraint $(PINS) --requirement tests/requirements-$*.txt
	@touch $@
