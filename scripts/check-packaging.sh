#!/usr/bin/env bash
# Checks what a release needs beyond tests: packages, documentation without libtorch, features, a project of `distgpipe new`, dependencies,
# oldest Rust. One line for each check, the output of those that fail, and a non-zero exit status if one did.
# Needs libtorch (`make setup`) and the network: the first time, it builds cargo-deny into target/tools (about a minute).
# usage: scripts/check-packaging.sh [CHECK ...]     all of them unless named: package doc-only features project deny msrv
set -euo pipefail
cd "$(dirname "$0")/.."

deny_version=0.20.2
root=$PWD
# Relative ones are relative to the root of the repository, also where cargo runs elsewhere.
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR=$target
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

package() {
    scripts/package.sh
}

# The documentation as docs.rs builds it: from the package, with the features of its metadata, and neither libtorch nor a C++ compiler
# to be found.
doc_only() {
    scripts/package.sh --unpack-only
    cd target/packaging/unpacked
    grep -A1 -F '[package.metadata.docs.rs]' distgpipe-[0-9]*/Cargo.toml | grep -qF '"doc-only"' || {
        echo "Cargo.toml of distgpipe does not tell docs.rs to use the feature doc-only" >&2
        return 1
    }
    # The documentation goes to target/packaging/doc, not over that of the workspace.
    env -u LIBTORCH_LIB -u LIBTORCH_INCLUDE -u LIBTORCH_USE_PYTORCH LIBTORCH=/nonexistent CXX=/nonexistent \
        RUSTDOCFLAGS="-D warnings" CARGO_BUILD_BUILD_DIR="$target" \
        cargo doc --locked --no-deps --lib -p distgpipe --features doc-only --target-dir "$root/target/packaging"
}

# The library without its default features and with each alone. `doc-only` saves compiling the C++ shim for each set; it changes no
# Rust code. What is off must not be among the dependencies, and must be named in the error that asks for it.
features() {
    local feature off
    scripts/mpi-packages.sh
    for feature in "" jpeg png tokenizers mpi; do
        cargo clippy --locked -p distgpipe --lib --tests --examples --no-default-features --features "doc-only,$feature" -- -D warnings
    done
    off=$(cargo tree --locked -p distgpipe --no-default-features --edges normal,build --prefix none --format '{p}' \
        | grep -E '^(mpi|png|tokenizers|zune-jpeg) ' || true)
    if [ -n "$off" ]; then
        printf 'expected no dependencies of optional features without them, got:\n%s\n' "$off" >&2
        return 1
    fi
    cargo test --locked -p distgpipe --no-default-features --lib -- data::
    if cargo tree --locked -p distgpipe-cli --edges normal,build --prefix none --format '{p}' | grep -E '^(mpi|bindgen)'; then
        echo "expected nothing of MPI without the feature mpi" >&2
        return 1
    fi
}

# A project of `distgpipe new`, as its user has it: cargo finds libtorch and builds it without a warning, and it trains with threads, with a
# worker process, and with a worker that was started by hand, to the same figures. Its profile is ours, and it is built with the LIBTORCH
# of this repository: torch-sys would be built again for another path. What the project's own configuration sets is checked alone.
project() {
    local app=$target/debug/my-app address found
    rustfmt --check --edition 2021 --config-path "$root" crates/distgpipe-cli/template/{main,build}.rs
    cargo build --locked --bin distgpipe
    env -u LIBTORCH "$target/debug/distgpipe" new "$work/my-app"
    mkdir -p "$work/print/src"
    printf '[package]\nname = "print"\nedition = "2021"\n' >"$work/print/Cargo.toml"
    printf 'fn main() {\n    println!("{}", env!("LIBTORCH"));\n}\n' >"$work/print/src/main.rs"
    cd "$work/my-app"
    found=$(env -u LIBTORCH cargo run --quiet --offline --manifest-path "$work/print/Cargo.toml" --target-dir "$work/print/target")
    if [ "$found" != "$PWD/.libtorch" ] || [ ! -f "$found/lib/libtorch_cpu.so" ]; then
        echo "expected LIBTORCH to be $PWD/.libtorch, a link to libtorch, got $found" >&2
        return 1
    fi
    export LIBTORCH=${LIBTORCH:-$root/.libtorch}
    # The lock file of the repository has more packages, so this one changes it.
    cargo run --offline >"$work/threads" 2>"$work/build" || { cat "$work/build" "$work/threads"; return 1; }
    cat "$work/build" "$work/threads"
    if grep -q '^warning' "$work/build"; then
        echo "expected a project that builds without warnings" >&2
        return 1
    fi
    [ -s model.safetensors ] || { echo "expected it to save model.safetensors" >&2; return 1; }
    grep -Eq '^epoch 8: loss 0\.[0-9]+, accuracy (0\.9[0-9]*|1\.000)$' "$work/threads" || { echo "expected it to learn" >&2; return 1; }
    "$app" processes | diff "$work/threads" -
    export DISTGPIPE_TOKEN=00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff
    mkfifo "$work/said"
    "$app" worker --listen 127.0.0.1:0 --once >"$work/said" &
    worker=$!
    # Also where the driver fails before it connects.
    trap 'kill "$worker" 2>/dev/null || true' EXIT
    read -r _ address <"$work/said"
    "$app" "$address" | diff "$work/threads" -
    wait "$worker"
}

# Licences, duplicate versions and sources, by deny.toml. Not advisories: their database may be out of reach.
deny() {
    local tools=$target/tools/cargo-deny-$deny_version
    # Not optimized, which is fast enough and builds in a fraction of the time.
    [ -x "$tools/bin/cargo-deny" ] || CARGO_TARGET_DIR=$work/cargo-deny CARGO_PROFILE_RELEASE_OPT_LEVEL=0 \
        CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=0 \
        cargo install --locked --quiet --root "$tools" --version "$deny_version" cargo-deny
    "$tools/bin/cargo-deny" --all-features --locked check --deny unmatched-skip bans licenses sources
}

# The oldest Rust, as far as a newer one can tell; see scripts/msrv.py. clippy's lint incompatible_msrv is an error by Cargo.toml; the
# command is that of `make lint`, so that one of the two finds everything done.
msrv() {
    cargo clippy --locked --workspace --all-targets -- -D warnings
    python3 scripts/msrv.py
}

checks=("${@:-}")
[ -n "${checks[0]}" ] || checks=(package doc-only features project deny msrv)
failed=()
for check in "${checks[@]}"; do
    case $check in
        package | doc-only | features | project | deny | msrv) ;;
        *) echo "unknown check \`$check\`: expected package, doc-only, features, project, deny or msrv" >&2 && exit 2 ;;
    esac
    began=$SECONDS
    # Not as the condition of an `if`, where `set -e` has no effect: a check must end at the first command that fails.
    set +e
    (set -e; "${check//-/_}") >"$work/log" 2>&1
    status=$?
    set -e
    if ((status == 0)); then
        printf 'packaging: %-8s ok, %d s\n' "$check" $((SECONDS - began))
    else
        printf 'packaging: %-8s FAILED, %d s\n' "$check" $((SECONDS - began))
        sed 's/^/    /' "$work/log"
        failed+=("$check")
    fi
done
if ((${#failed[@]})); then
    echo "packaging: failed: ${failed[*]}" >&2
    exit 1
fi
