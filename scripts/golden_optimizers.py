#!/usr/bin/env python3
"""Writes ten steps of PyTorch's optimizers on a vector of five values, to test our optimizers against.

usage: scripts/golden_optimizers.py      needs: torch==2.11.0
writes: crates/distgpipe/tests/golden/optimizers.json

The start values and gradients are exact in float32. The parameters after each step are computed in float64, so they follow the
formula and not one implementation's rounding. `float32_deviation` is the largest deviation of PyTorch's own float32 run,
relative to the largest parameter.
"""
import json
from pathlib import Path

import torch

TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe/tests/golden/optimizers.json"
STEPS = 10
START = [0.5, -1.25, 2.0, 0.0, -0.0078125]
# Eighths, including a zero and a large value. The last parameter's gradient is tiny, so that Adam's epsilon matters.
GRADIENTS = [[((7 * step + 3) % 11 - 5) / 8, ((5 * step + 1) % 9 - 4) / 8, (-1) ** step * 4.0, 0.0 if step < 5 else 0.25, 2.0**-30 * (step + 1)]
             for step in range(STEPS)]
CASES = [
    ("sgd", "SGD", dict(lr=0.1)),
    ("sgd_momentum", "SGD", dict(lr=0.1, momentum=0.9)),
    ("sgd_nesterov", "SGD", dict(lr=0.1, momentum=0.9, nesterov=True)),
    ("sgd_weight_decay", "SGD", dict(lr=0.1, weight_decay=1e-2)),
    ("sgd_momentum_weight_decay", "SGD", dict(lr=0.1, momentum=0.9, weight_decay=1e-2)),
    ("sgd_nesterov_weight_decay", "SGD", dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)),
    ("adam", "Adam", dict(lr=1e-2)),
    ("adam_weight_decay", "Adam", dict(lr=1e-2, weight_decay=1e-2)),
    ("adamw", "AdamW", dict(lr=1e-2, weight_decay=1e-2)),
    ("rmsprop", "RMSprop", dict(lr=1e-2)),
    ("rmsprop_momentum", "RMSprop", dict(lr=1e-2, momentum=0.9)),
    ("rmsprop_weight_decay", "RMSprop", dict(lr=1e-2, weight_decay=1e-2)),
    ("rmsprop_momentum_weight_decay", "RMSprop", dict(lr=1e-2, momentum=0.9, weight_decay=1e-2)),
]


def run(kind, options, dtype):
    parameter = torch.tensor(START, dtype=dtype, requires_grad=True)
    optimizer = getattr(torch.optim, kind)([parameter], **options)
    after = []
    for gradient in GRADIENTS:
        parameter.grad = torch.tensor(gradient, dtype=dtype)
        optimizer.step()
        after.append(parameter.tolist())
    return after, optimizer.defaults


def main():
    assert torch.tensor([START] + GRADIENTS).double().tolist() == [START] + GRADIENTS
    cases = {}
    for name, kind, options in CASES:
        after, defaults = run(kind, options, torch.float64)
        single, _ = run(kind, options, torch.float32)
        difference = (torch.tensor(after, dtype=torch.float64) - torch.tensor(single, dtype=torch.float64)).abs().max().item()
        wanted = ("lr", "momentum", "nesterov", "weight_decay", "betas", "eps", "alpha")
        cases[name] = {
            "optimizer": kind,
            "options": {key: defaults[key] for key in wanted if key in defaults},
            "float32_deviation": difference / max(abs(value) for row in after for value in row),
            "parameters_after_step": after,
        }
    golden = {
        "torch": torch.__version__.split("+")[0],
        "made_by": "scripts/golden_optimizers.py",
        "start": START,
        "gradients": GRADIENTS,
        "cases": cases,
    }
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(golden, indent=1) + "\n")
    for name, case in cases.items():
        print(f"{name:28} float32 deviation {case['float32_deviation']:.1e}  last {case['parameters_after_step'][-1]}")


if __name__ == "__main__":
    main()
