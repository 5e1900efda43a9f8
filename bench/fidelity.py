#!/usr/bin/env python3
"""Measures how much codecs change real activations and gradients.

Reads a file that `distgpipe train … --capture DIR` wrote, runs it through `distgpipe codecs`, and prints for each cut and
direction, over all micro-batches: the mean squared error (relative to the mean square), the mean and median absolute errors
(relative to the root mean square), and how much of the tensor is exactly 0.

usage: bench/fidelity.py CAPTURED.safetensors [--codecs C,C,…] [--title TEXT]     needs: a release build, numpy, safetensors
"""
import argparse
import subprocess
import tempfile
from pathlib import Path

import numpy
from safetensors.numpy import load_file

BINARY = Path(__file__).resolve().parent.parent / "target" / "release" / "distgpipe"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captured")
    parser.add_argument("--codecs", default="uniform:4,sort:4,sort:2+2,tile:4,uniform:8,sort:8,sort:4+4,tile:8,uniform:12,sort:12,uniform:16,sort:16")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    original = load_file(options.captured)
    groups = {}
    for name in sorted(original):
        if original[name].dtype == numpy.float32:
            groups.setdefault(name.rsplit(".", 2)[0], []).append(name)
    joined = lambda tensors, names: numpy.concatenate([tensors[n].astype(numpy.float64).ravel() for n in names])
    lines = [f"## {options.title}", ""] if options.title else []
    rows = {group: [] for group in groups}
    for codec in options.codecs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "decoded.safetensors")
            subprocess.run([str(BINARY), "codecs", "--input", options.captured, "--codec", codec, "--write-decoded", out, "--json"],
                           check=True, stdout=subprocess.DEVNULL)
            decoded = load_file(out)
        for group, names in groups.items():
            x, y = joined(original, names), joined(decoded, names)
            root = numpy.sqrt((x * x).mean())
            error = numpy.abs(y - x)
            rows[group].append((codec, (error * error).mean() / root**2, error.mean() / root, numpy.median(error) / root))
    for group, figures in rows.items():
        x = joined(original, groups[group])
        shape = list(original[groups[group][0]].shape)
        lines += [f"**{group}**, {len(groups[group])} × {shape}, {numpy.mean(x == 0):.0%} zeros", "",
                  "| codec | mean squared error | mean error | median error |", "| --- | --- | --- | --- |"]
        lines += [f"| {codec} | {mse:.2e} | {mean:.2e} | {median:.2e} |" for codec, mse, mean, median in figures]
        lines.append("")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
