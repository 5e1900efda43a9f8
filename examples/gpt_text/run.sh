#!/bin/sh
# Trains a small GPT-2 to predict the bytes of a text as client, server, client: the client has the text, and the first and last
# layers, which share a matrix. First argument: a file of text, or a directory of .txt files. Further arguments go to
# `distgpipe train`, such as --server gpu-box. EPOCHS and OUT set the number of epochs and the folder of the results.
#
# Needs distgpipe on the PATH, and PyTorch 2.11 with transformers for the export (docs/models.md).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../../python${PYTHONPATH:+:$PYTHONPATH}"
text=${1:?name a file of text}
shift
out=${OUT:-.}
python3 -m distgpipe_export "$here/model.py:model" --input "128:int64<256" --output "$out/gpt.pt2"
distgpipe models "$out/gpt.pt2"
distgpipe train --model "$out/gpt.pt2" --data text --data-dir "$text" --cut first=1,last=1 --batch 16 --chunks 2 \
    --optimizer adamw --lr 1e-3 --lr-decay cosine --epochs "${EPOCHS:-10}" --clip-norm 1 --seed 0 --save "$out/gpt.safetensors" "$@"
