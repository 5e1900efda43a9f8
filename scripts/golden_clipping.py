#!/usr/bin/env python3
"""Writes a few steps of a small MLP with `clip_grad_norm_` and label smoothing, as reference results.

usage: scripts/golden_clipping.py      needs: torch==2.11.0, torchvision==0.26.0, numpy
writes: crates/distgpipe/tests/golden/clipping.json

Weights and data come from golden_models.py's formula. The results are computed in float64. `float32_deviation` is the largest
deviation of PyTorch's own float32 run, relative to the largest value of its kind. Some steps are clipped; others stay below the
norm.
"""
import json
from pathlib import Path

import torch
from golden_models import values, weight
from torch import nn

TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe/tests/golden/clipping.json"
SEED, ROWS, CLASSES, HIDDEN, RATE, STEPS = 3, 6, 5, [6, 4], 0.5, 6
CASES = [
    {"norm_max": 2.0, "label_smoothing": 0.0},
    {"norm_max": 1e9, "label_smoothing": 0.1},
    {"norm_max": 1.5, "label_smoothing": 0.3},
]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [12, *HIDDEN, CLASSES]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


def batch(step):
    x = 2.0 * values(SEED, f"x{step}", (ROWS, 1, 3, 4))
    return x, torch.tensor([(3 * row + step) % CLASSES for row in range(ROWS)])


def run(case, dtype):
    model = Mlp()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight(SEED, name, tuple(parameter.shape)))
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        x, target = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(dtype)), target, label_smoothing=case["label_smoothing"])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), case["norm_max"]).item())
        losses.append(loss.item())
        optimizer.step()
    x, target = batch(0)
    plain = nn.functional.cross_entropy(model(x.to(dtype)), target).item()
    parameters = {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "evaluation_loss": [plain], "parameters": parameters}


def deviation(exact, single):
    gap = max(abs(a - b) for a, b in zip(exact, single))
    return gap / max(abs(a) for a in exact)


def main():
    cases = []
    for case in CASES:
        exact, single = run(case, torch.float64), run(case, torch.float32)
        flat = lambda figures: [value for values in figures["parameters"].values() for value in values]
        deviations = {key: deviation(exact[key], single[key]) for key in ("losses", "norms", "evaluation_loss")}
        deviations["parameters"] = deviation(flat(exact), flat(single))
        cases.append({**case, **exact, "float32_deviation": deviations})
        print(case, "norms", [round(norm, 3) for norm in exact["norms"]], deviations)
    golden = {
        "torch": torch.__version__.split("+")[0], "made_by": "scripts/golden_clipping.py",
        "seed": SEED, "rows": ROWS, "classes": CLASSES, "hidden": HIDDEN, "input": [1, 3, 4], "learning_rate": RATE, "cases": cases,
    }
    TARGET.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
