#!/usr/bin/env python3
"""Measures samples/s of plain PyTorch and of torchgpipe on one GPU, for the same work as the rows of bench/gpu.sh.

usage: bench/gpu.py [--steps 12] [--only REGEX]      needs: torch 2.11.0 with CUDA, torchvision, transformers; torchgpipe for its rows
Prints one JSON line per measurement. Data is on the GPU. Each step is timed from one synchronisation to the next.
"""
import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))


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


def images(rows, size, classes):
    x = torch.randn(rows, 3, size, size, device="cuda").contiguous(memory_format=torch.channels_last)
    return x, torch.randint(classes, (rows,), device="cuda")


def resnet101():
    from torchvision.models import resnet101

    return resnet101().cuda().train().to(memory_format=torch.channels_last), images(64, 224, 1000), F.cross_entropy


def mobilenet():
    from torchvision.models import mobilenet_v2

    model = mobilenet_v2(num_classes=10, dropout=0.0).cuda().train().to(memory_format=torch.channels_last)
    return model, images(256, 224, 10), F.cross_entropy


def amoebanet():
    from golden_models import AmoebaNetD

    model = AmoebaNetD(18, 256, 1000).cuda().train().to(memory_format=torch.channels_last)
    return model, images(64, 224, 1000), F.cross_entropy


def unet():
    from golden_models import UNet

    model = UNet({"depth": 5, "channels": 64, "convolutions": 5}).cuda().train().to(memory_format=torch.channels_last)
    x, _ = images(32, 192, 1)
    y = torch.randint(2, (32, 1, 192, 192), device="cuda").float()
    return model, (x, y), F.binary_cross_entropy_with_logits


def roberta():
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5, num_labels=2)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = RobertaForSequenceClassification(config)

        def forward(self, ids):
            return self.model(input_ids=ids).logits

    data = torch.randint(5, 50000, (64, 128), device="cuda"), torch.randint(2, (64,), device="cuda")
    return Logits().cuda().train(), data, F.cross_entropy


def whole(make, steps, precision=None):
    model, (x, y), loss = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss(model(x), y).backward()
        optimizer.step()

    return timed(step, len(x), steps)


def micro_batched(make, steps, chunks):
    """Micro-batches one after another, each kernel launched on its own."""
    model, (x, y), loss = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    def step():
        optimizer.zero_grad()
        for a, b in zip(x.chunk(chunks), y.chunk(chunks)):
            (loss(model(a), b) / chunks).backward()
        optimizer.step()

    return timed(step, len(x), steps)


def graphs(make, steps, chunks, streams, precision=None):
    """A CUDA graph per stream, which computes a micro-batch and adds its gradients to sums of the stream."""
    model, (x, y), loss = make()
    parameters = list(model.parameters())
    rows = len(x) // chunks
    lanes = []
    for _ in range(streams):
        stream = torch.cuda.Stream()
        a, b = x[:rows].clone(memory_format=torch.preserve_format), y[:rows].clone()
        sums = [torch.zeros_like(p) for p in parameters]

        def compute():
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
                result = loss(model(a), b) / chunks
            torch._foreach_add_(sums, list(torch.autograd.grad(result, parameters)))

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            compute()
        lanes.append((stream, graph, a, b, sums))
    for p, s in zip(parameters, lanes[0][4]):
        p.grad = s
    optimizer = torch.optim.SGD(parameters, lr=0.005)

    def step():
        main = torch.cuda.current_stream()
        for lane in lanes:
            torch._foreach_zero_(lane[4])
        for i in range(chunks):
            stream, graph, a, b, _ = lanes[i % streams]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                a.copy_(x[i * rows:(i + 1) * rows])
                b.copy_(y[i * rows:(i + 1) * rows])
                graph.replay()
        for lane in lanes:
            main.wait_stream(lane[0])
        for lane in lanes[1:]:
            torch._foreach_add_(lanes[0][4], lane[4])
        optimizer.step()

    return timed(step, len(x), steps)


def torchgpipe(make, steps, chunks):
    from torchgpipe import GPipe

    model, (x, y), loss = make()
    model = GPipe(nn.Sequential(model), balance=[1], devices=["cuda:0"], chunks=chunks, checkpoint="except_last")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    def step():
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return timed(step, len(x), steps)


RUNS = {
    "PyTorch ResNet-101, batch 64, whole": lambda n: whole(resnet101, n),
    "PyTorch ResNet-101, batch 64, 8 micro-batches": lambda n: micro_batched(resnet101, n, 8),
    "PyTorch ResNet-101, batch 64, 8 micro-batches, CUDA graph": lambda n: graphs(resnet101, n, 8, 1),
    "PyTorch ResNet-101, batch 64, 8 micro-batches, CUDA graphs on 2 streams": lambda n: graphs(resnet101, n, 8, 2),
    "PyTorch ResNet-101, batch 64, 8 micro-batches, CUDA graphs on 4 streams, bf16": lambda n: graphs(resnet101, n, 8, 4, "bf16"),
    "PyTorch MobileNetV2, batch 256, whole": lambda n: whole(mobilenet, n),
    "PyTorch MobileNetV2, batch 256, 8 micro-batches": lambda n: micro_batched(mobilenet, n, 8),
    "PyTorch MobileNetV2, batch 256, 8 micro-batches, CUDA graphs on 2 streams": lambda n: graphs(mobilenet, n, 8, 2),
    "PyTorch RoBERTa-base, batch 64, 128 tokens, whole": lambda n: whole(roberta, n),
    "PyTorch RoBERTa-base, batch 64, 128 tokens, 8 micro-batches": lambda n: micro_batched(roberta, n, 8),
    "torchgpipe ResNet-101, batch 64, 8 micro-batches, except_last": lambda n: torchgpipe(resnet101, n, 8),
    "torchgpipe U-Net (5,64), batch 32, 8 micro-batches, except_last": lambda n: torchgpipe(unet, n, 8),
    "torchgpipe AmoebaNet-D (18,256), batch 64, 8 micro-batches, except_last": lambda n: torchgpipe(amoebanet, n, 8),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="a regular expression: only the measurements in whose names it is found")
    options = parser.parse_args()
    for name, run in RUNS.items():
        if not re.search(options.only, name):
            continue
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            print(json.dumps({"name": name, **run(options.steps)}), flush=True)
        except Exception as error:  # if one cannot run, the others still should
            print(json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"}), flush=True)


if __name__ == "__main__":
    main()
