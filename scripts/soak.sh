#!/bin/sh
# A long run over `distgpipe serve`, with TLS, and a fault every second or so: connections are cut, the client, the server and
# the job's process are suspended, the job's process is killed. The run must end with the weights of an undisturbed one, and the
# client and the server with the memory and descriptors of its beginning. The test program `soak` in crates/distgpipe-cli does
# the work; a shorter version of it runs with all tests.
#
#   scripts/soak.sh [STEPS] [SEED] [PAUSE_MS]
#
# Committed output: runs/*-soak.
set -eu
cd "$(dirname "$0")/.."
DISTGPIPE_SOAK_STEPS=${1:-2000} DISTGPIPE_SOAK_SEED=${2:-1} DISTGPIPE_SOAK_PAUSE_MS=${3:-1000}
DISTGPIPE_SOAK_FAULTS=1000000
export DISTGPIPE_SOAK_FAULTS DISTGPIPE_SOAK_STEPS DISTGPIPE_SOAK_SEED DISTGPIPE_SOAK_PAUSE_MS
exec cargo test --locked --offline -p distgpipe-cli --test soak -- --nocapture --test-threads=1
