# One target per task; `make` alone lists them. Afterwards plain `cargo` works too: .cargo/config.toml points it at .libtorch.

# rustup's folder may be missing from the PATH of a shell that has not been restarted since, or of a CI job.
export PATH := $(PATH):$(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)/bin
# What the crate `cc` takes too. (make's own default, g++, is not what it takes.)
ifeq ($(origin CXX),default)
CXX := c++
endif
PYTHON ?= python3
RUST_MINOR_MIN := 89
# Property tests draw the same cases in every run, so that a failure belongs to the change. For other cases, set another
# seed, and PROPTEST_CASES for more of them.
export PROPTEST_RNG_SEED ?= 1

.PHONY: help tools setup demo test test-isa test-kernels mpi test-mpi test-export examples fuzz-smoke bench bench-mpi golden lint clean
.DEFAULT_GOAL := help

help: ## list these targets
	@echo "distgpipe: make TARGET"; \
	sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r target text; do printf '%-12s %s\n' "  $$target" "$$text"; done

# Everything that is missing is named at once, each with what to install.
tools:
	@ok=true; \
	missing() { ok=false; echo "setup: $$1" >&2; }; \
	echo '#include <vector>' | $(CXX) -std=c++17 -x c++ -fsyntax-only - >/dev/null 2>&1 \
	    || missing "no working C++17 compiler ($(CXX)): install one (Debian, Ubuntu: build-essential; Fedora: gcc-c++) or name yours in CXX."; \
	command -v cc >/dev/null 2>&1 \
	    || missing "no cc, which Rust links with: install a C compiler (Debian, Ubuntu: build-essential; Fedora: gcc)."; \
	if ! command -v cargo >/dev/null 2>&1 || ! version=$$(rustc --version 2>/dev/null); then \
	    missing "no Rust: install 1.$(RUST_MINOR_MIN) or later with rustup, see https://rustup.rs."; \
	else \
	    minor=$${version#rustc 1.}; minor=$${minor%%.*}; \
	    [ "$$minor" -ge $(RUST_MINOR_MIN) ] 2>/dev/null || missing "$$version is too old: get 1.$(RUST_MINOR_MIN) or later with \`rustup update\`."; \
	fi; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1 \
	    || missing "no Python 3.8 or later as $(PYTHON), which fetches libtorch: install it (Debian, Ubuntu: python3 and python3-pip)."; \
	$$ok

setup: tools ## check the tools and get libtorch 2.11.0 (once; kept in ~/.cache); CUDA=1: with CUDA
	@$(PYTHON) scripts/libtorch.py $(if $(filter-out 0,$(CUDA)),--cuda)

demo: setup ## train a small network in a pipeline, now
	cargo run --locked --release --bin distgpipe -- demo

test: setup ## all tests, and a short run of the fuzz targets
	cargo test --locked --workspace --no-fail-fast
	scripts/fuzz-smoke.sh

test-isa: setup ## the numeric tests with each instruction set (or some: ISA="avx2 sse41")
	scripts/test-isa.sh $(ISA)

# Without `-p`, here and below, cargo takes the library as `make test` has built it; with it, some dependencies have other features.
test-kernels: setup target/tools/nvrtc/made ## compile the kernels for GPUs with NVRTC; needs no GPU
	LD_LIBRARY_PATH="$(CURDIR)/target/tools/nvrtc/nvidia/cu13/lib:$$LD_LIBRARY_PATH" DISTGPIPE_KERNEL_TESTS=1 \
	    cargo test --locked --workspace --lib engine::kernels

mpi: setup ## build the binary with MPI, for `mpirun distgpipe train`; see docs/clusters.md
	scripts/mpi-packages.sh
	cargo build --locked --release --bin distgpipe --features mpi

test-mpi: setup ## the tests of MPI, under mpirun
	scripts/mpi-packages.sh
	cargo test --locked -p distgpipe -p distgpipe-cli --features distgpipe/mpi,distgpipe-cli/mpi --lib -- mpi:: block_sums
	cargo test --locked -p distgpipe -p distgpipe-cli --features distgpipe/mpi,distgpipe-cli/mpi --test mpi

examples: setup ## run all examples of the library
	for example in crates/distgpipe/examples/*.rs; do \
	    cargo run --locked --quiet --example $$(basename $$example .rs) || exit 1; \
	done

fuzz-smoke: tools ## only the short run of the fuzz targets
	scripts/fuzz-smoke.sh

bench: setup .venv/made ## measure against PyTorch and others in one run; see bench/README.md
	cargo build --locked --release --bin distgpipe
	.venv/bin/python bench/run.py

bench-mpi: mpi ## measure the MPI transport against plain MPI in C, and steps against TCP; see bench/README.md
	cargo build --locked --release -p distgpipe --features mpi --bench mpi_links
	$(PYTHON) bench/mpi.py --rounds $(or $(ROUNDS),5)

golden: .venv/made ## compute the golden figures anew with PyTorch, the codecs' from their formulas
	$(PYTHON) scripts/golden_codecs.py
	$(PYTHON) scripts/golden_zstd.py
	.venv/bin/python scripts/golden_clipping.py
	.venv/bin/python scripts/golden_losses.py
	.venv/bin/python scripts/golden_bf16.py
	.venv/bin/python scripts/golden_images.py
	.venv/bin/python scripts/golden_mobilenet_v2.py
	.venv/bin/python scripts/golden_models.py
	.venv/bin/python scripts/golden_pt2.py
	.venv/bin/python scripts/golden_deviations.py
	.venv/bin/python scripts/golden_optimizers.py
	.venv/bin/python scripts/golden_rates.py
	.venv/bin/python scripts/golden_pth.py
	.venv/bin/python scripts/golden_tokens.py

# The programs as `make test` has built them, so that nothing is built twice.
test-export: setup target/tools/export/made ## the exporter's tests, and exported models against PyTorch, bit by bit
	cargo build --locked --workspace --bin distgpipe --example exported_model
	target/tools/export/bin/python -m unittest discover --start-directory python/tests

lint: setup ## formatting, clippy and rustdoc, warnings denied; MPI=1: the code for MPI, too
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
ifneq ($(filter-out 0,$(MPI)),)
	scripts/mpi-packages.sh
	cargo clippy --locked -p distgpipe -p distgpipe-cli --all-targets --features distgpipe/mpi,distgpipe-cli/mpi -- -D warnings
endif
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps

clean: ## remove what was built; libtorch and its link stay
	cargo clean
	rm -rf fuzz/target fuzz/artifacts

# NVIDIA's compiler at run time, as it comes with a CUDA build of PyTorch 2.11.
target/tools/nvrtc/made:
	$(PYTHON) -m pip --disable-pip-version-check install --quiet --no-deps --upgrade --target target/tools/nvrtc nvidia-cuda-nvrtc==13.0.88
	@touch $@

# PyTorch for those tests: 2 GB to download and 5 GB on disk, in a minute; the index has no smaller build of this version.
target/tools/export/made: python/tests/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "make test-export: expected Python 3.11 or later as $(PYTHON), for the packages of python/tests/requirements.txt" >&2; exit 1; }
	$(PYTHON) -m venv --clear target/tools/export || { echo "make test-export: install Python's venv (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	target/tools/export/bin/python -m pip --disable-pip-version-check install --quiet --no-cache-dir --requirement python/tests/requirements.txt
	@touch $@

# PyTorch for the golden figures and for the peers; nothing else needs it.
.venv/made: bench/requirements.txt
	@$(PYTHON) -m venv .venv || { echo "setup: $(PYTHON) cannot make a virtual environment: install venv (Debian, Ubuntu: python3-venv)." >&2; exit 1; }
	.venv/bin/python -m pip --disable-pip-version-check install --quiet --requirement bench/requirements.txt
	@touch $@
