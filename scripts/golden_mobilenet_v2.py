#!/usr/bin/env python3
"""Writes PyTorch's reference results for a small MobileNetV2, to test our layers against.

usage: scripts/golden_mobilenet_v2.py      needs: torch==2.11.0 torchvision==0.26.0
writes: crates/distgpipe/tests/golden/mobilenet_v2.safetensors and mobilenet_v2.json

The truth is computed in float64 and stored rounded to float32. For each group of tensors, the JSON file gives the largest
deviation of PyTorch's own float32 runs (contiguous and channels-last) from that truth. A test's tolerance is a stated multiple
of PyTorch's own rounding error, not a guess.

Every weight, scale, shift and running statistic is random (a fresh network has ones and zeros there, which hide mistakes),
and the input is large enough for ReLU6 to clip at both ends.
"""
import json
import struct
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision

FOLDER = Path(__file__).resolve().parent.parent / "crates/distgpipe/tests/golden"
# Chosen from 1 to 60 for the largest margin; another seed may need more tolerance than the deviations in the JSON allow.
# This seed keeps all 676,608 pre-activations far enough from the kinks of ReLU6 that neither of PyTorch's float32 layouts
# (contiguous, channels-last) moves one across; that would change gradients by more than rounding.
SEED, CLASSES, WIDTH = 4, 10, 0.25
# A gradient below this is zero in exact arithmetic: the shift of a batch norm that feeds only into another batch norm.
ZERO = 1e-9
DTYPES = {torch.float32: "F32", torch.int64: "I64"}


def network():
    """The network in float32; its values are exact in float64."""
    generator = torch.Generator().manual_seed(SEED)

    def uniform(like, low, high):
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    model = torchvision.models.mobilenet_v2(num_classes=CLASSES, width_mult=WIDTH, dropout=0.0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d):
                fan_in = module.weight[0].numel()
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * (2.0 / fan_in) ** 0.5)
            elif isinstance(module, torch.nn.BatchNorm2d):
                module.weight.copy_(uniform(module.weight, 0.5, 1.5))
                module.bias.copy_(uniform(module.bias, -1.0, 5.0))
                module.running_mean.copy_(uniform(module.running_mean, -0.5, 0.5))
                module.running_var.copy_(uniform(module.running_var, 0.5, 2.0))
                module.num_batches_tracked.fill_(7)
            elif isinstance(module, torch.nn.Linear):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 0.03)
                module.bias.copy_(uniform(module.bias, -0.5, 0.5))
    x = torch.randn((4, 3, 64, 64), generator=generator) * 1.5
    labels = torch.tensor([3, 0, 9, 3])
    return model, x, labels


def compute(state, x, labels, dtype, memory_format=torch.contiguous_format):
    """Maps group → name → tensor, all computed in `dtype` and this layout. Also returns the share of activations that ReLU6
    clips at each end."""
    model = torchvision.models.mobilenet_v2(num_classes=CLASSES, width_mult=WIDTH, dropout=0.0)
    model.load_state_dict(state)
    model.to(dtype=dtype, memory_format=memory_format)
    x = x.clone().to(dtype=dtype, memory_format=memory_format)
    clipped = {"low": 0, "high": 0, "all": 0}

    def count(_, inputs):
        clipped["low"] += int((inputs[0] < 0).sum())
        clipped["high"] += int((inputs[0] > 6).sum())
        clipped["all"] += inputs[0].numel()

    model.eval()
    with torch.no_grad():
        eval_logits = model(x)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.ReLU6):
            module.register_forward_pre_hook(count)
    x.requires_grad_()
    logits = model(x)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    groups = {
        "train_logits": {"train_logits": logits.detach()},
        "loss": {"loss": loss.detach()},
        "input_grad": {"input_grad": x.grad},
        "eval_logits": {"eval_logits": eval_logits},
        "grad": {f"grad/{name}": parameter.grad for name, parameter in model.named_parameters()},
        "buffer": {f"buffer/{name}": buffer for name, buffer in model.named_buffers()},
    }
    return groups, {end: clipped[end] / clipped["all"] for end in ("low", "high")}


def deviation(truth, others):
    """How far `others` are from `truth` (all name → tensor): the largest absolute difference, and the largest difference of
    any tensor relative to its own largest value, which suits tensors of very different magnitudes. Tensors that are zero
    except for rounding have no such ratio and count only towards the first."""
    absolute = relative = 0.0
    for name, tensor in truth.items():
        for other in others:
            if tensor.dtype == torch.int64:
                assert torch.equal(tensor, other[name])
                continue
            difference = (tensor.double() - other[name].double()).abs().max().item()
            absolute = max(absolute, difference)
            if tensor.abs().max().item() > ZERO:
                relative = max(relative, difference / tensor.abs().max().item())
    return {"largest_absolute": absolute, "largest_relative_to_tensor_max": relative}


def write_safetensors(path, tensors):
    """Writes the format by hand: header length (u64), JSON header, then the tensors' bytes, little-endian."""
    header, body = {}, bytearray()
    for name, tensor in tensors.items():
        data = tensor.contiguous().numpy().tobytes()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def main():
    torch.set_num_threads(1)
    model, x, labels = network()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    truth, clipped = compute(state, x, labels, torch.float64)
    singles = [compute(state, x, labels, torch.float32, layout)[0] for layout in (torch.contiguous_format, torch.channels_last)]
    assert clipped["low"] > 0.05 and clipped["high"] > 0.005, clipped

    tensors = {f"weight/{name}": tensor for name, tensor in state.items()}
    tensors.update(x=x, labels=labels)
    for group in truth.values():
        for name, tensor in group.items():
            tensors[name] = tensor if tensor.dtype == torch.int64 else tensor.float()
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_safetensors(FOLDER / "mobilenet_v2.safetensors", tensors)

    description = {
        "model": f"torchvision {torchvision.__version__.split('+')[0]} mobilenet_v2(num_classes={CLASSES}, width_mult={WIDTH}, dropout=0.0)",
        "torch": torch.__version__.split("+")[0],
        "made_by": "scripts/golden_mobilenet_v2.py",
        "seed": SEED,
        "tensors": {
            "weight/*": "every parameter and buffer before the step, by torchvision's names",
            "x, labels": "one batch, [4, 3, 64, 64] and [4]",
            "eval_logits": "evaluation mode, with the buffers of weight/*",
            "train_logits, loss": "training mode, the whole batch at once, mean cross entropy",
            "grad/*, input_grad": "of that loss, for every parameter and for x",
            "buffer/*": "every buffer after that one forward",
        },
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "share_of_activations_clipped_by_relu6": clipped,
        "loss": truth["loss"]["loss"].item(),
        "pytorch_float32_deviation": {name: deviation(group, [single[name] for single in singles]) for name, group in truth.items()},
        "pytorch_float32_deviation_per_gradient": {
            name: deviation({name: tensor}, [single["grad"] for single in singles]) for name, tensor in truth["grad"].items()
        },
        "gradients_that_are_zero_but_for_rounding": [name for name, tensor in truth["grad"].items() if tensor.abs().max() <= ZERO],
    }
    (FOLDER / "mobilenet_v2.json").write_text(json.dumps(description, indent=2) + "\n")
    print(json.dumps({key: value for key, value in description.items() if key != "pytorch_float32_deviation_per_gradient"}, indent=2))


if __name__ == "__main__":
    main()
