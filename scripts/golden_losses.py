#!/usr/bin/env python3
"""Writes losses and their gradients of PyTorch, as reference results.

usage: scripts/golden_losses.py      needs: torch==2.11.0
writes: crates/distgpipe/tests/golden/losses.json
"""
import json
from pathlib import Path

import torch
import torch.nn.functional as F

TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe/tests/golden/losses.json"
SHAPE = (4, 1, 3, 2)


def main():
    count = torch.Size(SHAPE).numel()
    # Far from 0 too, where a sigmoid in between would lose all digits.
    scores = (torch.arange(count, dtype=torch.float64) * 0.7).sin() * torch.logspace(-1, 2, count, dtype=torch.float64)
    targets = {
        "zeros and ones": (torch.arange(count) % 3 == 0).double(),
        "between": torch.linspace(0, 1, count, dtype=torch.float64),
        "ones": torch.ones(count, dtype=torch.float64),
    }
    cases = []
    for name, target in targets.items():
        output = scores.reshape(SHAPE).clone().requires_grad_()
        loss = F.binary_cross_entropy_with_logits(output, target.reshape(SHAPE))
        loss.backward()
        cases.append({
            "name": name, "target": target.tolist(), "loss": loss.item(), "gradient": output.grad.flatten().tolist(),
        })
    golden = {
        "torch": torch.__version__.split("+")[0], "made_by": "scripts/golden_losses.py", "shape": SHAPE,
        "scores": scores.tolist(), "binary_cross_entropy": cases,
    }
    TARGET.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{len(cases)} losses")


if __name__ == "__main__":
    main()
