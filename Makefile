# The front door. Every target first gets what it needs (tools/require), so a fresh Debian or Ubuntu machine needs only
# make itself; the rest are thin calls of cmake, ctest and pytest. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SILENT:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 30
SOAK_SECONDS ?= 600
# Emulators and sanitizers are slow: there the numerics tests take every n-th case of their lists, and the tests of
# numerics and command line in SLOW are left out. EVERY=1 SLOW= runs everything.
EVERY ?= 7
SLOW ?= PromisedBounds Run
QUICK = GATEDELTA_TEST_EVERY=$(EVERY)
LEFT_OUT = one of $(EVERY) cases of numerics; left out: $(SLOW)
WERROR ?= OFF
ARCH := $(shell uname -m)
# Found when it is run: a recipe is expanded before its first line installs anything.
QEMU = $$(command -v qemu-$(1)-static || command -v qemu-$(1))
OLD_CPU := $(if $(filter x86_64,$(ARCH)),qemu64,cortex-a53)
FOREIGN := $(if $(filter x86_64,$(ARCH)),aarch64,x86_64)

PYTHON := .venv/bin/python
REPORTS := build/reports
BASE := c++ cmake ninja python
TORCH ?= torch>=2.10
TEST_PACKAGES := numpy pytest pytest-xdist ml_dtypes matplotlib scikit-build-core ninja \
                 $(if $(TORCH),'$(TORCH)' torch-abi-audit transformers)
# Other versions format and warn differently. tools/lint.py refuses them.
LINT_TOOLS := clang-format-14 clang-tidy-14
LINT_PACKAGES := ruff==0.17.4
# The GPU targets can use another Python that has these packages: PYTHON=python3 (docs/performance.md)
gpu_packages = $(if $(filter .venv/bin/python,$(PYTHON)),-- $(TEST_PACKAGES))
# Succeeds where the library that was built sees a GPU it has kernels for.
HAS_GPU = $(PYTHON) -c 'from tools import dev_paths; import gatedelta; exit(not gatedelta.info()["cuda_devices"])'
# Of train-example and peer-tests
DEVICE ?= cpu
cuda_on = $(if $(filter cuda%,$(DEVICE)),-DGD_CUDA=ON)

# $(call build,<preset>[,<target>...[,<option>...]])
define build
cmake --preset $(1) -DGD_WERROR=$(WERROR) $(3) --log-level=NOTICE >/dev/null
cmake --build --preset $(1) --parallel $(JOBS) $(if $(2),--target $(2))
endef
# $(call ctest,<preset>): leaves a report
ctest = mkdir -p $(REPORTS); rm -f $(REPORTS)/$(1).xml; \
        ctest --preset $(1) $(if $(MAKE_TERMOUT),--progress,--quiet) --parallel $(JOBS) \
        --output-junit $(CURDIR)/$(REPORTS)/$(1).xml
# $(call run_programs,<report>,<build folder>): the same without a process for each case
run_programs = rm -f $(REPORTS)/$(1).xml; \
               $(QUICK) python3 tools/run_programs.py $(2) $(REPORTS)/$(1).xml --jobs $(JOBS) --without $(SLOW)
# $(call total,<name>=<report>...): what failed and what did not run; ends a recipe in which a program has set `failed`
total = { python3 tools/sum_reports.py $(1) && [ -z "$${failed-}" ]; } || exit 1

help: ## this list
	grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

run: ## build, run the default job (a Qwen3.5-like layer, forward and backward) and draw its timings
	tools/require $(filter-out python,$(BASE))
	$(call build,release,gatedelta_cli)
	mkdir -p build/run
	build/release/cli/gatedelta run --json build/run/run.json
	tools/require python -- matplotlib || { echo "picture: left out, because there is no matplotlib"; exit 0; }
	$(PYTHON) -m bench.plots cpu build/run/run.json build/run/timings.png
	echo "picture: $(CURDIR)/build/run/timings.png"

test: ## build and run every test: C++, examples, Python
	tools/require $(BASE) gtest pkg-config -- $(TEST_PACKAGES)
	. tools/use_ccache
	$(call build,test)
	$(call ctest,test) || failed=1
	rm -f $(REPORTS)/pytest.xml
	$(PYTHON) -m pytest -q -n $(JOBS) --dist loadfile --junitxml $(REPORTS)/pytest.xml tests/python || failed=1
	$(call total,C++=$(REPORTS)/test.xml Python=$(REPORTS)/pytest.xml)

bench: ## benchmark the CPU against transformers' torch code, every instruction set, and a GPU, into build/bench
	tools/require $(BASE) -- $(TEST_PACKAGES)
	$(call build,release)
	rm -rf build/bench
	bench/run cpu
	$(HAS_GPU) || { echo "no GPU that this build has kernels for: GPU rows were NOT run"; exit 0; }
	bench/run gpu

bench-gpu: ## the GPU's part alone: forward, backward, decode, draft verification and packs, against the peers' times
bench-segments: ## how the GPU cuts sequences: the automatic cut against the best of a search
bench-gpu bench-segments:
	tools/require $(BASE) $(gpu_packages)
	$(call build,release,gatedelta gatedelta_torch,-DGD_CUDA=ON)
	bench/run $(@:bench-%=%)

train-example: ## train a small language model with the library and in fp32 torch, draw both curves (DEVICE=cpu or cuda)
	tools/require $(BASE) $(gpu_packages)
	$(call build,release,gatedelta gatedelta_torch,$(cuda_on))
	examples/train/compare

record-train: train-example ## the same, then keep curves and picture in results/train
	$(PYTHON) -m bench.report.record_curves build/train

record: bench ## benchmark, keep the measurements in results/ and rewrite the tables of README and docs
	$(PYTHON) -m bench.report.record build/bench
	bench/run tables

record-gpu: ## on a machine with an H200: the GPU's tests, bench-gpu and bench-segments, kept in results/h200
	tools/require $(BASE) gtest $(gpu_packages)
	$(call build,cuda,gatedelta gatedelta_torch gatedelta_testing gpu_tests)
	$(call ctest,cuda) --label-regex '^gpu$$' || failed=1
	rm -f $(REPORTS)/pytest.xml
	$(PYTHON) -m pytest -q --junitxml $(REPORTS)/pytest.xml tests/python/test_torch_cuda.py \
	  tests/python/test_torch_decode_cuda.py || failed=1
	$(call total,GPU=$(REPORTS)/cuda.xml Python=$(REPORTS)/pytest.xml)
	bench/run gpu
	bench/run segments
	$(PYTHON) -m bench.report.record --gpu build/bench
	bench/run tables

lint: ## formatting, clang-tidy, ruff, texts and generated tables
	tools/require $(BASE) gtest clang $(LINT_TOOLS) -- $(LINT_PACKAGES)
	cmake --preset lint --log-level=NOTICE >/dev/null
	$(PYTHON) tools/lint.py

format: ## reformat C, C++ and Python sources in place
	tools/require $(LINT_TOOLS) python -- $(LINT_PACKAGES)
	$(PYTHON) tools/lint.py --fix

wheel: ## build the wheel into dist/ and try it in a fresh virtual environment
	tools/require $(BASE) -- pip
	$(PYTHON) tools/check_wheel.py $(if $(filter ON,$(WERROR)),--werror)

peer-tests: ## other libraries' own tests, from checkouts in PEERS, on this library (DEVICE=cpu or cuda)
	tools/require $(BASE) $(gpu_packages)
	$(call build,test,gatedelta gatedelta_torch,$(cuda_on))
	$(PYTHON) tools/peer_tests.py --device $(DEVICE) --jobs $(JOBS) $(if $(PEERS),--peers $(PEERS))

sanitize: EVERY := 3
sanitize: ## the C++ tests under ASan+UBSan, then under TSan
	tools/require $(BASE) gtest
	echo "under sanitizers $(LEFT_OUT)"
	$(call build,asan)
	$(call run_programs,asan,build/asan) || failed=1
	$(call build,tsan)
	$(call run_programs,tsan,build/tsan) || failed=1
	$(call total,ASan+UBSan=$(REPORTS)/asan.xml TSan=$(REPORTS)/tsan.xml)

sanitize-gpu: ## on a machine with a GPU: some of its tests under compute-sanitizer's four tools
	tools/require $(BASE) gtest
	command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer in PATH: CUDA's toolkit has it"; exit 1; }
	nvidia-smi -L || { echo "no GPU here: nothing was checked"; exit 1; }
	$(call build,cuda,gatedelta gatedelta_cli gpu_tests)
	$(call build,racecheck,gatedelta gpu_tests)
	tools/sanitize_gpu

soak: ## random calls from processes and threads, with refusals, forks and kills between them (SOAK_SECONDS=600)
	tools/require $(BASE) gtest
	$(call build,test,soak)
	mkdir -p build/soak
	build/release/tests/soak --seconds $(SOAK_SECONDS) --json build/soak/cpu.json

soak-gpu: ## the same on a machine with a GPU, on its streams, then with the portable kernels (SOAK_SECONDS each)
	tools/require $(BASE) gtest
	$(call build,cuda,soak)
	mkdir -p build/soak
	build/release/tests/soak --device cuda --seconds $(SOAK_SECONDS) --json build/soak/cuda.json
	build/release/tests/soak --device cuda --kernels portable --seconds $(SOAK_SECONDS) --json build/soak/portable.json

cuda: ## compile the CUDA backend (needs nvcc) and run its tests; those of a GPU are skipped without one
	tools/require $(BASE) gtest
	command -v nvcc /usr/local/cuda/bin/nvcc >/dev/null ||
	  { echo "no nvcc here: the CUDA backend was NOT compiled"; exit 0; }
	$(call build,cuda,gatedelta cuda_host_test gpu_tests)
	$(call ctest,cuda) --label-regex '^(cuda_host|gpu)$$' || failed=1
	python3 tools/sass.py build/release/src/libgatedelta.so --json $(REPORTS)/kernels.json \
	  --compare results/h200/record.json || failed=1
	$(call total,CUDA=$(REPORTS)/cuda.xml)

cross: ## build for the other architecture and run the C++ tests under QEMU
	tools/require $(BASE) gtest cross
	$(call build,cross-$(FOREIGN))
	echo "under emulation $(LEFT_OUT)"
	ctest --preset cross-$(FOREIGN) --quiet --tests-regex '^isa_symbols$$' || failed=1
	$(call run_programs,cross-$(FOREIGN),build/cross-$(FOREIGN)) \
	  --under "$(call QEMU,$(FOREIGN)) -cpu max -L /usr/$(FOREIGN)-linux-gnu" || failed=1
	$(call total,$(FOREIGN)=$(REPORTS)/cross-$(FOREIGN).xml)

oldcpu: ## run the C++ tests as the oldest CPU of this architecture would, under QEMU
	tools/require $(BASE) gtest qemu
	$(call build,test)
	echo "under emulation $(LEFT_OUT)"
	$(call run_programs,oldcpu,build/release) --under "$(call QEMU,$(ARCH)) -cpu $(OLD_CPU)" || failed=1
	$(call total,$(OLD_CPU)=$(REPORTS)/oldcpu.xml)

fuzz: ## a short libFuzzer run on the C ABI (FUZZ_SECONDS=30)
	tools/require $(BASE) gtest fuzzer
	$(call build,fuzz,fuzz_abi)
	mkdir -p build/fuzz/corpus
	log=build/fuzz/fuzz_abi.log
	build/fuzz/tests/fuzz/fuzz_abi -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -print_funcs=0 \
	  -artifact_prefix=build/fuzz/ build/fuzz/corpus >$$log 2>&1 || { tail -n 60 $$log; exit 1; }
	echo "fuzz_abi: $$(sed -n 's/^stat::number_of_executed_units: *//p' $$log) calls, none misbehaved"

clean: ## remove build/ and dist/ (not .venv)
	rm -rf build dist

.PHONY: $(shell sed -nE 's/^([a-z-]+):.*## .*/\1/p' $(MAKEFILE_LIST))
