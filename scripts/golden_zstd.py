#!/usr/bin/env python3
"""Writes bodies of the codec `zstd`, to test our decoder against.

usage: scripts/golden_zstd.py      needs: Python, and the command `zstd` in PATH
writes: crates/distgpipe-core/tests/golden/zstd.json

The chunks are made here as docs/codecs.md describes them, and the frames by the command. Another version of zstd may
compress to other bytes, which decode to the same tensors.
"""
import json
import math
import random
import struct
import subprocess
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe-core/tests/golden/zstd.json"


def stream(data, level=1):
    frame = subprocess.run(["zstd", "-q", "-c", "--no-check", f"-{level}", f"--stream-size={len(data)}"], input=data,
                           stdout=subprocess.PIPE, check=True).stdout
    if len(frame) < len(data):
        return struct.pack("<I", len(frame) | 1 << 31) + frame
    return struct.pack("<I", len(data)) + data


def chunk(form, data, level=1):
    if form == 0:
        streams = stream(data, level)
    elif form == 3:
        bits = int.from_bytes(data, "little")
        codes = [bits >> 3 * i & 7 for i in range(8 * math.ceil(len(data) / 3))]
        streams = stream(bytes(a | b << 4 for a, b in zip(codes[::2], codes[1::2])), level)
    else:
        values = [int.from_bytes(data[i:i + form], "little") for i in range(0, len(data), form)]
        mask = sum((value != 0) << i for i, value in enumerate(values))
        streams = stream(mask.to_bytes(math.ceil(len(values) / 8), "little"), level)
        # The upper two bytes rotated by one bit: the sign comes last, the exponent is a byte of its own.
        half = 8 * (form - 2)
        rotated = [(v >> half << 1 & 0xffff | v >> half + 15) << half | v & (1 << half) - 1 for v in values if v]
        for byte in range(form):
            streams += stream(bytes(v >> 8 * byte & 255 for v in rotated), level)
    return struct.pack("<BII", form, len(data), len(streams)) + streams


def main():
    rng = random.Random(1)
    relu = struct.pack("<800f", *(max(0.0, rng.gauss(0, 1)) for _ in range(800)))
    signed = struct.pack("<300f", *(rng.gauss(0, 1e-3) if i % 7 else 0.0 for i in range(300)))
    special = struct.pack("<9f", 0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -3.4e38, 1.0, -1.0)
    bf16 = b"".join(relu[i + 2:i + 4] for i in range(0, len(relu), 4))
    text = b"to be or not to be, " * 60
    codes = bytes(rng.choice([0, 0x49, 0x92, 0x24]) for _ in range(1000))
    cases = [
        ("U8", text, chunk(0, text)),
        ("U8", text, chunk(0, text[:500], 3) + chunk(0, text[500:], 19)),
        ("U8", codes, chunk(3, codes)),
        ("U8", codes[:2], chunk(3, codes[:2])),
        ("BF16", bf16, chunk(2, bf16)),
        ("F32", relu, chunk(4, relu)),
        ("F32", signed + special, chunk(4, signed) + chunk(4, special)),
        ("F32", relu + signed, chunk(4, relu[:1200]) + chunk(0, relu[1200:2400]) + chunk(2, relu[2400:]) + chunk(4, signed)),
        ("F32", bytes(400), chunk(4, bytes(400))),
    ]
    lines = [json.dumps(dict(dtype=dtype, tensor=data.hex(), body="01" + body.hex())) for dtype, data, body in cases]
    TARGET.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
