#!/usr/bin/env bash
# Measures distgpipe on one GPU, with one and two partitions, and plain PyTorch doing the same work.
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
    if summary=$("$binary" train --data synthetic --device cuda:0 --threads 4 --optimizer sgd --momentum 0 --lr 0.005 \
        --no-evaluate --json --epochs 1 "$@" 2>>"$out/errors.txt"); then
        python3 -c 'import json, sys; print(json.dumps({"name": sys.argv[1], **json.loads(sys.argv[2])}))' "$name" "$summary" >>"$out/ours.jsonl"
    else
        echo "$name failed: $*" >>"$out/errors.txt"
    fi
}

steps=12
mobilenet="--model mobilenet_v2 --set dropout=0.0 --batch 256 --samples $((256 * (steps + 2)))"
roberta="--model roberta --batch 64 --samples $((64 * (steps + 2)))"
for round in 0 1; do
    ours "MobileNetV2, 1 partition, 1 micro-batch" $mobilenet --place a --chunks 1
    ours "MobileNetV2, 1 partition, 1 micro-batch, not channels-last" $mobilenet --place a --chunks 1 --no-channels-last
    ours "MobileNetV2, 2 partitions, 2 micro-batches" $mobilenet --place a,b --balance 4,16 --chunks 2
    ours "MobileNetV2, 2 partitions, 4 micro-batches" $mobilenet --place a,b --balance 4,16 --chunks 4
    ours "MobileNetV2, 2 partitions, 4 micro-batches, always recomputed" $mobilenet --place a,b --balance 4,16 --chunks 4 --schedule gpipe --recompute always
    ours "roberta, 1 partition, 1 micro-batch" $roberta --place a --chunks 1
    ours "roberta, 2 partitions, 2 micro-batches" $roberta --place a,b --partitions 2 --chunks 2
    python3 bench/gpu.py --steps $steps >>"$out/pytorch.jsonl" 2>>"$out/errors.txt"
done
python3 - "$out" <<'P'
import json, sys
for file in ("ours", "pytorch"):
    for line in open(f"{sys.argv[1]}/{file}.jsonl"):
        row = json.loads(line)
        peak = max((w["peak_bytes"] for w in row.get("workers", [])), default=row.get("peak_bytes", 0))
        print(f"{row['name']:70} {row.get('samples_per_s_median', 0):8.0f} samples/s  {peak / 2**30:6.2f} GiB {row.get('error', '')}")
P
