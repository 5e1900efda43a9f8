#!/usr/bin/env bash
# The tests that need an NVIDIA GPU, which CI does not have. They train ten steps in several ways on the GPU, and compare the losses
# with those of the CPU and of one partition on the GPU; and a server runs a job on the GPU within its limits.
# usage: scripts/gpu-tests.sh [BINARY [DEVICE]]     DEVICE is cuda:0 by default. Needs: torch 2.11.0 in python3. The binary may have been built without CUDA.
# DEVICE_TESTS has the programs of tests/device_codecs.rs, which compares the codecs and masks of the GPU with those of the CPU and measures
# the codecs, and of tests/device_graphs.rs, which has layers that cannot be recorded, and our own kernels of layers. UNIT_TESTS is the
# program of the library's own tests, of which those that use a GPU run: links, and copies beside the computation.
# `cargo test --release -p distgpipe --lib --test device_codecs --test device_graphs --no-run` makes them and says where they are.
# MPIRUN is the mpirun of an MPI library that reaches GPUs, for a BINARY of `make mpi`: then ranks train on the GPU, too.
# Where compute-sanitizer is installed, it looks for faults of memory and races in the kernels of the codecs, for SANITIZER_S seconds each
# (120 by default; 0 leaves that out).
# Prints one line per test, and exits with 1 if one fails. The last output is committed in runs/*-gpu-tests.
set -uo pipefail
cd "$(dirname "$0")/.."

binary=$(realpath "${1:-target/release/distgpipe}")
device=${2:-cuda:0}
torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))') || exit 1
export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
# The server's identity and the joined servers are this test's own.
export HOME=$work XDG_CONFIG_HOME=$work/config

date -u
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -c 'import torch; print("torch", torch.__version__)'
"$binary" --version

# A convolutional network of PyTorch's, exported, whose losses rounding changes by 1e-7 over ten steps. MobileNetV2 amplifies rounding
# by several orders of magnitude within three steps at this size of images, also in PyTorch, so that only its first losses can be compared.
model="--model crates/distgpipe/tests/golden/pt2/digits.pt2"
mobilenet="--model mobilenet_v2 --set image=32 --set dropout=0.0"
# Without convolutions, whose inputs cuDNN rounds to TF32, and with dropout, whose masks are the same on both.
mlp="--model mlp --set dropout=0.1"
roberta="--model roberta --set layers=2 --set hidden=64 --set heads=4 --set feed_forward=128 --set vocabulary=1000 --set tokens=16"

# Trains ten steps in the background, as a process or with a launcher in front of it. The log is $work/NAME.
launcher=
train() { # NAME FLAGS...
    local name=$1
    shift
    local flags="--data digits --limit 640 --epochs 1 --optimizer sgd --lr 0.01 --momentum 0"
    [[ "$*" == *--data* ]] && flags="--epochs 1 --optimizer sgd --lr 0.01 --momentum 0"
    [[ "$*" == *--limit* ]] && flags="--data digits --optimizer sgd --lr 0.01 --momentum 0"
    [[ "$*" == *--optimizer* ]] && flags="--data digits --limit 640 --epochs 1"
    [[ "$*" == *resnet* ]] && flags="--data digits --limit 640 --epochs 1 --optimizer sgd --lr 1e-9 --momentum 0"
    [[ "$*" == *--schedule* ]] || flags+=" --schedule gpipe"
    $launcher "$binary" train --batch 64 --threads 2 $evaluation --log "$work/$name" $flags "$@" >"$work/$name.out" 2>&1 &
    trained+=($!)
}

evaluation=--no-evaluate
failed=0
# Compares the losses of the first steps of two runs.
compare() { # NAME REFERENCE STEPS LARGEST_RELATIVE_DIFFERENCE WHAT
    if ! python3 - "$work/$1/steps.jsonl" "$work/$2/steps.jsonl" "${@:3}" <<'PYTHON'
import json, sys
steps, most, what = int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
got, expected = ([step["loss"] for step in map(json.loads, open(path)) if "loss" in step][:steps] for path in sys.argv[1:3])
assert len(got) == len(expected) == steps, (len(got), len(expected))
gap = max(abs(a - b) / abs(b) for a, b in zip(got, expected))
print(f"{'ok    ' if gap <= most else 'FAILED'}  {what}: losses of {steps} steps differ by {gap:.1e}, expected at most {most:.0e}")
sys.exit(gap > most)
PYTHON
    then
        failed=1
        tail -n 5 "$work/$1.out"
    fi
}

"$binary" serve --listen 127.0.0.1:17443 --device "$device" --memory 16GiB >"$work/serve.out" 2>&1 &
gpu="--device $device"
split="--partitions 3 --place client,server,client"
trained=()
train cpu $mlp --device cpu --chunks 4
train mlp $mlp $gpu --chunks 4
train gpu $model $gpu --chunks 4
train bf16 $model $gpu --chunks 4 --precision bf16
train mobilenet-cpu $mobilenet --device cpu --chunks 1
train mobilenet-gpu $mobilenet $gpu --chunks 1
train mobilenet-split $mobilenet $gpu --chunks 1 $split
"$binary" serve --join-string --address 127.0.0.1:17443 | "$binary" join gpu-box || failed=1
train server $model $gpu --chunks 4 $split --server gpu-box
train threads $model $gpu --chunks 4 $split
train processes $model $gpu --chunks 4 $split --workers processes
train recomputed $model $gpu --chunks 4 $split --recompute always
train replicas $model $gpu --chunks 2 --replicas 2
train phases $model $gpu --chunks 4 $split --phases exact
train everywhere $model $gpu --chunks 4 --layers all --partitions 4
train bf16-split $model $gpu --chunks 4 $split --precision bf16
train interleaved $model $gpu --chunks 4 --layers all --partitions 4 --place a,b,a,b --schedule interleaved
train codec $model $gpu --chunks 4 $split --workers processes --codec tile:4
train codec-threads $model $gpu --chunks 4 $split --codec tile:4
# CUDA graphs, from the third step on. Each run has a twin that launches every kernel.
twins() { # NAME FLAGS...
    local name=$1
    shift
    train "$name-eager" $gpu "$@" --graphs off
    train "$name-graphs" $gpu "$@" --graphs on
    train "$name-stream" $gpu "$@" --graphs on --graph-streams 1
}
twins conv $model --chunks 4
twins split $model --chunks 4 $split
twins 1f1b $model --chunks 4 $split --schedule 1f1b
twins recompute $model --chunks 4 --recompute except-last
twins ragged $model --chunks 4 --limit 600 --epochs 2
twins adam $mlp --chunks 4 --optimizer adam --lr 0.001 --clip-norm 0.5
twins accumulated $mlp --chunks 4 --accumulate 2
twins frozen $mlp --chunks 4 --partitions 2 --place a,b --freeze layers.0.*
evaluation= twins norms --model resnet --set depth=18 --set image=32 --set classes=10 --chunks 2 --recompute except-last
# More micro-batches than batch norms collect before they merge, on workers that share the GPU.
evaluation= twins merged --model resnet --set depth=18 --set image=32 --set classes=10 --chunks 20 --partitions 3 --place a,b,a
# MobileNetV2 amplifies rounding, so equal losses mean equal bits.
deterministic="$mobilenet --chunks 4 --cudnn-deterministic $split --codec tile:4"
train bits-threads $gpu $deterministic
train bits-again $gpu $deterministic
train bits-eager $gpu $deterministic --graphs off
train bits-processes $gpu $deterministic --workers processes
raw="$mobilenet --chunks 4 --cudnn-deterministic $split --schedule 1f1b"
train raw-threads $gpu $raw
train raw-processes $gpu $raw --workers processes
train raw-eager $gpu $raw --workers processes --graphs off
if [[ -n ${MPIRUN-} ]]; then
    launcher="env DISTGPIPE_MPI_CUDA=1 $MPIRUN -n 2"
    train raw-ranks $gpu $raw
    # Tensors of more than 256 KiB, which ranks send from GPU to GPU.
    train large-ranks $gpu $raw --set image=96
    train bits-ranks $gpu $deterministic
    launcher="env DISTGPIPE_MPI_CUDA=0 $MPIRUN -n 2"
    train raw-ranks-host $gpu $raw
    launcher=
    train large-threads $gpu $raw --set image=96
fi
# More threads than libtorch has streams: workers that are left without one of their own do not record.
crowd="$model --chunks 2 --layers all --partitions 8 --place a,b,c,d,e,f,g,h --codec f16"
train crowd-eager $gpu $crowd --graphs off
train crowd-graphs $gpu $crowd --graphs auto
twins words $roberta --chunks 4 --data synthetic --samples 640
twins cast $model --chunks 4 --precision bf16
twins words-cast $roberta --chunks 4 --data synthetic --samples 640 --precision bf16
# Images of both sizes that instance norm has kernels for.
twins unet --model unet --set convolutions=1 --set channels=16 --set depth=2 --set image=64 --chunks 4 --data synthetic --samples 640 --cudnn-deterministic
wait "${trained[@]}"

compare mlp cpu 10 1e-4 "an MLP on the GPU and on the CPU"
compare mobilenet-gpu mobilenet-cpu 1 1e-3 "MobileNetV2 on the GPU and on the CPU"
compare mobilenet-split mobilenet-gpu 1 1e-5 "MobileNetV2 in three partitions and in one"
compare threads gpu 10 1e-4 "three partitions on two workers and one partition"
compare processes gpu 10 1e-4 "a worker process and one partition"
compare server gpu 10 1e-4 "a server over TLS, its job within limits, and one partition"
compare recomputed gpu 10 1e-4 "with everything recomputed and without"
compare replicas gpu 10 1e-4 "two replicas and one"
compare phases threads 10 1e-5 "with a wait after each action (--phases exact) and without"
if grep -q '^per batch, client spends' "$work/phases.out" && ! grep -q 'launch times' "$work/phases.out" && grep -q 'launch times' "$work/threads.out"; then
    echo "ok      times per batch are those of execution with --phases exact, and those of launches without"
else
    failed=1
    echo "FAILED  times per batch with --phases exact: $(grep '^per batch' "$work/phases.out"); without: $(grep '^per batch' "$work/threads.out")"
fi
compare everywhere gpu 10 1e-4 "four partitions, cut anywhere, and one"
compare bf16-split bf16 10 1e-2 "in bfloat16, three partitions and one"
compare codec codec-threads 10 1e-3 "tile:4 between processes and between threads"
compare interleaved gpu 10 1e-4 "four interleaved partitions on two workers, and one"
compare crowd-graphs crowd-eager 10 1e-5 "eight workers with codecs between them on one GPU, with graphs where a stream is left, and without"
for name in conv split 1f1b recompute ragged adam accumulated frozen words; do
    steps=10
    [[ $name == ragged ]] && steps=18
    compare $name-graphs $name-eager $steps 1e-5 "graphs on several streams and no graphs ($name)"
    compare $name-stream $name-eager $steps 1e-5 "graphs on one stream and no graphs ($name)"
done
for name in again eager processes; do
    compare bits-$name bits-threads 10 0 "MobileNetV2 with deterministic kernels and tile:4, bit for bit ($name)"
done
for name in processes eager; do
    compare raw-$name raw-threads 10 0 "MobileNetV2 with deterministic kernels and raw links, bit for bit ($name)"
done
if [[ -n ${MPIRUN-} ]]; then
    compare raw-ranks raw-threads 10 0 "MobileNetV2 with deterministic kernels, ranks of MPI with raw links from GPU to GPU, bit for bit"
    compare large-ranks large-threads 10 0 "MobileNetV2 with deterministic kernels and images of 96x96, ranks of MPI with raw links from GPU to GPU, bit for bit"
    compare raw-ranks-host raw-threads 10 0 "MobileNetV2 with deterministic kernels, ranks of MPI with raw links through the host, bit for bit"
    compare bits-ranks bits-threads 10 0 "MobileNetV2 with deterministic kernels, ranks of MPI with tile:4, bit for bit"
    grep -q 'MPI sends tensors from GPU to GPU' "$work/raw-ranks.out" || { failed=1; echo "FAILED  the ranks have not used MPI between GPUs"; }
else
    echo "NOT RUN ranks of MPI: MPIRUN is not set"
fi
# Training would amplify rounding, so it hardly moves the weights. The running statistics of batch norms decide the loss on the test data.
compare norms-stream norms-eager 10 1e-5 "graphs on one stream and no graphs (batch norms)"
compare norms-graphs norms-eager 10 1e-5 "graphs on several streams and no graphs (batch norms)"
test_loss() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["epochs"][-1]["test_loss"])' "$work/$1/summary.json"; }
for name in norms-stream norms-graphs merged-stream merged-graphs; do
    if python3 -c 'import sys; a, b = map(float, sys.argv[1:]); sys.exit(abs(a - b) > 1e-5 * abs(b))' "$(test_loss $name)" "$(test_loss ${name%-*}-eager)"; then
        echo "ok      $name: the loss on the test data is $(test_loss $name), without graphs $(test_loss ${name%-*}-eager)"
    else
        failed=1
        echo "FAILED  $name: the loss on the test data is $(test_loss $name), without graphs $(test_loss ${name%-*}-eager)"
    fi
done
for name in cast-graphs cast-stream; do
    compare $name cast-eager 10 1e-5 "${name#cast-} and no graphs (bf16)"
done
for name in words-cast-graphs words-cast-stream; do
    compare $name words-cast-eager 10 1e-5 "${name#words-cast-} and no graphs (bf16, RoBERTa)"
done
for name in unet-graphs unet-stream; do
    compare $name unet-eager 10 1e-5 "${name#unet-} and no graphs (U-Net)"
done
grep -q 'is done' "$work/serve.out" || { failed=1; echo "FAILED  the server's log has no finished run:"; tail -n 5 "$work/serve.out"; }
[[ -n ${DEVICE_TESTS-} ]] || echo "NOT RUN the tests of codecs, masks, layers that cannot be recorded and instance norm: DEVICE_TESTS is not set"
for program in ${DEVICE_TESTS-}; do
    DISTGPIPE_GPU_TESTS=1 "$program" --nocapture --test-threads 1 || failed=1
done
if [[ -n ${UNIT_TESTS-} ]]; then
    filters="links_of_a_gpu raw_tensors_from_a_gpu tensors_arrive_with the_batches_for_a_pipeline images_for_a_gpu"
    # shellcheck disable=SC2086  # filters are words
    DISTGPIPE_GPU_TESTS=1 "$UNIT_TESTS" --nocapture --test-threads 1 $filters >"$work/unit.out" 2>&1 || failed=1
    cat "$work/unit.out"
    for filter in $filters; do
        grep -q "^test .*$filter" "$work/unit.out" || { failed=1; echo "FAILED  no unit test is called $filter"; }
    done
else
    echo "NOT RUN the library's own tests that use a GPU: UNIT_TESTS is not set"
fi
codecs=$(tr ' ' '\n' <<<"${DEVICE_TESTS-}" | grep device_codecs)
if [[ ${SANITIZER_S-} == 0 ]]; then
    echo "NOT RUN compute-sanitizer: SANITIZER_S is 0"
elif [[ -n $codecs ]] && command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        if DISTGPIPE_GPU_TESTS=1 timeout "${SANITIZER_S:-120}" compute-sanitizer --tool $tool --error-exitcode 9 "$codecs" --test-threads 1 the_cpu >"$work/$tool.out" 2>&1; then
            echo "ok      compute-sanitizer $tool: $(grep -E 'SUMMARY' "$work/$tool.out" | tail -n 1)"
        else
            echo "FAILED  compute-sanitizer $tool, status $? (124: more than SANITIZER_S seconds)"
            failed=1
            tail -n 20 "$work/$tool.out"
        fi
    done
else
    echo "NOT RUN compute-sanitizer: it is not installed, or DEVICE_TESTS has no device_codecs"
fi
exit $failed
