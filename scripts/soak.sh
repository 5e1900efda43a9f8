#!/bin/sh
# Ten minutes over `distgpipe serve`, with TLS, and a fault every few seconds: connections are cut, the client, the server and the
# job's process are suspended, the job's process is killed. The run must end with the weights of an undisturbed one; client, server
# and job, with the memory and descriptors that they had before. The test program `soak` in crates/distgpipe-cli does the work; it
# runs for a minute with all tests.
#
#   scripts/soak.sh [SECONDS] [SEED] [PAUSE_MS]
#
# Committed output: runs/*-soak.
set -eu
cd "$(dirname "$0")/.."
DISTGPIPE_SOAK_S=${1:-600} DISTGPIPE_SOAK_SEED=${2:-1} DISTGPIPE_SOAK_PAUSE_MS=${3:-2000}
export DISTGPIPE_SOAK_S DISTGPIPE_SOAK_SEED DISTGPIPE_SOAK_PAUSE_MS
exec cargo test --locked --offline -p distgpipe-cli --test soak -- --nocapture --test-threads=1
