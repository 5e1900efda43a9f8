#!/usr/bin/env python3
"""Writes what torchvision and Pillow compute for small images, to test our preprocessing against.

usage: scripts/golden_images.py      needs: torch==2.11.0, torchvision==0.26.0, pillow
writes: crates/distgpipe/tests/golden/images.json, crates/distgpipe/tests/golden/images/

Images are generated from a formula, so the file contains only results: `exact` is torchvision's result for float64 tensors,
`pillow` its result for 8-bit images, which Pillow rounds after each axis. Values are 0 to 255, row by row, with the colours of a
pixel next to each other. `files` lists what Pillow decodes from the image files in images/.
"""
import json
from pathlib import Path

import torch
from PIL import Image
from torchvision.transforms import functional as F

TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe/tests/golden/images.json"
# Width and height, box (x, y, width, height), side, mirrored.
CROPS = [
    ((12, 10), (0, 0, 12, 10), 16, False),
    ((12, 10), (3, 2, 7, 5), 15, True),
    ((32, 32), (5, 9, 20, 17), 24, False),
    ((61, 47), (4, 1, 50, 45), 13, False),
    ((61, 47), (0, 0, 61, 9), 14, True),
    ((9, 30), (8, 3, 1, 20), 6, False),
]
# Width and height, side: resized to side * 256 / 224, then the centre is cut out.
MIDDLES = [((50, 40), 14), ((33, 57), 21), ((10, 13), 14), ((32, 32), 18), ((90, 7), 7)]


def image(width, height):
    y, x, c = torch.meshgrid(torch.arange(height), torch.arange(width), torch.arange(3), indexing="ij")
    return (37 * x + 91 * y + 53 * c + 7 * x * y) % 256


def answers(width, height, change):
    pixels = image(width, height)
    exact = change(pixels.permute(2, 0, 1).double()).permute(1, 2, 0)
    pillow = change(Image.fromarray(pixels.to(torch.uint8).numpy()))
    return {"exact": [round(v, 4) for v in exact.flatten().tolist()], "pillow": list(pillow.tobytes())}


def crop(size, box, side, mirrored):
    def change(it):
        x, y, width, height = box
        it = F.resized_crop(it, y, x, height, width, [side, side], F.InterpolationMode.BILINEAR, antialias=True)
        return F.hflip(it) if mirrored else it

    return {"size": size, "box": box, "side": side, "mirrored": mirrored, **answers(*size, change)}


def middle(size, side):
    def change(it):
        return F.center_crop(F.resize(it, round(side * 256 / 224), F.InterpolationMode.BILINEAR, antialias=True), side)

    return {"size": size, "side": side, **answers(*size, change)}


def save(name, image, **options):
    path = TARGET.parent / "images" / name
    path.parent.mkdir(exist_ok=True)
    image.save(path, **options)
    decoded = Image.open(path).convert("RGB")
    return {"name": name, "size": decoded.size, "pixels": list(decoded.tobytes())}


def photographs():
    """Writes larger JPEG files, used only to test the check for truncation; some end in plain rows, some have restarts."""
    noise = image(64, 96)
    plain_below = torch.where(torch.arange(96)[:, None, None] < 40, noise, torch.full_like(noise, 255))
    folder = TARGET.parent / "images/whole"
    folder.mkdir(parents=True, exist_ok=True)
    for name, pixels, options in [
        ("noise.jpg", noise, {}),
        ("plain_below.jpg", plain_below, {"subsampling": "4:2:0"}),
        ("restarts.jpg", plain_below, {"restart_marker_blocks": 5}),
        ("grey_restarts.jpg", noise[:, :, :1].expand(-1, -1, 3), {"restart_marker_rows": 1}),
    ]:
        whole = Image.fromarray(pixels.to(torch.uint8).contiguous().numpy())
        (whole.convert("L") if name.startswith("grey") else whole).save(folder / name, quality=30, **options)


def files():
    """Writes a file for every branch of the decoders. Colours are smooth, because JPEG decoders differ at sharp edges."""
    y, x, c = torch.meshgrid(torch.arange(14), torch.arange(19), torch.arange(3), indexing="ij")
    smooth = Image.fromarray(torch.where(c == 0, 13 * x, torch.where(c == 1, 17 * y, 120 + 0 * x)).to(torch.uint8).numpy())
    noise = Image.fromarray(image(19, 14).to(torch.uint8).numpy())
    alpha = noise.copy()
    alpha.putalpha(noise.convert("L"))
    return [
        save("plain.jpg", smooth, quality=95, subsampling="4:4:4"),
        save("subsampled.jpg", smooth, quality=95, subsampling="4:2:0"),
        save("progressive.jpg", smooth, quality=95, subsampling="4:4:4", progressive=True),
        save("grey.jpg", smooth.convert("L"), quality=95),
        save("plain.png", noise),
        save("alpha.png", alpha),
        save("grey.png", noise.convert("L")),
        save("grey_alpha.png", alpha.convert("LA")),
        save("palette.png", noise.convert("P", palette=Image.Palette.ADAPTIVE, colors=13)),
        save("bits.png", noise.convert("1")),
    ]


golden = {"crops": [crop(*c) for c in CROPS], "middles": [middle(*m) for m in MIDDLES], "files": files()}
photographs()
TARGET.write_text(json.dumps(golden) + "\n")
print(TARGET)
