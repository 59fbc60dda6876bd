# make run     virtual environment, libllama, decoder, demo model; serves on 127.0.0.1:8000
# make test    the same and the test dependencies; then ruff, mypy and pytest (PYTEST_ARGS="-k ring" narrows it)
# make bench   the short form of the benchmarks
#
# Other targets: install, decoder, lint, format, clean. What is up to date is not done again. libllama is built once per
# machine and CMAKE_ARGS, by native/llama/build.py, and cached outside the clone. docs/install.md tells about GPUs.

.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

# CMAKE_ARGS once given counts in this clone until another is given (CMAKE_ARGS= for none): a GPU build stays one.
$(shell mkdir -p build)
ifeq ($(origin CMAKE_ARGS),undefined)
CMAKE_ARGS := $(shell cat build/cmake-args 2>/dev/null)
else
$(file >build/cmake-args,$(CMAKE_ARGS))
endif
export CMAKE_ARGS

LLAMA := $(VENV)/done-llama-$(shell CMAKE_ARGS='$(CMAKE_ARGS)' $(PYTHON) native/llama/build.py --key)
DECODER_SOURCES := $(shell find native/decoder -type f 2>/dev/null)
PYTHON_SOURCES = $(wildcard server workers native shm bench tests)

# What the build of libllama and of the decoder needs, from PyPI, so that every machine has the same.
BUILD_TOOLS := "cmake>=3.28,<5" "ninja>=1.11" "scikit-build-core>=1.0,<2" "wheel>=0.45"

.PHONY: run test bench install decoder lint format clean
run: install
	$(BIN)/ringfence serve --demo --workers 2

test: $(VENV)/done-test decoder lint
	$(BIN)/pytest $(PYTEST_ARGS)

bench: $(VENV)/done-bench decoder
	$(BIN)/python -m bench --quick

install: $(VENV)/done-demo decoder

lint: $(VENV)/done-test
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy $(PYTHON_SOURCES)

format: $(VENV)/done-test
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

clean:
	rm -rf $(VENV) build native/bin

# --- the virtual environment: tools, then libllama, then this project with its dependencies

$(VENV)/done-tools:
	@echo "ringfence: making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install $(BUILD_TOOLS)
	@touch $@

$(LLAMA): $(VENV)/done-tools
	@wheel=$$($(BIN)/python native/llama/build.py) && $(PIP) install --force-reinstall --no-deps "$$wheel"
	@rm -rf $(VENV)/done-llama-* build/decoder build/done-decoder
	@touch $@

EXTRAS_demo := demo
EXTRAS_test := demo,test
EXTRAS_bench := demo,test,bench
$(VENV)/done-demo $(VENV)/done-test $(VENV)/done-bench: $(VENV)/done-%: pyproject.toml $(LLAMA)
	@echo "ringfence: installing dependencies ($(EXTRAS_$*))"
	@$(PIP) install --no-build-isolation --editable ".[$(EXTRAS_$*)]"
	@touch $@

# --- the decoder: CMake and ninja decide what to compile anew. A llama.cpp of the user's in CMAKE_PREFIX_PATH goes first.

PLATLIB = $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('platlib'))")

decoder: build/done-decoder
build/done-decoder: $(LLAMA) $(DECODER_SOURCES)
	@echo "ringfence: building the decoder"
	@$(BIN)/cmake -G Ninja -S native/decoder -B build/decoder -DCMAKE_BUILD_TYPE=Release --log-level=WARNING \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DCMAKE_PREFIX_PATH="$(subst :,;,$(CMAKE_PREFIX_PATH));$(PLATLIB)" $(CMAKE_ARGS) >build/configure.log
	@$(BIN)/cmake --build build/decoder -- --quiet
	@$(BIN)/cmake --install build/decoder --prefix $(CURDIR) >build/install.log
	@touch $@
