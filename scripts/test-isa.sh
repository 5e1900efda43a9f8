#!/usr/bin/env bash
# Runs the suites that compute with floating-point numbers once for each x86-64 instruction set, since kernels, and with
# them the last bits, differ from one to the next. Says which sets this processor lacks.
# usage: scripts/test-isa.sh [SET...]      SET is own, avx2 or sse41; all three without any
#
#   own     nothing is limited: AVX-512 where the processor has it
#   avx2    libtorch, oneDNN, MKL and our codecs use AVX2 at most
#   sse41   libtorch's portable kernels, oneDNN's for SSE 4.1, MKL's for SSE 4.2, our codecs' portable ones
set -euo pipefail
cd "$(dirname "$0")/.."

# Whole test programs: golden figures, equality with one device, codecs, training by the library and by the command. Processes
# compute what threads do (transparency_processes); one instruction set is enough to show that.
suites=(
    'codec_*' golden_codecs # distgpipe-core
    golden transparency training_with_codecs precision deferred_batch_norm replicas updates own_loss_and_optimizer # distgpipe
    trainer freezing parameter_groups exported # distgpipe, exported in distgpipe-cli too
    codecs checkpoints weights # both other crates
    cli recipe train_codecs train_precision # distgpipe-cli
)

has() {
    grep -qw -m1 "$1" /proc/cpuinfo
}

limits_of() {
    case $1 in
    own) ;;
    avx2) echo ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 DISTGPIPE_SIMD=avx2 ;;
    sse41) echo ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 DISTGPIPE_SIMD=portable ;;
    *)
        echo "test-isa: expected own, avx2 or sse41, got $1" >&2
        exit 2
        ;;
    esac
}

arguments=(--locked --workspace --no-fail-fast)
for suite in "${suites[@]}"; do
    arguments+=(--test "$suite")
done
if [ $# -eq 0 ]; then
    set -- own avx2 sse41
fi

failed=()
left_out=()
has avx512f || left_out+=("AVX-512")
for set in "$@"; do
    limits=$(limits_of "$set")
    if [ "$set" = avx2 ] && ! has avx2; then
        left_out+=("AVX2")
        continue
    fi
    printf '\nInstruction set %s: %s\n' "$set" "${limits:-nothing is limited}"
    begin=$SECONDS
    # shellcheck disable=SC2086 # The limits are words.
    env $limits cargo test "${arguments[@]}" || failed+=("$set")
    echo "Instruction set $set took $((SECONDS - begin)) s."
done

for set in ${left_out[@]+"${left_out[@]}"}; do
    echo "Left out: $set, which this processor lacks."
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "Failed with: ${failed[*]}" >&2
    exit 1
fi
