#!/usr/bin/env bash
# Runs torchgpipe's memory benchmarks (U-Net, AmoebaNet-D) on one GPU that holds all partitions: two training steps per row.
# The deepest U-Net runs only one step: nothing limits its gradients over more than 500 convolutions, and they overflow.
# usage: bench/memory.sh OUT_DIR BINARY [ROW...]     rows as named below, all by default; rows may run at the same time
#        bench/memory.py OUT_DIR                     prints the tables for the rows that ran
set -uo pipefail
out=$1
binary=$2
shift 2
wanted=" $* "
mkdir -p "$out"
torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')
export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

row() { # NAME FLAGS...
    local name=$1 steps=2
    shift
    [[ $name == unet-8-* ]] && steps=1
    [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
    "$binary" train --data synthetic --device cuda:0 --threads 4 --no-evaluate --json --epochs 1 --steps $steps --lr 1e-6 "$@" \
        >"$out/$name.json" 2>"$out/$name.log" || echo "$name failed: $(tail -n 1 "$out/$name.log")" >&2
}

# Batches, micro-batches, cuts and optimizers are those of torchgpipe's benchmarks.
unet="--model unet --optimizer sgd --momentum 0 --batch 32 --samples 64"
amoeba="--model amoebanet_d --optimizer rmsprop --batch 128 --samples 256"
gpipe="--schedule gpipe --recompute except-last"
saving="--schedule 1f1b --recompute always"
row unet-plain $unet --set convolutions=6 --set channels=72 --place w0 --chunks 1
row amoeba-plain $amoeba --set layers=18 --set filters=208 --place w0 --chunks 1
for how in gpipe saving; do
    flags=${!how}
    row unet-1-$how $unet --set convolutions=11 --set channels=128 --place w0 --chunks 32 $flags
    row amoeba-1-$how $amoeba --set layers=18 --set filters=416 --place w0 --chunks 128 $flags
    row amoeba-2-$how $amoeba --set layers=18 --set filters=544 --balance 16,8 --chunks 128 $flags
    row unet-2-$how $unet --set convolutions=24 --set channels=128 --balance 526,551 --chunks 32 $flags
    row amoeba-4-$how $amoeba --set layers=36 --set filters=544 --balance 16,12,7,7 --chunks 128 $flags
    row amoeba-8-$how $amoeba --set layers=72 --set filters=512 --balance 23,16,11,6,6,5,5,6 --chunks 128 $flags
    row unet-4-$how $unet --set convolutions=24 --set channels=160 --balance 472,54,36,515 --chunks 32 $flags
    row unet-8-$how $unet --set convolutions=48 --set channels=160 --balance 800,140,62,36,36,36,36,987 --chunks 32 $flags
done
