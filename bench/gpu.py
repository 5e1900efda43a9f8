#!/usr/bin/env python3
"""Measures samples/s and peak memory of plain PyTorch on one GPU, for the same work as `distgpipe train --device cuda:0`.

usage: bench/gpu.py [--steps 20]      needs: torch 2.11.0 with CUDA, torchvision, transformers
Prints one JSON line per measurement. Each step reads its data from host memory, as in training, unless the name says otherwise.
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F


def timed(step, rows, steps, warm_up=5):
    times = []
    for i in range(steps + warm_up):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if i >= warm_up:
            times.append(time.perf_counter() - start)
    return {
        "samples_per_s_median": rows / statistics.median(times),
        "samples_per_s_best": rows / min(times),
        "step_s": times,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def mobilenet(rows, steps, channels_last, on_device):
    from torchvision.models import mobilenet_v2

    torch.cuda.reset_peak_memory_stats()
    model = mobilenet_v2(num_classes=10, dropout=0.0).cuda().train()
    x, y = torch.randn(rows, 3, 224, 224), torch.randint(10, (rows,))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)
    if on_device:
        x, y = x.cuda().contiguous(memory_format=layout), y.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.cuda().contiguous(memory_format=layout)), y.cuda())
        loss.backward()
        optimizer.step()
        loss.item()

    return timed(step, rows, steps)


def transformer(rows, steps):
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.cuda.reset_peak_memory_stats()
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5, num_labels=2)
    model = RobertaForSequenceClassification(config).cuda().train()
    ids, mask = torch.randint(5, 50000, (rows, 128)), torch.ones(rows, 128, dtype=torch.int64)
    y = torch.randint(2, (rows,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(input_ids=ids.cuda(), attention_mask=mask.cuda()).logits, y.cuda())
        loss.backward()
        optimizer.step()
        loss.item()

    return timed(step, rows, steps)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    runs = {
        "PyTorch MobileNetV2, batch 256": lambda: mobilenet(256, steps, False, False),
        "PyTorch MobileNetV2, batch 256, channels-last": lambda: mobilenet(256, steps, True, False),
        "PyTorch MobileNetV2, batch 256, channels-last, data on the GPU": lambda: mobilenet(256, steps, True, True),
        "PyTorch RoBERTa-base, batch 64, 128 tokens": lambda: transformer(64, steps),
    }
    for name, run in runs.items():
        try:
            print(json.dumps({"name": name, **run()}), flush=True)
        except Exception as error:  # if one cannot run, the others still should
            print(json.dumps({"name": name, "error": str(error)}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
