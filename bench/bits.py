#!/usr/bin/env python3
"""Trains with codecs that send few bits per value, and writes accuracy beside the bits that crossed the links.

  digits     a small network on the built-in digits, on the CPU
  mobilenet  MobileNetV2 at 32×32 on the built-in digits, on the CPU or --device
  cifar10    MobileNetV2 at 224×224 on CIFAR-10 from ImageNet weights, on the GPU. --files names a folder with
             mobilenet_v2_features.safetensors and cifar10/.

Each codec trains once per seed; --jobs runs go at the same time. A run that has finished is not repeated, and one that was stopped
resumes, so the same command continues a measurement.

usage: bench/bits.py digits|mobilenet|cifar10 --out FOLDER [--files FOLDER] [--seeds 0,1,2] [--jobs 1] [--device DEVICE] [--only CODEC …]
needs: a release build, or the binary named by DISTGPIPE
"""
import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
from pathlib import Path

BINARY = os.environ.get("DISTGPIPE", str(Path(__file__).resolve().parent.parent / "target" / "release" / "distgpipe"))

# Activations, gradients. All but raw go through zstd, whose size counts.
CODECS = {
    "digits": [
        "raw", "tile:4", "tile:3", "tile:2", "tile:3,tile:3~", "tile:3~", "tile:4,tile:2~", "tile:3,tile:2~", "tile:4,tile:2",
        "tile:3,feedback(tile:3)", "tile:4,feedback(tile:2)", "tile:3,feedback(tile:2)", "tile:3/32", "tile:3/128", "tile:2,tile:4",
        "tile:4,tile:1~", "tile:4,feedback(topk:0.05)",
    ],
    "cifar10": ["raw", "tile:4", "tile:3,tile:3~", "tile:3,feedback(tile:3)", "tile:4,feedback(tile:2)"],
}
CODECS["mobilenet"] = CODECS["digits"]

TASKS = {
    "digits": "--data digits --set hidden=[256,256,256] --balance 1,2,1 --place client,server,client --chunks 2 --batch 64 --epochs 15 "
              "--lr 0.05 --lr-decay cosine --device cpu --threads 1",
    "mobilenet": "--model mobilenet_v2 --set image=32 --set classes=10 --data digits --cut first=1,last=1 --chunks 2 --batch 64 --epochs 8 "
                 "--lr 0.05 --lr-decay cosine --device cpu --threads 1",
    "cifar10": "--model mobilenet_v2 --weights FILES/mobilenet_v2_features.safetensors --init-missing --data cifar10 --data-dir FILES/cifar10 "
               "--cut first=1,last=1 --chunks 4 --batch 256 --epochs 5 --lr 0.02 --lr-decay cosine --device cuda:0 --threads 2 "
               "--loader-threads 2",
}


def file_name(codec, seed):
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in codec) + f"-seed{seed}"


def wrapped(codec):
    return codec if codec == "raw" else f"zstd({codec})"


def train(task, codec, seed, options):
    out = options.out / file_name(codec, seed)
    result = out.with_suffix(".json")
    if not result.exists():
        forward, _, backward = codec.partition(",")
        flags = TASKS[task].replace("FILES", str(options.files)).replace("--device cpu", f"--device {options.device}")
        command = [
            BINARY, "train", *flags.split(), "--seed", str(seed), "--codec", wrapped(forward),
            "--codec-backward", wrapped(backward or forward), "--json",
        ]
        if task == "cifar10":
            command += ["--checkpoint", str(out), "--checkpoint-every", "100", "--keep", "1", "--resume=if-any"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out.with_suffix(".log").write_text(f"$ {' '.join(command)}\n{done.stderr}")
        if done.returncode:
            return None
        result.write_text(done.stdout)
    return json.loads(result.read_text())


def bits(report):
    """Bits per value on the wire, frame headers included."""
    cuts = [cut for link in report["links"] for cut in link["cuts"]]
    wire, raw = (sum(cut[key] for cut in cuts) for key in ("wire_bytes", "raw_bytes"))
    # Tensors that are not encoded stay in memory between threads.
    return 32 * wire / raw if wire else 32.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--files", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="the device of digits and mobilenet")
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    codecs = options.only or CODECS[options.task]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        # Seed by seed, so that a measurement that is stopped compares all codecs.
        runs = {(codec, seed): pool.submit(train, options.task, codec, seed, options) for seed in seeds for codec in codecs}
    print("| activations, gradients | accuracy by seed, % | mean | bits per value on the wire |\n| --- | --- | --- | --- |")
    for codec in codecs:
        reports = [run.result() for (c, _), run in runs.items() if c == codec]
        reports = [report for report in reports if report]
        if not reports:
            print(f"| `{codec}` | failed | | |")
            continue
        accuracies = [100 * report["epochs"][-1]["test_accuracy"] for report in reports]
        each = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        print(f"| `{codec}` | {each} | {statistics.mean(accuracies):.2f} | {statistics.mean(map(bits, reports)):.2f} |")


if __name__ == "__main__":
    main()
