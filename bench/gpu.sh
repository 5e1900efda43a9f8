#!/usr/bin/env bash
# Measures distgpipe on one GPU, and plain PyTorch and torchgpipe doing the same work (bench/gpu.py).
# usage: [ONLY=REGEX] bench/gpu.sh OUT_DIR [BINARY [CIFAR100_DIR]]     needs: bench/gpu.py's packages in python3; the binary may have been built without CUDA
# ONLY takes the rows whose names match it.
# Training from the loader reads CIFAR-100's files. Its speed does not depend on the pixels, so without the files the script makes some.
set -uo pipefail
out=$1
binary=${2:-target/release/distgpipe}
cifar=${3:-}
mkdir -p "$out"
if [[ -z $cifar ]]; then
    cifar=$(mktemp -d)
    trap 'rm -rf "$cifar"' EXIT
    python3 -c '
import os, sys
for name, records in ("train", 50000), ("test", 10000):
    with open(f"{sys.argv[1]}/{name}.bin", "wb") as file:
        for i in range(records):
            file.write(bytes([i % 20, i % 100]) + os.urandom(3072))' "$cifar"
fi
torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')
export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

{
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    python3 -c 'import torch; print("torch", torch.__version__)'
    "$binary" --version
    nproc
} >"$out/machine.txt" 2>&1

: >"$out/ours.jsonl"
ours() { # NAME FLAGS...
    local name=$1 summary
    shift
    [[ $name =~ ${ONLY:-.} ]] || return 0
    if summary=$(timeout 120 "$binary" train --device cuda:0 --threads 4 --optimizer sgd --momentum 0 --lr 0.005 --no-evaluate --json \
        --epochs 1 "$@" 2>>"$out/errors.txt"); then
        python3 -c 'import json, sys; print(json.dumps({"name": sys.argv[1], "flags": sys.argv[3:], **json.loads(sys.argv[2])}))' \
            "$name" "$summary" "$@" >>"$out/ours.jsonl"
    else
        echo "$name failed: $*" >>"$out/errors.txt"
    fi
}

# Two steps warm up and one records; the median is over all steps.
steps=20
resnet="--data synthetic --model resnet --batch 64 --samples $((64 * steps)) --place a --chunks 8 --schedule gpipe"
mobilenet="--data synthetic --model mobilenet_v2 --set dropout=0.0 --batch 256 --samples $((256 * steps))"
split="--partitions 3 --place client,server,client --chunks 8"
unet="--data synthetic --model unet --set dropout=0.0 --batch 32 --samples $((32 * steps)) --place a --chunks 8 --schedule gpipe"
amoebanet="--data synthetic --model amoebanet_d --set filters=256 --batch 64 --samples $((64 * steps)) --place a --chunks 8 --schedule gpipe"
roberta="--data synthetic --model roberta --batch 64 --samples $((64 * steps)) --place a --chunks 8"
ours "ResNet-101, 8 micro-batches" $resnet
ours "ResNet-101, 8 micro-batches, without graphs" $resnet --graphs off
ours "ResNet-101, 8 micro-batches, 4 streams" $resnet --graph-streams 4
ours "ResNet-101, 8 micro-batches, bf16" $resnet --precision bf16
ours "ResNet-101, 8 micro-batches, bf16, 4 streams" $resnet --precision bf16 --graph-streams 4
# Recomputation saves memory, so these rows show what graphs add to it.
for graphs in "" ", without graphs" ", 1 stream"; do
    flags=
    [[ $graphs == *without* ]] && flags="--graphs off"
    [[ $graphs == *stream* ]] && flags="--graph-streams 1"
    ours "ResNet-101, 8 micro-batches, except-last$graphs" $resnet --recompute except-last $flags
    ours "U-Net (5,64), 8 micro-batches, except-last$graphs" $unet --recompute except-last $flags
    ours "AmoebaNet-D (18,256), 8 micro-batches, except-last$graphs" $amoebanet --recompute except-last $flags
done
ours "MobileNetV2, whole" $mobilenet --place a --chunks 1
ours "MobileNetV2, whole, CIFAR-100 at 224 from the loader" --model mobilenet_v2 --set classes=100 --data cifar100 --data-dir "$cifar" \
    --limit $((256 * 60)) --batch 256 --place a --chunks 1
ours "MobileNetV2, 8 micro-batches" $mobilenet --place a --chunks 8
for codec in raw tile:4 sort:8 sort:16; do
    ours "MobileNetV2, client-server-client, 8 micro-batches, $codec" $mobilenet $split --codec $codec
done
ours "MobileNetV2, client-server-client, 8 micro-batches, raw, without graphs" $mobilenet $split --graphs off
ours "MobileNetV2, client-server-client, 8 micro-batches, tile:4, two processes" $mobilenet $split --codec tile:4 --workers processes
ours "RoBERTa-base, 8 micro-batches" $roberta
ours "RoBERTa-base, 8 micro-batches, bf16" $roberta --precision bf16
python3 bench/gpu.py ${ONLY:+--only "$ONLY"} >"$out/peers.jsonl" 2>>"$out/errors.txt"
python3 - "$out" <<'P'
import json, sys
for file in ("ours", "peers"):
    for line in open(f"{sys.argv[1]}/{file}.jsonl"):
        row = json.loads(line)
        peak = max((w["peak_bytes"] for w in row.get("workers", [])), default=row.get("peak_bytes", 0))
        print(f"{row['name']:82} {row.get('samples_per_s_median', 0):8.0f} samples/s  {peak / 2**30:6.2f} GiB {row.get('error', '')}")
P
