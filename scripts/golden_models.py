#!/usr/bin/env python3
"""Writes PyTorch's reference results for small ResNets, a VGG-13, an AmoebaNet-D, a U-Net and a RoBERTa.

usage: scripts/golden_models.py [NAME…]      needs: torch==2.11.0 torchvision==0.26.0
writes: crates/distgpipe/tests/golden/NAME.json

ResNet and VGG use torchvision's blocks, with fewer channels. AmoebaNet-D, U-Net and RoBERTa are written here in plain torch.nn,
from the papers' tables and from Hugging Face's definition. `RobertaForSequenceClassification` gave the same outputs and
gradients up to float64 rounding (tried with transformers 5.22 and this script's weights).

The files contain no weights: both sides generate them with one formula (`values`), which is exact in float32. The truth is
computed in float64. For each gradient the file stores its norm, its product with a pseudo-random tensor, a few of its values,
and the largest deviation of PyTorch's own float32 runs from the truth (contiguous and channels-last, unfused and fused
attention). A test's tolerance for a tensor is a stated multiple of PyTorch's own rounding error, not a guess.

Every weight, scale, shift and running statistic is random. A fresh network has ones and zeros there, which hide mistakes.
"""
import json
import sys
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

FOLDER = Path(__file__).resolve().parent.parent / "crates/distgpipe/tests/golden"
# A gradient below this is zero in exact arithmetic: a shift that the next norm, or the softmax, cancels.
ZERO = 1e-9
# Every ReLU input must be at least this many times its tensor's float32 error away from 0. If an input changed sign,
# gradients would change by more than rounding.
MARGIN = 4.0
SEEDS = range(1, 400)
KEPT_VALUES = 6


# The formula ---------------------------------------------------------------------------------------------------------


def values(seed, name, shape):
    """Pseudo-random numbers in [-1, 1), exact in float32: splitmix64 from FNV-1a of the name, the upper 24 bits."""
    start = 0xCBF29CE484222325
    for byte in f"{seed}/{name}".encode():
        start = (start ^ byte) * 0x100000001B3 % 2**64
    count = int(numpy.prod(shape, dtype=numpy.int64))
    with numpy.errstate(over="ignore"):
        z = numpy.uint64(start) + numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z = z ^ (z >> numpy.uint64(31))
    units = (z >> numpy.uint64(40)).astype(numpy.float32)
    return torch.from_numpy((units - numpy.float32(2**23)) / numpy.float32(2**23)).reshape(shape)


def weight(seed, name, shape):
    """Generates a tensor of the network from its name and shape."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    unit = values(seed, name, shape)
    if len(shape) >= 2:
        return unit * torch.tensor((6.0 / numpy.prod(shape[1:])) ** 0.5, dtype=torch.float32)
    # Small scales and positive shifts keep most ReLU inputs away from 0. If half of them were negative, rounding errors
    # would grow from norm to norm in a deep network.
    offset, scale = {"weight": (0.625, 0.25), "bias": (0.75, 0.25), "running_mean": (0.0, 0.25), "running_var": (1.0, 0.5)}[name.split(".")[-1]]
    return unit * scale + offset


# The networks --------------------------------------------------------------------------------------------------------


def resnet(depth, width, classes):
    block, groups = {18: (BasicBlock, [2, 2, 2, 2]), 50: (Bottleneck, [3, 4, 6, 3])}[depth]
    model = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=classes)
    model.conv1, model.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
    model.inplanes = width
    for group, blocks in enumerate(groups):
        made = model._make_layer(block, width << group, blocks, stride=1 if group == 0 else 2)
        setattr(model, f"layer{group + 1}", made)
    model.fc = nn.Linear(8 * width * block.expansion, classes)
    return model


def vgg13(width, hidden, classes):
    scaled = [entry if entry == "M" else entry * width // 64 for entry in torchvision.models.vgg.cfgs["B"]]
    model = torchvision.models.VGG(torchvision.models.vgg.make_layers(scaled), num_classes=classes, dropout=0.0)
    first, second, third = nn.Linear(8 * width * 49, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, classes)
    model.classifier[0], model.classifier[3], model.classifier[6] = first, second, third
    return model


class ReluConvNorm(nn.Module):
    def __init__(self, inputs, outputs, kernel=1, stride=1, padding=0):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x):
        return self.bn(self.conv(self.relu(x)))


class FactorizedReduction(nn.Module):
    """Takes half of the channels from x and half from x shifted by one pixel, both with stride 2."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.conv2 = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x):
        x = self.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.bn(torch.cat([self.conv1(x), self.conv2(shifted)], 1))


def amoebanet_operation(name, c, stride):
    few = c // 4
    return {
        "none": lambda: nn.Identity() if stride == 1 else FactorizedReduction(c, c),
        # Also used for "max pool 3×3": the reference implementation uses this operation for it.
        "average": lambda: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
        "max": lambda: nn.MaxPool2d(2, stride),
        "1x1": lambda: nn.Sequential(ReluConvNorm(c, c, 1, stride)),
        "3x3": lambda: nn.Sequential(ReluConvNorm(c, few), ReluConvNorm(few, few, 3, stride, 1), ReluConvNorm(few, c)),
        "1x7": lambda: nn.Sequential(
            ReluConvNorm(c, few),
            ReluConvNorm(few, few, (1, 7), (1, stride), (0, 3)),
            ReluConvNorm(few, few, (7, 1), (stride, 1), (3, 0)),
            ReluConvNorm(few, c),
        ),
    }[name]()


NORMAL = [(1, "1x1"), (1, "average"), (1, "none"), (0, "1x7"), (0, "1x1"), (0, "1x7"), (2, "average"), (2, "none"), (1, "average"), (5, "1x1")]
REDUCTION = [(0, "max"), (0, "average"), (2, "none"), (1, "3x3"), (2, "1x7"), (2, "average"), (3, "none"), (1, "max"), (2, "average"), (3, "1x1")]


class Cell(nn.Module):
    def __init__(self, inputs, c, reduction, after_reduction):
        super().__init__()
        self.reduce1 = nn.Sequential(ReluConvNorm(inputs[0], c))
        if after_reduction:
            self.reduce2 = FactorizedReduction(inputs[1], c)
        elif inputs[1] != c:
            self.reduce2 = nn.Sequential(ReluConvNorm(inputs[1], c))
        else:
            self.reduce2 = nn.Identity()
        table, self.concatenated = (REDUCTION, [4, 5, 6]) if reduction else (NORMAL, [0, 3, 4, 6])
        self.indices = [index for index, _ in table]
        strides = [2 if reduction and index < 2 else 1 for index in self.indices]
        self.operations = nn.ModuleList(amoebanet_operation(name, c, stride) for (_, name), stride in zip(table, strides))

    def forward(self, pair):
        states = [self.reduce1(pair[0]), self.reduce2(pair[1])]
        for i in range(0, 10, 2):
            states.append(sum(self.operations[j](states[self.indices[j]]) for j in (i, i + 1)))
        return torch.cat([states[i] for i in self.concatenated], 1), pair[0]


class AmoebaNetD(nn.Module):
    def __init__(self, layers, filters, classes):
        super().__init__()
        c = filters // 4
        inputs, after_reduction = [c, c], False
        self.stem1 = ReluConvNorm(3, c, 3, 2, 1)
        self.cells = ["stem2", "stem3"]
        for group in (1, 3, 5):
            self.cells += [f"cell{group}_normal{i + 1}" for i in range(layers // 3)]
            self.cells += [f"cell{group + 1}_reduction"] if group < 5 else []
        for name in self.cells:
            reduction = "normal" not in name
            c = 2 * c if reduction else c
            setattr(self, name, Cell(inputs, c, reduction, after_reduction))
            inputs, after_reduction = [c * (3 if reduction else 4), inputs[0]], reduction
        self.classify = nn.Module()
        self.classify.fc = nn.Linear(inputs[0], classes)

    def forward(self, x):
        x = self.stem1(x)
        pair = (x, x)
        for name in self.cells:
            pair = getattr(self, name)(pair)
        # For 224×224 images this is the 7×7 average pool.
        return self.classify.fc(pair[0].mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, s):
        super().__init__()
        depth, c = s["depth"], s["channels"]
        self.relu = nn.LeakyReLU(0.01)

        def cell(inputs, middle, outputs):
            sizes = [inputs] + [middle] * (s["convolutions"] - 1) + [outputs]
            convs = (nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in zip(sizes, sizes[1:]))
            return nn.ModuleList(nn.ModuleDict({"conv": conv}) for conv in convs)

        self.encoder = nn.ModuleList(cell(3 if i == 0 else c << (i - 1), c << i, c << i) for i in range(depth))
        deepest = c << (depth - 1)
        self.bottleneck = cell(deepest, 2 * deepest, deepest)
        self.decoder = nn.ModuleList(cell(c << (i + 1), (c << i) // 2, (c << i) // 2) for i in range(depth))
        self.output = nn.Conv2d(c // 2, 1, 1, bias=False)

    def run(self, cell, x):
        for entry in cell:
            x = self.relu(F.instance_norm(entry["conv"](x)))
        return x

    def forward(self, x):
        skips = []
        for cell in self.encoder:
            skips.append(self.run(cell, x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.run(self.bottleneck, x)
        for cell in reversed(self.decoder):
            x, skip = F.interpolate(x, scale_factor=2, mode="nearest"), skips.pop()
            x = F.pad(x, (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2]))
            x = self.run(cell, torch.cat([x, skip], 1))
        return self.output(x)


class RobertaLayer(nn.Module):
    """Attention and feed-forward block, with Hugging Face's names."""

    def __init__(self, s):
        super().__init__()
        h, eps = s["hidden"], s["eps"]
        self.heads, self.fused = s["heads"], False
        self.attention = nn.ModuleDict({
            "self": nn.ModuleDict({name: nn.Linear(h, h) for name in ("query", "key", "value")}),
            "output": nn.ModuleDict({"dense": nn.Linear(h, h), "LayerNorm": nn.LayerNorm(h, eps)}),
        })
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(h, s["feed_forward"])})
        self.output = nn.ModuleDict({"dense": nn.Linear(s["feed_forward"], h), "LayerNorm": nn.LayerNorm(h, eps)})

    def forward(self, x, mask):
        rows, tokens, hidden = x.shape
        own, out = self.attention["self"], self.attention["output"]
        query, key, value = (own[name](x).view(rows, tokens, self.heads, -1).transpose(1, 2) for name in ("query", "key", "value"))
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, mask[:, None, None, :] != 0)
        else:
            scores = query @ key.transpose(2, 3) / (hidden // self.heads) ** 0.5
            scores = scores + (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(torch.float32).min
            mixed = scores.softmax(-1) @ value
        mixed = mixed.transpose(1, 2).reshape(rows, tokens, hidden)
        x = out["LayerNorm"](out["dense"](mixed) + x)
        return self.output["LayerNorm"](self.output["dense"](F.gelu(self.intermediate["dense"](x))) + x)


class Roberta(nn.Module):
    def __init__(self, s):
        super().__init__()
        h = s["hidden"]
        self.padding = s["padding"]
        self.embeddings = nn.ModuleDict({
            "word_embeddings": nn.Embedding(s["vocabulary"], h, padding_idx=self.padding),
            "position_embeddings": nn.Embedding(s["positions"], h, padding_idx=self.padding),
            "token_type_embeddings": nn.Embedding(s["token_types"], h),
            "LayerNorm": nn.LayerNorm(h, s["eps"]),
        })
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(RobertaLayer(s) for _ in range(s["layers"]))})
        self.classifier = nn.ModuleDict({"dense": nn.Linear(h, h), "out_proj": nn.Linear(h, s["classes"])})

    def forward(self, ids, mask):
        tables = self.embeddings
        token = (ids != self.padding).long()
        place = token.cumsum(1) * token + self.padding
        x = tables["word_embeddings"](ids) + tables["token_type_embeddings"](torch.zeros_like(ids)) + tables["position_embeddings"](place)
        x = tables["LayerNorm"](x)
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
        return self.classifier["out_proj"](torch.tanh(self.classifier["dense"](x[:, 0])))


def images(rows, image):
    return lambda seed: [2 * values(seed, "x", (rows, 3, image, image))]


def sentences(rows, tokens, vocabulary, padding):
    """Every other row is shorter: padded, and masked from attention. In addition, one token of the first row is masked and
    one padding token of the second is not, because ids and mask are independent."""

    def make(seed):
        ids = (values(seed, "x", (rows, tokens)) * 1e6).long() % vocabulary
        ids[ids == padding] = padding + 1
        mask = torch.ones_like(ids)
        ids[1::2, tokens - 3:], mask[1::2, tokens - 3:] = padding, 0
        mask[0, 2], mask[1, tokens - 3] = 0, 1
        return [ids, mask]

    return make


ROBERTA = dict(layers=2, hidden=24, heads=3, feed_forward=40, vocabulary=30, tokens=9, positions=14, token_types=2, padding=1, classes=3, dropout=0.0, eps=1e-5)

UNET = dict(convolutions=2, channels=4, depth=2, image=22, dropout=0.0)

# File → our model's name, its settings, PyTorch's model, the inputs.
CASES = {
    "resnet18": ("resnet", dict(depth=18, classes=10, image=48, width=8), lambda: resnet(18, 8, 10), images(6, 48)),
    "resnet50": ("resnet", dict(depth=50, classes=10, image=48, width=4), lambda: resnet(50, 4, 10), images(6, 48)),
    "vgg13": ("vgg13", dict(classes=10, image=48, width=8, hidden=32, dropout=0.0), lambda: vgg13(8, 32, 10), images(4, 48)),
    "amoebanet_d": ("amoebanet_d", dict(layers=3, filters=16, classes=10, image=64), lambda: AmoebaNetD(3, 16, 10), images(4, 64)),
    "unet": ("unet", UNET, lambda: UNet(UNET), images(2, 22)),
    "roberta": ("roberta", ROBERTA, lambda: Roberta(ROBERTA), sentences(4, 9, 30, 1)),
}


# Computing and comparing ---------------------------------------------------------------------------------------------


def compute(make, seed, inputs, labels, dtype, other_way=False):
    """Maps group → name → tensor, all computed in `dtype`; also returns the inputs of every ReLU. `other_way` selects
    channels-last for images and fused attention for text."""
    model = make()
    model.load_state_dict({name: weight(seed, name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()})
    model.to(dtype=dtype)
    if inputs[0].dim() == 4:
        memory_format = torch.channels_last if other_way else torch.contiguous_format
        model.to(memory_format=memory_format)
        inputs = [x.to(dtype=dtype, memory_format=memory_format) for x in inputs]
    for module in model.modules():
        if isinstance(module, RobertaLayer):
            module.fused = other_way
    model.eval()
    with torch.no_grad():
        eval_output = model(*inputs)
    model.train()
    rectified = []
    for module in model.modules():
        if isinstance(module, (nn.ReLU, nn.LeakyReLU)):
            module.inplace = False
            module.register_forward_pre_hook(lambda _, x: rectified.append(x[0].detach().double()))
    output = model(*inputs)
    loss = F.mse_loss(output, labels.to(dtype)) if labels.is_floating_point() else F.cross_entropy(output, labels)
    loss.backward()
    groups = {
        "eval_output": {"eval_output": eval_output},
        "train_output": {"train_output": output.detach()},
        "loss": {"loss": loss.detach()},
        "gradient": {name: parameter.grad for name, parameter in model.named_parameters()},
        "buffer": {name: buffer for name, buffer in model.named_buffers() if buffer.dtype != torch.int64},
    }
    return {group: {name: tensor.double() for name, tensor in tensors.items()} for group, tensors in groups.items()}, rectified


def digest(name, tensor):
    """What the file stores for a tensor."""
    flat = tensor.contiguous().flatten()
    places = [(i * 2654435761 + 12345) % flat.numel() for i in range(min(KEPT_VALUES, flat.numel()))]
    probe = (flat * values(0, f"probe/{name}", flat.shape).double()).sum()
    return {"norm": flat.norm().item(), "largest": flat.abs().max().item(), "probe": probe.item(), "values": flat[places].tolist()}


def deviation(name, tensor, singles):
    """The largest deviation of the float32 runs from the truth, in any measure of a tensor, relative to its magnitude unless
    that is zero."""
    exact, gaps = digest(name, tensor), [0.0]
    largest, norm = (exact["largest"], exact["norm"]) if exact["largest"] > ZERO else (1.0, 1.0)
    for single in singles:
        other = digest(name, single[name])
        gaps.append((single[name] - tensor).abs().max().item() / largest)
        gaps += [abs(other[measure] - exact[measure]) / norm for measure in ("norm", "probe")]
    return max(gaps)


def digests(truth, singles):
    """What the file stores for each tensor, including PyTorch's float32 deviation."""
    return {name: rounded({**digest(name, tensor), "deviation": deviation(name, tensor, singles)}) for name, tensor in truth.items()}


def room(truth, single):
    """The distance from 0 of the ReLU input closest to it, in multiples of its tensor's float32 error (root mean square)."""
    rooms = (exact.abs().min() / (exact - other).square().mean().sqrt().clamp_min(1e-30) for exact, other in zip(truth, single))
    return min((float(room) for room in rooms), default=float("inf"))


def rounded(value):
    """Rounds to nine digits, more than float32 has."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def write(path, description):
    """Writes JSON with one line per tensor."""
    lines = []
    for key, value in description.items():
        if isinstance(value, dict) and value and all(isinstance(inner, dict) for inner in value.values()):
            inner = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f"  {json.dumps(key)}: {{\n{inner}\n  }}")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def batch(inputs_of, settings, seed):
    """Inputs, and classes or values to learn."""
    inputs = inputs_of(seed)
    if "classes" in settings:
        return inputs, (torch.arange(inputs[0].shape[0]) * 7 + seed) % settings["classes"]
    return inputs, values(seed, "target", (inputs[0].shape[0], 1, *inputs[0].shape[2:]))


def golden(file):
    model, settings, make, inputs_of = CASES[file]
    for seed in SEEDS:
        inputs, labels = batch(inputs_of, settings, seed)
        truth, rectified = compute(make, seed, inputs, labels, torch.float64)
        singles = [compute(make, seed, inputs, labels, torch.float32, other_way) for other_way in (False, True)]
        nearest = min(room(rectified, single) for _, single in singles)
        if nearest >= MARGIN:
            break
    else:
        sys.exit(f"{file}: no seed keeps all ReLU inputs {MARGIN} errors away from 0")
    below, every = (sum(int(count) for count in counts) for counts in ([(x < 0).sum() for x in rectified], [x.numel() for x in rectified]))
    share = rounded(below / every) if rectified else None
    runs = {group: digests(tensors, [single[group] for single, _ in singles]) for group, tensors in truth.items()}
    description = {
        "model": model,
        "settings": settings,
        "made_by": f"scripts/golden_models.py, torch {torch.__version__.split('+')[0]}, torchvision {torchvision.__version__.split('+')[0]}",
        "seed": seed,
        "relu_inputs_below_0": share,
        "relu_inputs_are_away_from_0_by_float32_errors": rounded(nearest) if rectified else None,
        "labels": None if labels.is_floating_point() else labels.tolist(),
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
    write(FOLDER / f"{file}.json", description)
    worst = sorted((entry["deviation"], name) for name, entry in runs["gradient"].items())
    print(file, "seed", seed, "room", nearest, "below 0", share, "gradients", worst[len(worst) // 2][0], *worst[-3:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for file in sys.argv[1:] or CASES:
        golden(file)
