#!/usr/bin/env python3
"""Measures torchvision's image preprocessing in images per second on one thread, to compare with `distgpipe data speed`.

usage: bench/loader.py DATA_DIR [SECONDS]      DATA_DIR has CIFAR-10's data_batch_1.bin; needs: torch, torchvision
"""
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import transforms as T

torch.set_num_threads(1)
raw = np.fromfile(Path(sys.argv[1]) / "data_batch_1.bin", np.uint8).reshape(-1, 3073)[:, 1:]
planes = raw.reshape(-1, 3, 32, 32)
change = [T.RandomResizedCrop(224), T.RandomHorizontalFlip()]
normalise = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
pillow = T.Compose([*change, T.ToTensor(), normalise])
tensor = T.Compose([*change, T.ConvertImageDtype(torch.float32), normalise])
sources = {
    "torchvision, Pillow images": (pillow, [Image.fromarray(image.transpose(1, 2, 0)) for image in planes]),
    "torchvision, tensors": (tensor, list(torch.from_numpy(planes))),
}
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
for name, (prepare, images) in sources.items():
    batch, count, start = torch.empty(256, 3, 224, 224), 0, None
    while start is None or time.perf_counter() - start < seconds:
        for i in range(256):
            batch[i] = prepare(images[(count + i) % len(images)])
        count += 256
        if start is None:
            start, count = time.perf_counter(), 0
    print(json.dumps({"name": name, "rows": count, "rows_per_s": count / (time.perf_counter() - start)}))
