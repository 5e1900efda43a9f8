#!/usr/bin/env python3
"""Raises the float32 deviations in the golden files to the largest that PyTorch has with any instruction set of this machine.

usage: scripts/golden_deviations.py [NAME…]      needs: torch==2.11.0 torchvision==0.26.0
changes: the deviations in crates/distgpipe/tests/golden/NAME.json; run it after golden_models.py

scripts/golden_models.py measures how far PyTorch's float32 runs are from the float64 truth, and a test's tolerance is a
multiple of that. But kernels differ from one instruction set to the next, and so does their rounding: on one processor,
PyTorch itself was further from the truth than the tolerance that another processor had given. So the deviation of a tensor is
the largest that any instruction set has shown. Truth, seeds and weights stay as they are, and no deviation gets smaller.
"""
import json
import os
import subprocess
import sys

import torch

import golden_models

# What `scripts/test-isa.sh` tests with, and the machine's own.
SETS = {
    "own": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse41": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
# The file's name of a group, and golden_models.py's.
GROUPS = {"gradients": "gradient", "buffers": "buffer"}
OUTPUTS = ["eval_output", "train_output"]


def path_of(file):
    return golden_models.FOLDER / f"{file}.json"


def measure(file):
    """Prints the deviations of PyTorch's float32 runs in this process from the truth, as JSON."""
    torch.set_num_threads(1)
    seed = json.loads(path_of(file).read_text())["seed"]
    _, settings, make, inputs_of = golden_models.CASES[file]
    inputs, labels = golden_models.batch(inputs_of, settings, seed)
    truth, _ = golden_models.compute(make, seed, inputs, labels, torch.float64)
    singles = [golden_models.compute(make, seed, inputs, labels, torch.float32, other_way)[0] for other_way in (False, True)]
    found = {}
    for group in [*GROUPS.values(), *OUTPUTS]:
        tensors = truth[group].items()
        found[group] = {name: golden_models.deviation(name, tensor, [single[group] for single in singles]) for name, tensor in tensors}
    print(json.dumps(golden_models.rounded(found)))


def raise_deviations(file):
    description = json.loads(path_of(file).read_text())
    for name, limits in SETS.items():
        run = subprocess.run([sys.executable, __file__, "--measure", file], env={**os.environ, **limits}, capture_output=True, text=True)
        if run.returncode != 0:
            # With AVX2, oneDNN writes past the end of a buffer for some shapes. distgpipe works around it, PyTorch does not.
            print(f"{file}: PyTorch ended with status {run.returncode} under {name}, which is left out", file=sys.stderr)
            continue
        found, raised = json.loads(run.stdout), 0
        for key, group in GROUPS.items():
            for tensor, entry in description[key].items():
                raised += found[group][tensor] > entry["deviation"]
                entry["deviation"] = max(entry["deviation"], found[group][tensor])
        for output in OUTPUTS:
            key = f"{output}_deviation"
            description[key] = max(description[key], found[output][output])
        print(f"{file}: {raised} of {sum(len(description[key]) for key in GROUPS)} deviations raised under {name}")
    golden_models.write(path_of(file), description)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    else:
        for case in sys.argv[1:] or golden_models.CASES:
            raise_deviations(case)
