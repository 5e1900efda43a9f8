#!/usr/bin/env bash
# Measures distgpipe on one GPU, and plain PyTorch and torchgpipe doing the same work (bench/gpu.py).
# usage: bench/gpu.sh OUT_DIR [BINARY]     needs: bench/gpu.py's packages in python3; the binary may have been built without CUDA
set -uo pipefail
out=$1
binary=${2:-target/release/distgpipe}
mkdir -p "$out"
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
    if summary=$(timeout 120 "$binary" train --data synthetic --device cuda:0 --threads 4 --optimizer sgd --momentum 0 --lr 0.005 \
        --no-evaluate --json --epochs 1 "$@" 2>>"$out/errors.txt"); then
        python3 -c 'import json, sys; print(json.dumps({"name": sys.argv[1], "flags": sys.argv[3:], **json.loads(sys.argv[2])}))' \
            "$name" "$summary" "$@" >>"$out/ours.jsonl"
    else
        echo "$name failed: $*" >>"$out/errors.txt"
    fi
}

# Two steps warm up and one records; the median is over all steps.
steps=20
resnet="--model resnet --batch 64 --samples $((64 * steps)) --place a --chunks 8 --schedule gpipe"
mobilenet="--model mobilenet_v2 --set dropout=0.0 --batch 256 --samples $((256 * steps))"
split="--partitions 3 --place client,server,client --chunks 8"
unet="--model unet --set dropout=0.0 --batch 32 --samples $((32 * steps)) --place a --chunks 8 --schedule gpipe"
amoebanet="--model amoebanet_d --set filters=256 --batch 64 --samples $((64 * steps)) --place a --chunks 8 --schedule gpipe"
roberta="--model roberta --batch 64 --samples $((64 * steps)) --place a --chunks 8"
ours "ResNet-101, 8 micro-batches" $resnet
ours "ResNet-101, 8 micro-batches, without graphs" $resnet --graphs off
ours "ResNet-101, 8 micro-batches, 4 streams" $resnet --graph-streams 4
ours "ResNet-101, 8 micro-batches, bf16" $resnet --precision bf16
ours "ResNet-101, 8 micro-batches, bf16, 4 streams" $resnet --precision bf16 --graph-streams 4
ours "ResNet-101, 8 micro-batches, except-last" $resnet --recompute except-last
ours "U-Net (5,64), 8 micro-batches, except-last" $unet --recompute except-last
ours "AmoebaNet-D (18,256), 8 micro-batches, except-last" $amoebanet --recompute except-last
ours "MobileNetV2, whole" $mobilenet --place a --chunks 1
ours "MobileNetV2, 8 micro-batches" $mobilenet --place a --chunks 8
for codec in raw tile:4 sort:8 sort:16; do
    ours "MobileNetV2, client-server-client, 8 micro-batches, $codec" $mobilenet $split --codec $codec
done
ours "MobileNetV2, client-server-client, 8 micro-batches, raw, without graphs" $mobilenet $split --graphs off
ours "MobileNetV2, client-server-client, 8 micro-batches, tile:4, two processes" $mobilenet $split --codec tile:4 --workers processes
ours "RoBERTa-base, 8 micro-batches" $roberta
ours "RoBERTa-base, 8 micro-batches, bf16" $roberta --precision bf16
python3 bench/gpu.py >"$out/peers.jsonl" 2>>"$out/errors.txt"
python3 - "$out" <<'P'
import json, sys
for file in ("ours", "peers"):
    for line in open(f"{sys.argv[1]}/{file}.jsonl"):
        row = json.loads(line)
        peak = max((w["peak_bytes"] for w in row.get("workers", [])), default=row.get("peak_bytes", 0))
        print(f"{row['name']:82} {row.get('samples_per_s_median', 0):8.0f} samples/s  {peak / 2**30:6.2f} GiB {row.get('error', '')}")
P
