"""Exports small models of many kinds, and computes with PyTorch what they compute.

usage: golden_pt2.py [NAME...]      with names: only these models, whose figures replace their old ones

Writes crates/distgpipe/tests/golden/pt2/NAME.pt2, plain.pt2 and figures.json, and crates/distgpipe-core/tests/pt2/small.pt2. The figures are
of a float64 run without dropout: loss, evaluation output, gradients and buffers, each as its norm and its product with a fixed
vector, and how far PyTorch's own float32 run is from it, relative to its norm. `values` is the same function as in tests/exported.rs.
"""

import copy
import json
import logging
import pathlib
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.nn.functional as F
import torchvision.models as vision
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python/tests")]
from architectures import MODELS, make, without_dropout  # noqa: E402
from distgpipe_export import export  # noqa: E402

ROWS = 5

# What may be zero but for rounding: what is added before a batch norm, or to all scores of a softmax, changes nothing.
CANCELLED = (".bias", ".running_mean")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.norm(self.conv(x)))


class Small(nn.Module):
    """Everything that the reader has to know about, in a few nodes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 1)
        self.block = Residual()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0]), persistent=False)

    def forward(self, x):
        y = self.block(self.stem(x))
        z = self.head(self.drop(y.flatten(1)))
        return z + (torch.arange(3) * self.scale[1] + y.new_zeros(x.size(0), 1)) * 0.1


def values(count, seed):
    """Numbers in [-1, 1) that every language computes alike."""
    i = torch.arange(count, dtype=torch.int64)
    return ((i * 7919 + seed * 104729 + i * i % 1013 * 31) % 2003).double() / 1001.5 - 1.0


def sample(dims, below):
    count = ROWS * torch.Size(dims).numel()
    if below == 0:
        return values(count, 1).float().reshape(ROWS, *dims)
    if below == 2:  # the mask of sentences with 3, 4, 5, ... tokens
        return (torch.arange(dims[0]) < torch.arange(3, 3 + ROWS)[:, None]).long()
    return ((values(count, 1) + 1.0) * 1e6).long().remainder(below - 3).add(3).reshape(ROWS, *dims)


def loss_of(output):
    if output.dim() == 2:
        return F.cross_entropy(output, torch.arange(ROWS) % output.shape[1])
    return F.mse_loss(output, torch.zeros_like(output))


def figures(model, inputs):
    """What the model computes: by name, the tensors."""
    model = without_dropout(model)
    found = {"evaluation": copy.deepcopy(model).eval()(*inputs).detach()}
    loss = loss_of(model.train()(*inputs))
    loss.backward()
    found["loss"] = loss.detach()
    found.update((f"gradient/{name}", p.grad) for name, p in model.named_parameters() if p.grad is not None)
    names = model.state_dict().keys()
    found.update((f"buffer/{name}", b) for name, b in model.named_buffers() if name in names and b.is_floating_point())
    return found


def summary(tensor):
    flat = tensor.double().flatten()
    return [float(f"{figure:.9g}") for figure in (flat.norm().item(), (flat * values(flat.numel(), 2)).sum().item())]


def facts(model, inputs):
    """Of each tensor: its norm, its product with a fixed vector, and how far float32 is from it, relative to its norm.

    `cancelled` has the norms in float32 of those that are zero but for rounding. Fails if another one is zero: it would show
    nothing.
    """
    exact = figures(model.double(), [x.double() if x.is_floating_point() else x for x in inputs])
    rounded = figures(model.float(), inputs)
    largest = max(tensor.norm().item() for tensor in exact.values())
    found, cancelled = {}, {}
    for name, tensor in exact.items():
        norm = tensor.double().norm().item()
        if norm < 1e-12 * largest:
            assert name.endswith(CANCELLED), f"{name} is zero"
            cancelled[name] = float(f"{rounded[name].norm().item():.1e}")
        else:
            gap = (rounded[name].double() - tensor).norm().item() / norm
            found[name] = [*summary(tensor), float(f"{gap:.1e}")]
    return {"figures": found, "cancelled": cancelled}


def whole_mobilenet_v2(path):
    """The graph of torchvision's MobileNetV2 without weights, as distgpipe keeps it in the files that it saves."""
    with tempfile.TemporaryDirectory() as folder:
        archive, saved = f"{folder}/model.pt2", f"{folder}/saved.safetensors"
        export(vision.MobileNetV2(num_classes=10, width_mult=0.25), (torch.randn(2, 3, 64, 64),), archive)
        train = ["train", "--model", archive, "--data", "synthetic", "--samples", "8", "--batch", "4", "--steps", "1"]
        subprocess.run(["cargo", "run", "--locked", "--quiet", "--bin", "distgpipe", "--", *train, "--no-evaluate",
                        "--device", "cpu", "--save", saved], cwd=ROOT, check=True)
        with open(saved, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    settings = json.loads(header["__metadata__"]["distgpipe"])["model"]["settings"]
    path.write_text(json.dumps(settings["graph"], separators=(",", ":")) + "\n")


def unmarked(path):
    """What `torch.export.save` writes without our exporter, but for the paths of this machine."""
    program = export(nn.Linear(2, 1), (torch.randn(2, 2),))
    torch.export.save(program, path)


def main():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = ROOT / "crates/distgpipe/tests/golden/pt2"
    folder.mkdir(exist_ok=True)
    names, everything = sys.argv[1:], {}
    if names:
        everything = json.loads((folder / "figures.json").read_text())
    else:
        export(Small(), (torch.randn(2, 1, 2, 2),), str(ROOT / "crates/distgpipe-core/tests/pt2/small.pt2"))
        unmarked(folder / "plain.pt2")
        whole_mobilenet_v2(folder / "mobilenet_v2_whole.json")
    for name in names or MODELS:
        _, *inputs = MODELS[name]
        model, batch = make(name), tuple(sample(dims, below) for dims, below in inputs)
        export(model, batch, str(folder / f"{name}.pt2"))
        everything[name] = facts(model, batch)
        size = (folder / f"{name}.pt2").stat().st_size
        furthest = max(gap for _, _, gap in everything[name]["figures"].values())
        print(f"{name}: {size} bytes, float32 is off by at most {furthest:.1e}, zero: {list(everything[name]['cancelled'])}")
    (folder / "figures.json").write_text(json.dumps(everything, separators=(",", ":")) + "\n")


main()
