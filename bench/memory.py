#!/usr/bin/env python3
"""Prints tables of bench/memory.sh's runs, next to torchgpipe's published figures.

torchgpipe's figures are what its allocators had reserved on the GPUs (max_memory_cached, added up over the partitions' GPUs).
Ours are two: the peak that tensors held, and the peak that the one GPU's allocator had reserved.
"""

import json
import sys
from pathlib import Path

GIB = 2**30
# Rows: our name, the model, and torchgpipe's total (U-Net) or activation (AmoebaNet-D) memory in GiB.
UNET = [("plain", "(6, 72)", 20.3), ("1", "(11, 128)", 20.5), ("2", "(24, 128)", 43.4), ("4", "(24, 160)", 79.1), ("8", "(48, 160)", 154.1)]
AMOEBA = [("plain", "(18, 208)", None), ("1", "(18, 416)", 0.91), ("2", "(18, 544)", 3.39), ("4", "(36, 544)", 6.91), ("8", "(72, 512)", 10.83)]


def read(directory, name):
    path = Path(directory) / f"{name}.json"
    if not path.exists() or not path.stat().st_size:
        return None
    run = json.loads(path.read_text())
    held = max(worker["peak_bytes"] for worker in run["workers"])
    taken = max(worker["reserved_bytes"] or 0 for worker in run["workers"])
    return run["parameters"], held, taken


def table(directory, family, rows, copies, total):
    """Prints one table. `copies` counts the tensors per parameter: itself, its gradient, and the optimizer's."""
    what = "memory" if total else "activations"
    print(f"| partitions | model | parameters | model memory, GiB | {what} held, torchgpipe's schedule (GPipe) | reserved, torchgpipe's schedule | {what} held, 1F1B, `always` | reserved, 1F1B, `always` | torchgpipe, reserved (published) |")
    print("| --- " * 9 + "|")
    for row, model, theirs in rows:
        cells, parameters = [], None
        for how in ["gpipe", "saving"]:
            found = read(directory, f"{family}-{row}" if row == "plain" else f"{family}-{row}-{how}")
            if row == "plain" and how == "saving" or not found:
                cells += ["–", "–"]
                continue
            parameters, held, taken = found
            base = 0 if total else 4 * copies * parameters
            cells += [f"{(held - base) / GIB:.2f}", f"{(taken - base) / GIB:.2f}"]
        if parameters:
            theirs = "out of memory" if theirs is None else f"{theirs}"
            print(f"| {row} | {model} | {parameters:,} | {4 * copies * parameters / GIB:.2f} | {' | '.join(cells)} | {theirs} |")


if __name__ == "__main__":
    print("U-Net (B, C), total memory\n")
    table(sys.argv[1], "unet", UNET, 2, True)
    print("\nAmoebaNet-D (L, D), activations: the peak minus the model memory\n")
    table(sys.argv[1], "amoeba", AMOEBA, 3, False)
