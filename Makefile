PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test check gpu-test gpu-sanitize bench gpu-bench clean

demo: $(VENV)/.installed  ## install, run the sample job, show what came out
	$(BIN)/punica-batch run sample_data/requests.parquet --show 24

test: $(VENV)/.dev  ## all tests that need no GPU
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/.dev  ## style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	# tests that only a GPU runs: their calls fit at least
	MYPYPATH=tests/kernels:tests/unit:tests/integration $(BIN)/mypy tests/gpu --no-warn-return-any --allow-any-generics \
	  --allow-untyped-calls --allow-untyped-defs --allow-untyped-decorators
	$(BIN)/lint-imports

gpu-test: $(VENV)/.dev  ## on a machine with an NVIDIA GPU
	$(BIN)/python -m pytest tests/gpu -m gpu -rs

bench: $(VENV)/.dev  ## the CPU benchmark (MODEL=folder ADAPTERS=folder); run it on a quiet machine
	$(BIN)/python benchmarks/cpu_speed.py $(MODEL) $(ADAPTERS)

gpu-sanitize: $(VENV)/.dev  ## our own GPU kernels under compute-sanitizer, without torch's cache of memory
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	  $(BIN)/python -m pytest tests/gpu/test_sgmv_gpu.py tests/gpu/test_elementwise_gpu.py tests/gpu/test_sampler_gpu.py \
	  tests/gpu/test_products_gpu.py tests/gpu/test_sgmv_launches_gpu.py \
	  -m gpu -k "(every_rank or rope or greedy or float64 or expand_inside) and not graph"

gpu-bench: $(VENV)/.dev  ## what `bench all` measures, budgeted for 8 minutes, on a machine with an NVIDIA GPU
	$(BIN)/punica-batch bench all --quick

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): pip says nothing meanwhile, for about half a minute"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing what tests need into $(VENV)"
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
