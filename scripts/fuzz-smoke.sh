#!/usr/bin/env bash
# Runs every fuzz target briefly, starting from its corpus. This shows that the targets build and that neither the corpus nor
# 20,000 mutations of it crash. For longer fuzzing, see fuzz/README.md.
# usage: scripts/fuzz-smoke.sh [RUNS]
set -euo pipefail

runs=${1:-20000}
cd "$(dirname "$0")/../fuzz" # its .cargo/config.toml turns coverage on, and only applies in this folder
cargo build --locked

for source in fuzz_targets/*.rs; do
    target=$(basename "$source" .rs)
    echo "fuzz $target: $runs runs"
    # libFuzzer writes new inputs to the first folder and crashes to the prefix; it only reads the corpus.
    mkdir -p "artifacts/$target/found"
    log=artifacts/$target/log
    if ! cargo run --locked --quiet --bin "$target" -- -runs="$runs" -seed=1 -timeout=10 -max_total_time=120 -rss_limit_mb=1024 \
        -artifact_prefix="artifacts/$target/" "artifacts/$target/found" "corpus/$target" >"$log" 2>&1; then
        tail -n 60 "$log" >&2
        echo "fuzz $target failed; the input is in fuzz/artifacts/$target/" >&2
        exit 1
    fi
    grep '^Done' "$log"
done
