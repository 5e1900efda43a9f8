#!/usr/bin/env bash
# Measures the speed, time and memory rows of the published tables on one GPU, for runs/recipes, and the costs behind the simulated rows.
# usage: bench/recipes.sh OUT_DIR [BINARY [PART...]]     PARTS: see `parts` below; all of them by default, the most wanted first
# TINY=1 tries the script on the CPU with models that have hardly any width. LIMIT is the number of seconds after which no table is begun
# and the one in progress is stopped (default 450). Needs: torch 2.11 in python3, unless TINY=1. The binary may have been built without CUDA.
# ADD=FOLDER completes the tables that are files in FOLDER, instead of measuring all of their rows again.
# Leaves OUT_DIR/recipes.tgz, whose NAME.json go to runs/recipes; OUT_DIR/log.txt; OUT_DIR/bandwidth.json.
set -uo pipefail
mkdir -p "$1"
out=$(realpath "$1")
binary=$(realpath "${2:-target/release/distgpipe}")
shift $(($# < 2 ? $# : 2))
limit=${LIMIT:-450}
parts="${*:-time pipelines speed cuts throughput amoebanet imagenet links bandwidth}"
add=${ADD:+$(realpath "$ADD")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export XDG_CACHE_HOME=$work/cache
# The files have the command, in which no path of this machine belongs.
cd "$work" || exit 1

device="--device cuda:0" steps=13
if [[ -n ${TINY-} ]]; then
    device="--device cpu --threads 1" steps=5
else
    torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))') || exit 1
    export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
# The speed of a step depends neither on the data nor on the learning rate, and random weights must not diverge.
flags="$device --data synthetic --lr 1e-4 --no-evaluate --steps $steps"
{
    date -u
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$binary" --version
    "$binary" devices
} >"$out/log.txt" 2>&1

# What makes the models small enough for a trial.
tiny() { # TABLE
    [[ -z ${TINY-} ]] && return
    case $1 in
    *roberta*) echo "--set hidden=24 --set heads=2 --set feed_forward=32 --set vocabulary=200 --set tokens=8 --batch 16" ;;
    pipeline-*) echo "--set image=32 --rows mobilenet --batch 16" ;;
    *mobilenet* | separated-* | first-*) echo "--set image=32 --batch 16" ;;
    *vgg*) echo "--set image=32 --batch 8" ;;
    unet*) echo "--set image=64 --set channels=4" ;;
    amoebanet*) echo "--set image=64 --set filters=16" ;;
    resnet*) echo "--set image=32" ;;
    ablation) echo "--set image=32 --rows cifar10 --batch 16" ;;
    esac
}

table() { # NAME FLAGS...
    local name=$1 left=$((limit - SECONDS))
    shift
    if ((left < 10)); then
        echo "$name: not begun, the time is over" | tee -a "$out/log.txt"
        return
    fi
    echo "== $name at $SECONDS s" >>"$out/log.txt"
    if [[ -n $add && -e $add/$name.json ]]; then
        mkdir -p tables && cp "$add/$name.json" tables
        set -- --add "$@"
    fi
    # The file of a table is written after each row, so that a table that is stopped keeps its first ones.
    timeout -k 10 "$left" "$binary" recipe run --table "$name" --out tables --row-limit "${ROW_LIMIT:-40}" $flags "$@" $(tiny "$name") \
        >>"$out/log.txt" 2>&1 || echo "$name: status $?" | tee -a "$out/log.txt"
    tar -C "$work" -czf "$out/recipes.tgz.new" tables 2>/dev/null && mv "$out/recipes.tgz.new" "$out/recipes.tgz"
    echo "$name done at $SECONDS s"
}

# Workers and replicas are processes that share the GPU.
shared="--workers processes"
for part in $parts; do
    case $part in
    time) # time per phase: 16 rows
        for name in time-roberta time-mobilenet time-vgg13 time-roberta-sgd time-roberta-adam time-mobilenet-adamw time-vgg13-adamw; do
            table $name $shared --phases exact
        done
        ;;
    pipelines) table pipeline-vs-data-parallel $shared ;;
    speed) # one GPU measured, several simulated
        table unet-speed --simulate
        ROW_LIMIT=60 table resnet101-speed --simulate
        ;;
    cuts) # each with the row that its speed-up is relative to
        for name in mobilenet-memory first-4-and-last-3 separated-averagely; do table $name $shared; done
        ;;
    throughput) table roberta-throughput $shared ;;
    amoebanet) table amoebanet-speed --simulate ;;
    imagenet) ROW_LIMIT=60 table resnet101-imagenet --simulate ;;
    links) table ablation $shared ;;
    bandwidth)
        if ((SECONDS + 20 < limit)); then
            timeout 60 "$binary" bandwidth --workers 2 --codec raw,sort:16,sort:12,sort:8,sort:4 --seconds 0.2 --json \
                >"$out/bandwidth.json" 2>>"$out/log.txt" || echo "bandwidth: status $?" | tee -a "$out/log.txt"
        fi
        ;;
    *) echo "no part is called $part" ;;
    esac
done
echo "all done at $SECONDS s"
