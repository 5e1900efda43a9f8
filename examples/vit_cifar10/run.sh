#!/bin/sh
# Fine-tunes ImageNet's ViT-B/16 on CIFAR-10 as client, server, client with 4-bit activations and gradients: the client keeps the
# images, the labels, the patch embedding and the classifier; the server has the encoder. `small` as first argument trains a small
# transformer from random weights instead, for minutes on a CPU. Further arguments go to `distgpipe train`, such as
# --server gpu-box. EPOCHS and OUT set the number of epochs and the folder of the results.
#
# Needs distgpipe on the PATH, and PyTorch 2.11 with torchvision for the export (docs/models.md).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../../python${PYTHONPATH:+:$PYTHONPATH}"
out=${OUT:-.}
if [ "${1:-}" = small ]; then
    shift
    name=small size=32 epochs=4 flags="--limit 4000 --limit-test 1000 --batch 50 --chunks 2 --optimizer adamw --lr 1e-3"
else
    name=vit size=224 epochs=3 flags="--batch 256 --chunks 8 --optimizer adamw --lr 3e-5 --precision bf16"
fi
python3 -m distgpipe_export "$here/model.py:$name" --input 3,$size,$size --output "$out/$name.pt2"
distgpipe data get cifar10
distgpipe models "$out/$name.pt2"
# shellcheck disable=SC2086  # flags are words
distgpipe train --model "$out/$name.pt2" --data cifar10 --cut "after=conv_proj,encoder" --codec tile:4 \
    --lr-decay cosine --seed 0 --epochs "${EPOCHS:-$epochs}" $flags --save "$out/$name.safetensors" "$@"
