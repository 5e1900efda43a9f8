#!/usr/bin/env bash
# Runs every fuzz target for a moment, starting from its corpus: enough to show that the targets build, that no exhibit
# of the corpus crashes any more, and that 20,000 mutations of them do not either. A hunt is longer: see fuzz/README.md.
# usage: scripts/fuzz-smoke.sh [RUNS]
set -euo pipefail

runs=${1:-20000}
cd "$(dirname "$0")/../fuzz" # its .cargo/config.toml turns coverage on, and counts only from here
cargo build --locked

for source in fuzz_targets/*.rs; do
    target=$(basename "$source" .rs)
    echo "fuzz $target: $runs runs"
    # New inputs go to the first folder, crashes to the prefix; the corpus is only read.
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
