#!/bin/sh
# Fine-tunes a vision transformer on CIFAR-10 as client, server, client with 4-bit activations and gradients: the client keeps the
# images, the labels, the patch embedding and the classifier; the server has the encoder.
#
#   run.sh           ImageNet's ViT-B/16. Meant for a GPU
#   run.sh medium    a transformer of 3.6 million parameters that is first trained on CIFAR-100, on one worker: no weights to download
#   run.sh small     a small transformer from random weights, for minutes on a CPU
#
# Further arguments go to every `distgpipe train`, such as --server gpu-box. EPOCHS and PRETRAIN_EPOCHS set the numbers of epochs, OUT
# the folder of the results. CIFAR10 and CIFAR100 name folders with the official binary files; without them, the data is downloaded.
# A model that is in OUT already is not exported again.
#
# Needs distgpipe on the PATH, and PyTorch 2.11 with torchvision for the export (docs/models.md).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../../python${PYTHONPATH:+:$PYTHONPATH}"
out=${OUT:-.}

exported() { # NAME SIZE
    if [ ! -e "$out/$1.pt2" ]; then
        python3 -m distgpipe_export "$here/model.py:$1" --input "3,$2,$2" --output "$out/$1.pt2"
    fi
    distgpipe models "$out/$1.pt2"
}
downloaded() { # NAME DIR
    [ -n "$2" ] || distgpipe data get "$1"
}

case ${1:-} in
small)
    shift
    name=small size=32 epochs=4 flags="--limit 4000 --limit-test 1000 --batch 50 --chunks 2 --optimizer adamw --lr 1e-3"
    ;;
medium)
    shift
    name=medium size=32 epochs=12
    flags="--batch 256 --chunks 4 --optimizer adamw --weight-decay 0.05 --lr 5e-4 --lr-warm-up 5% --precision bf16"
    exported medium_100 32
    downloaded cifar100 "${CIFAR100:-}"
    # shellcheck disable=SC2086  # flags are words
    distgpipe train --model "$out/medium_100.pt2" --data cifar100 ${CIFAR100:+--data-dir "$CIFAR100"} --place client \
        --lr-decay cosine --seed 0 --epochs "${PRETRAIN_EPOCHS:-12}" $flags --save "$out/medium_100.safetensors" "$@"
    flags="$flags --weights $out/medium_100.safetensors --init-missing"
    ;;
*)
    name=vit size=224 epochs=3 flags="--batch 256 --chunks 8 --optimizer adamw --lr 3e-5 --precision bf16"
    ;;
esac
exported $name $size
downloaded cifar10 "${CIFAR10:-}"
# shellcheck disable=SC2086  # flags are words
distgpipe train --model "$out/$name.pt2" --data cifar10 ${CIFAR10:+--data-dir "$CIFAR10"} --cut "after=conv_proj,encoder" \
    --codec tile:4 --lr-decay cosine --seed 0 --epochs "${EPOCHS:-$epochs}" $flags --save "$out/$name.safetensors" "$@"
