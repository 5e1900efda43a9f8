#!/usr/bin/env python3
"""Writes reference results of PyTorch under bfloat16 autocast for a small MobileNetV2, an MLP and a RoBERTa.

usage: scripts/golden_bf16.py [NAME…]      needs: torch==2.11.0 torchvision==0.26.0
writes: crates/distgpipe/tests/golden/NAME_bf16.json

Like scripts/golden_models.py, this uses the same formula for weights and inputs, computes the truth in float64, and stores a
digest of each tensor. Here the deviation is that of PyTorch's own runs under torch.autocast("cpu", torch.bfloat16), contiguous
and channels-last, with unfused and fused attention: parameters and gradients in float32, the forward pass under autocast, the
backward pass outside.

A float32 run is about a thousand times closer to the truth than the deviation. A test can therefore distinguish three cases:
computed in bfloat16, computed more precisely than requested, and computed wrongly. After many norms and ReLUs the deviation is
a large part of the gradient itself (a third in MobileNetV2), so only the median over many tensors is meaningful.
"""
import sys

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from golden_models import FOLDER, ROBERTA, Roberta, RobertaLayer, digests, images, rounded, sentences, values, weight, write

SEED = 1


def mobilenet_v2(settings):
    model = torchvision.models.MobileNetV2(num_classes=settings["classes"], width_mult=settings["width"], dropout=0.0)
    for entry, stride in zip([model.features[0], *model.features[1:18]], strides(settings["strides"])):
        for module in entry.modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
                module.stride = (stride, stride)
    return model


def strides(settings):
    """The stride of every layer with a 3×3 convolution: the stem, then the seven groups, whose first block has the stride."""
    blocks = [1, 2, 3, 4, 3, 3, 1]
    return [settings[0]] + [s if i == 0 else 1 for s, n in zip(settings[1:], blocks) for i in range(n)]


def compute(make, inputs, labels, precision, other_way=False):
    """Maps group → name → tensor. `precision` is float64, or bfloat16 for float32 under autocast."""
    dtype = torch.float64 if precision == torch.float64 else torch.float32
    model = make()
    model.load_state_dict({name: weight(SEED, name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()})
    model.to(dtype=dtype)
    if inputs[0].dim() == 4:
        memory_format = torch.channels_last if other_way else torch.contiguous_format
        model.to(memory_format=memory_format)
        inputs = [x.to(dtype=dtype, memory_format=memory_format) for x in inputs]
    for module in model.modules():
        if isinstance(module, RobertaLayer):
            module.fused = other_way
    casting = torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16)
    model.eval()
    with torch.no_grad(), casting:
        eval_output = model(*inputs)
    model.train()
    with casting:
        output = model(*inputs)
        loss = F.cross_entropy(output, labels)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient.dtype == dtype for gradient in gradients.values())
    assert loss.dtype == dtype, loss.dtype
    groups = {
        "eval_output": {"eval_output": eval_output},
        "train_output": {"train_output": output.detach()},
        "loss": {"loss": loss.detach()},
        "gradient": gradients,
        "buffer": {name: buffer for name, buffer in model.named_buffers() if buffer.dtype != torch.int64},
    }
    return {group: {name: tensor.double() for name, tensor in tensors.items()} for group, tensors in groups.items()}


class Mlp(nn.Module):
    def __init__(self, s):
        super().__init__()
        sizes = [3 * 8 * 8, *s["hidden"], s["classes"]]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


MLP = dict(input=[3, 8, 8], hidden=[48, 40, 32], classes=10, dropout=0.0)

MOBILENET = dict(width=0.25, image=32, classes=10, dropout=0.0, strides=[1, 1, 2, 2, 1, 1, 2, 1])

# File → our model's name, its settings, PyTorch's model, the inputs.
CASES = {
    "mlp": ("mlp", MLP, lambda: Mlp(MLP), images(8, 8)),
    "mobilenet_v2": ("mobilenet_v2", MOBILENET, lambda: mobilenet_v2(MOBILENET), images(8, 32)),
    "roberta": ("roberta", ROBERTA, lambda: Roberta(ROBERTA), sentences(4, 9, 30, 1)),
}


def golden(file):
    model, settings, make, inputs_of = CASES[file]
    inputs = inputs_of(SEED)
    labels = (torch.arange(inputs[0].shape[0]) * 7 + SEED) % settings["classes"]
    truth = compute(make, inputs, labels, torch.float64)
    cast = [compute(make, inputs, labels, torch.bfloat16, other_way) for other_way in (False, True)]
    runs = {group: digests(tensors, [run[group] for run in cast]) for group, tensors in truth.items()}
    description = {
        "model": model,
        "settings": settings,
        "precision": "bf16",
        "made_by": f"scripts/golden_bf16.py, torch {torch.__version__.split('+')[0]}, torchvision {torchvision.__version__.split('+')[0]}",
        "seed": SEED,
        "labels": labels.tolist(),
        "loss": truth["loss"]["loss"].item(),
        "eval_output": rounded(truth["eval_output"]["eval_output"].tolist()),
        "train_output": rounded(truth["train_output"]["train_output"].tolist()),
        "eval_output_deviation": runs["eval_output"]["eval_output"]["deviation"],
        "train_output_deviation": runs["train_output"]["train_output"]["deviation"],
        "gradients": runs["gradient"],
        "buffers": runs["buffer"],
    }
    if inputs[0].dim() == 4:
        description["input_dims"] = list(inputs[0].shape)
    else:
        description.update(ids=inputs[0].tolist(), mask=inputs[1].tolist())
    write(FOLDER / f"{file}_bf16.json", description)
    worst = sorted((entry["deviation"], name) for name, entry in runs["gradient"].items())
    print(file, "output", description["train_output_deviation"], "gradients", worst[0], worst[len(worst) // 2][0], *worst[-3:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for file in sys.argv[1:] or CASES:
        golden(file)
