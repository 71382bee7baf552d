# `make test` and `make demo` set up what they need in .venv: 2 GB for the tests (half of it Triton), 0.8 GB for the demo.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup test test-long test-fast test-pythons test-tpu run-fast lint typecheck docs demo several-devices test-gpu compile-gpu-tests ahead-of-gpu gpu-packages sanitize-gpu clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[test,lint,docs,examples,cli,plot]"
	# Flax for the blocks of examples/layers: 9 MB, without the 100 MB of checkpointing that it asks for.
	$(BIN)/python -m pip install --quiet --no-deps "flax>=0.12" "msgpack>=1" "treescope>=0.1.7"
	# What lowers Triton calls without a GPU: 8 MB of JAX's CUDA plugin, without the CUDA libraries that it asks for.
	$(BIN)/python -m pip install --quiet --no-deps "jax-cuda13-plugin==$$($(BIN)/python -c 'import jax; print(jax.__version__)')" \
		|| echo "No CUDA plugin for this machine: the tests of lowering for GPUs will be skipped."
	touch $@ $(VENV)/.demo

# What the demo needs alone; nothing more where everything is there already.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[cli,plot]"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup
	$(BIN)/mypy

# Every warning is an error (strict in mkdocs.yml). The pages lie in site/; open site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Most of the time goes into compiling small programs that run once. Without LLVM's optimisations, and with the older of XLA's two
# code generators where this JAX has both, that takes a third of the CPU time (16 for 44 seconds in the packed reference cases).
# The fast tests, and with them the other Pythons, keep the generator that users have. With XLA's own level: make test XLA_FLAGS=
OLD_GENERATOR = $(shell $(BIN)/python -c 'import importlib.metadata as m; print(m.version("jax").startswith("0.10.") or "")' 2>/dev/null)
QUICK = --xla_backend_optimization_level=0 $(if $(OLD_GENERATOR),--xla_cpu_use_fusion_emitters=false)
test test-long: export XLA_FLAGS ?= $(QUICK)
run-fast: export XLA_FLAGS ?= --xla_backend_optimization_level=1
test: lint typecheck docs
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long and not tpu"

# What takes longest, most of it compiling kernels ahead of time.
test-long: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "long and not tpu"

# What one runs while working: a part of every module, and all of what most calls go through, in under two minutes on 2 cores.
test-fast: setup run-fast

run-fast:
	$(BIN)/python -m pytest --few 1 -n 2 --dist worksteal

# The same on every other Python of this machine, from 3.11 to 3.13, with another JAX on each.
test-pythons: setup
	.ci/test_pythons

# Every kernel for TPUs, compiled for five generations of chips by the libtpu that goes with this JAX. It lies in a folder of its own:
# in .venv it would make every other program look for a TPU first.
LIBTPU := build/libtpu
test-tpu: export PYTHONPATH := $(LIBTPU)
test-tpu: export JAX_PLATFORMS := cpu
test-tpu: export TPU_SKIP_MDS_QUERY := 1
test-tpu: export TPU_WORKER_HOSTNAMES := localhost
test-tpu: export TPU_ACCELERATOR_TYPE := v5litepod-4
test-tpu: export ALLOW_MULTIPLE_LIBTPU_LOAD := 1
test-tpu: setup $(LIBTPU)/.installed
	$(BIN)/python -m pytest tests/pallas/test_compile_tpu.py -n 2 --dist worksteal -m tpu

$(LIBTPU)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(LIBTPU) \
		"$$(env -u PYTHONPATH $(BIN)/python -c 'from ejkernel.testing.tpu_programs import libtpu_requirement; print(libtpu_requirement())')"
	touch $@

demo: $(VENV)/.demo
	$(BIN)/ejkernel bench --summary --lengths 256,1024,4096 --seconds 0.3 --plot demo.png

# A training step over 8 simulated devices, and the memory of one device against the length of a sequence, as a picture.
several-devices: setup
	$(BIN)/python -m examples.several_devices --plot several_devices.png

# On a machine with a GPU, with the Python that has its CUDA plugin: make test-gpu PYTHON=python3
# JOBS processes share the GPU, so none may take its memory beforehand; what needs most of it runs after them, alone. Outcomes go to
# REPORT at once: a run that is stopped goes on from there, and `python -m tests.progress FILE` says what it has found.
JOBS ?= $(shell nproc)
REPORT ?= build/gpu_tests.jsonl
test-gpu compile-gpu-tests: export TRITON_CACHE_DIR ?= $(CURDIR)/build/triton
test-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE ?= false
test-gpu: export OMP_NUM_THREADS ?= 1
test-gpu: TESTED = $(PYTHON) -m pytest -p tests.progress --progress $(REPORT) tests
test-gpu:
	$(TESTED) -m "gpu and not alone" $(if $(filter-out 0,$(JOBS)),-n $(JOBS) --dist worksteal); shared=$$?; \
	$(TESTED) -m "gpu and alone" && exit $$shared

# What `make test-gpu` launches, compiled for an H200 without one, but for calls whose arrays would not fit here.
compile-gpu-tests:
	$(PYTHON) -m pytest -p tests.ahead tests -m "gpu and not alone" -n $(JOBS)

# All that a GPU's machine need not compile, for the same Python and Triton as there: the kernels of the tests, of the benchmarks
# and of the tuner's candidates as CARRIED (`python -m tests.carried unpack` there), and the programs that sanitize-gpu runs.
CARRIED ?= build/triton.tar.xz
TUNED ?= linear delta attention
ahead-of-gpu: export TRITON_CACHE_DIR ?= $(CURDIR)/build/triton
ahead-of-gpu: compile-gpu-tests
	$(PYTHON) -m benchmarks.ahead
	$(if $(TUNED),$(PYTHON) -m benchmarks.tune_gpu --compile-for 90 --of $(TUNED) --jobs $(JOBS))
	$(PYTHON) -m tests.carried pack $(TRITON_CACHE_DIR) $(CARRIED)
	$(PYTHON) -m tests.triton.sanitized $(PROGRAMS) 90

# Rivals, and what tests and programs need beside JAX, numpy, Triton and torch, for a machine where nothing can be installed:
# `python -m tarfile -e FILE` there gives a folder for its PYTHONPATH, of the same Python.
PACKAGES := .device-deps
CARRIED_PACKAGES ?= build/packages.tar.xz
RIVALS := flash-linear-attention==0.6.0 fla-core==0.6.0 einops jax-linear-attention==0.1.0
NEEDED := jaxtyping platformdirs flatbuffers pytest pytest-xdist hypothesis typer rich
PIP_TO = $(PYTHON) -m pip install --quiet --no-compile --target $(PACKAGES)
gpu-packages:
	rm -rf $(PACKAGES)
	$(PIP_TO) $(NEEDED)
	$(PIP_TO) --no-deps $(RIVALS)
	mkdir -p $(dir $(CARRIED_PACKAGES))
	$(PYTHON) -m tarfile -c $(CARRIED_PACKAGES) $(PACKAGES)

# Out-of-bounds reads and writes of every Triton kernel, on a GPU. Each array is an allocation of its own, so that its end is one.
# The first run compiles, unless ahead-of-gpu has for this code; the second is watched.
SANITIZER ?= compute-sanitizer
PROGRAMS ?= build/sanitized.pickle
sanitize-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE := false
sanitize-gpu: export XLA_PYTHON_CLIENT_ALLOCATOR := platform
sanitize-gpu:
	$(PYTHON) -m tests.triton.sanitized $(PROGRAMS)
	$(SANITIZER) --tool memcheck --error-exitcode 3 --print-limit 20 $(PYTHON) -m tests.triton.watched $(PROGRAMS)

clean:
	rm -rf $(VENV) $(VENV)-3.* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
