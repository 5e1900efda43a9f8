#!/usr/bin/env python3
"""Writes small tensors and what the codecs' formulas turn them into, to test our codecs against.

usage: scripts/golden_codecs.py      needs: only Python
writes: crates/distgpipe-core/tests/golden/codecs.json

Everything is computed in float64 and rounded to float32 at the end; where the formula sorts, this script sorts. `half` uses
Python's struct module. The formulas are those of docs/codecs.md.
"""
import json
import math
import random
import struct
from fractions import Fraction
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe-core/tests/golden/codecs.json"
SORTS = [(12, 4), (9, 3), (6, 2), (3, 1), (4, 4), (2, 2), (1, 4), (3, 6)]
UNIFORMS = [1, 2, 4, 8, 11, 16]
TOP_KS = ["0.01", "0.1", "0.5", "1"]
TILES = [(1, 64), (2, 64), (3, 64), (4, 64), (8, 64), (4, 16), (6, 10)]


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def inputs():
    rng = random.Random(1)
    gauss = [f32(rng.gauss(0, 1)) for _ in range(130)]
    offset = [f32(5 + rng.gauss(0, 0.01)) for _ in range(70)]
    gradient = [f32(1e-8 * rng.gauss(0, 1) ** 3) for _ in range(70)]
    return {
        "gauss": gauss,
        "relu6": [min(max(f32(2 * x), 0.0), 6.0) for x in gauss[:100]],
        "offset": offset,
        "gradient": gradient,
        "two_values": [1.0 if i * i % 7 < 3 else -1.0 for i in range(41)],
        "constant": [2.5] * 9,
        "one_element": [-3.25],
        "empty": [],
        "fewer_than_runs": gauss[:5],
        "negative_zero": [-0.0, 0.0, -0.0, 1.0],
        "denormals": [f32(k * 2.0**-149) for k in (0, 1, 2, 3, 5, 8, 13, 21, 1000, 70000)],
        "huge": [f32(x * 1e37) for x in gauss[:30]] + [1.0, 0.0, -1.0],
    }


def sort(xs, q, s):
    """Returns the decoded tensor and the number of bytes on the wire."""
    runs, levels = 2**s, 2**q - 1
    order = sorted(range(len(xs)), key=lambda i: xs[i])
    shortest, longer = divmod(len(xs), runs)
    decoded, begin = [0.0] * len(xs), 0
    for run in range(runs):
        end = begin + shortest + (run < longer)
        members = order[begin:end]
        begin = end
        if not members:
            continue
        lo, hi = xs[members[0]], xs[members[-1]]
        step = (hi - lo) / levels
        for i in members:
            decoded[i] = f32(lo + (round((xs[i] - lo) / step) * step if step else 0.0))
    return decoded, math.ceil(len(xs) * (q + s) / 8) + 8 * runs


def f16_of(bits):
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def f16_bits(x):
    return struct.unpack("<H", struct.pack("<e", x))[0]


def f16_down(x):
    bits = f16_bits(x)
    if f16_of(bits) > x:
        bits = 0x8001 if bits in (0, 0x8000) else bits - 1 if bits < 0x8000 else bits + 1
    return f16_of(bits)


def f16_up(x):
    return -f16_down(-x)


def tile(xs, q, t):
    levels = 2**q - 1
    largest = max((abs(x) for x in xs), default=0.0)
    # frexp returns a fraction in [1/2, 1), so this scales the largest magnitude into [2^13, 2^14).
    scale = 2.0 ** (math.frexp(largest)[1] - 14) if largest else 1.0
    decoded = []
    for begin in range(0, len(xs), t):
        scaled = [x / scale for x in xs[begin:begin + t]]
        lo = f16_down(min(scaled))
        step = f16_up((max(scaled) - lo) / levels)
        decoded += [f32((lo + (min(round((x - lo) / step), levels) * step if step else 0.0)) * scale) for x in scaled]
    return decoded, math.ceil(len(xs) * q / 8) + 4 * math.ceil(len(xs) / t) + 4


def top_k(xs, fraction):
    most = math.ceil(Fraction(fraction) * len(xs))
    # Sorting is stable: of two equal magnitudes, the first one stays first.
    kept = sorted(sorted((i for i, x in enumerate(xs) if x), key=lambda i: -abs(xs[i]))[:most])
    gaps = [i - before - 1 for before, i in zip([-1] + kept, kept)]
    places = min([len(xs)] + [sum((gap >> r) + 1 + r for gap in gaps) for r in range(57)])
    return [x if i in kept else 0.0 for i, x in enumerate(xs)], 9 + 4 * len(kept) + math.ceil(places / 8)


def bf16(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    upper, lower = divmod(bits, 1 << 16)
    upper += lower > 0x8000 or (lower == 0x8000 and upper % 2)
    return struct.unpack("<f", struct.pack("<I", upper << 16))[0]


def numbers(xs):
    """Nine digits distinguish every float32 from its neighbours."""
    return "[" + ",".join(f"{x:.9g}" for x in xs) + "]"


def main():
    cases = []
    tensors = inputs()
    for name, xs in tensors.items():
        made = [(f"sort:{q}+{s}", sort(xs, q, s)) for q, s in SORTS]
        made += [(f"uniform:{q}", sort(xs, q, 0)) for q in UNIFORMS]
        made += [(f"tile:{q}" if t == 64 else f"tile:{q}/{t}", tile(xs, q, t)) for q, t in TILES]
        made += [(f"topk:{fraction}", top_k(xs, fraction)) for fraction in TOP_KS]
        made.append(("bf16", ([bf16(x) for x in xs], 2 * len(xs))))
        if all(abs(x) < 65520 for x in xs):
            made.append(("f16", ([f16_of(f16_bits(x)) for x in xs], 2 * len(xs))))
        cases += [dict(input=name, codec=codec, body_bytes=size, decoded=decoded) for codec, (decoded, size) in made]
    lines = ",\n".join(
        '{{"input":"{input}","codec":"{codec}","body_bytes":{body_bytes},"decoded":{0}}}'.format(numbers(case["decoded"]), **case)
        for case in cases)
    inputs_ = ",\n".join(f'"{name}":{numbers(xs)}' for name, xs in tensors.items())
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(f'{{"inputs":{{\n{inputs_}\n}},\n"cases":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
