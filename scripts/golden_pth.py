#!/usr/bin/env python3
"""Writes small torch.save files and their expected contents, to test our reader against.

usage: scripts/golden_pth.py      needs: torch==2.11.0
writes: crates/distgpipe/tests/golden/pth/*.pth, crates/distgpipe/tests/golden/pth/expected.json

Every readable file is loaded again here with torch.load(weights_only=True), so the expected values are PyTorch's. The others
must be rejected. The pickle in evil.pth would run a program, but nothing here loads it.
"""
import collections
import json
import os
import zipfile
from pathlib import Path

import torch

TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe/tests/golden/pth"


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/evil",)


def ramp(*dims, dtype=torch.float32):
    count = torch.Size(dims).numel()
    return (torch.arange(count, dtype=torch.float64) - 3).reshape(dims).to(dtype)


def module():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.BatchNorm2d(3))


base = ramp(4, 5)
channels_last = ramp(2, 3, 2, 2).to(memory_format=torch.channels_last)
GOOD = {
    "contiguous": {"a": ramp(2, 3), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)},
    "views": {
        "transposed": ramp(3, 4).t(),
        "columns": ramp(4, 6)[1:, 1::2],
        "channels_last": channels_last,
        "row": ramp(5, 3)[2],
    },
    "shared": {"whole": base, "again": base, "part": base[1:3], "turned": base.t()},
    "kinds": {
        str(dtype).removeprefix("torch."): ramp(2, 4, dtype=dtype)
        for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8]
    }
    | {"uint8": torch.tensor([0, 255, 7], dtype=torch.uint8), "bool": torch.tensor([True, False])},
    "parameter": {"weight": torch.nn.Parameter(ramp(2, 2)), "frozen": torch.nn.Parameter(ramp(3), requires_grad=False)},
    "module": module().state_dict(),
    "nested": {"epoch": 3, "lr": 0.1, "name": "x", "done": True, "none": None, "list": [1, 2], "state_dict": collections.OrderedDict(w=ramp(2))},
    "imagenet": {"epoch": 3, "arch": "x", "best_acc1": torch.tensor(12.5), "state_dict": {"w": ramp(2)}, "optimizer": {}},
    "under_model": {"model": {"w": ramp(2)}, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.1}]}},
}
BAD = {
    "evil": {"a": ramp(2), "b": Evil()},
    "beside": {"a": ramp(2), "epoch": 3},
    "both_keys": {"state_dict": {"a": ramp(2)}, "model": {"a": ramp(2)}},
    "whole_module": torch.nn.Linear(2, 2),
    "expanded": {"a": torch.ones(1).expand(1000)},
    "list": [ramp(2)],
}


def listed(tensors):
    for name, tensor in tensors.items():
        values = tensor.detach().to(torch.float64).reshape(-1).tolist()
        yield {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "dims": list(tensor.shape), "values": values}


TARGET.mkdir(exist_ok=True)
expected = {}
for name, value in GOOD.items():
    path = TARGET / f"{name}.pth"
    torch.save(value, path)
    loaded = torch.load(path, weights_only=True)
    expected[name] = list(listed(loaded.get("state_dict", loaded.get("model", loaded))))
for name, value in BAD.items():
    torch.save(value, TARGET / f"{name}.pth")
torch.save({"a": ramp(2)}, TARGET / "legacy.pth", _use_new_zipfile_serialization=False)
with zipfile.ZipFile(TARGET / "contiguous.pth") as plain, zipfile.ZipFile(TARGET / "compressed.pth", "w", zipfile.ZIP_DEFLATED) as packed:
    for info in plain.infolist():
        packed.writestr(info.filename, plain.read(info))
(TARGET / "expected.json").write_text(json.dumps(expected) + "\n")
print(TARGET / "expected.json")
