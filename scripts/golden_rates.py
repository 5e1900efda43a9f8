#!/usr/bin/env python3
"""Writes the learning rates of PyTorch's LambdaLR with Hugging Face's schedules, as reference results.

usage: scripts/golden_rates.py      needs: torch==2.11.0
writes: crates/distgpipe/tests/golden/rates.json

The lambdas repeat the definitions of `get_{constant,linear,cosine,polynomial_decay}_schedule_with_warmup` in transformers'
optimization.py; the polynomial ends at 0. Steps are those of PyTorch's MultiStepLR, which steps once per epoch. The
optimizer's base rate is 1, so each rate is a factor.
"""
import json
import math
from pathlib import Path

import torch

TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe/tests/golden/rates.json"


def after_warm_up(update, updates, warm_up, decay, power):
    span = max(1, updates - warm_up)
    if decay == "constant":
        return 1.0
    if decay == "linear":
        return max(0.0, float(updates - update) / span)
    if decay == "cosine":
        half_waves = 0.5
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * half_waves * 2.0 * float(update - warm_up) / span)))
    if update > updates:
        return 0.0
    return (1 - (update - warm_up) / span) ** power


def rates(updates, warm_up, decay, power):
    def factor(update):
        if update < warm_up:
            return float(update) / float(max(1, warm_up))
        return after_warm_up(update, updates, warm_up, decay, power)

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    made = []
    for _ in range(updates):
        made.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return made


def stepped(epochs, per_epoch, milestones, factor):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=milestones, gamma=factor)
    made = []
    for _ in range(epochs):
        for _ in range(per_epoch):
            made.append(schedule.get_last_lr()[0])
            optimizer.step()
        schedule.step()
    return made


def main():
    cases, steps = [], []
    for epochs, per_epoch, milestones, factor in [(9, 3, [3, 6, 8], 0.1), (4, 1, [1], 0.5), (5, 2, [2, 2, 4], 0.2), (3, 2, [7], 0.1)]:
        steps.append({
            "epochs": epochs, "per_epoch": per_epoch, "milestones": milestones, "factor": factor,
            "rates": stepped(epochs, per_epoch, milestones, factor),
        })
    for decay, power in [("constant", 1.0), ("linear", 1.0), ("cosine", 1.0), ("polynomial", 2.0), ("polynomial", 0.5)]:
        for updates, warm_up in [(12, 0), (12, 4), (13, 5), (7, 6), (1, 0)]:
            cases.append({
                "decay": decay, "power": power, "updates": updates, "warm_up": warm_up,
                "rates": rates(updates, warm_up, decay, power),
            })
    golden = {"torch": torch.__version__.split("+")[0], "made_by": "scripts/golden_rates.py", "cases": cases, "steps": steps}
    TARGET.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{len(cases) + len(steps)} schedules")


if __name__ == "__main__":
    main()
