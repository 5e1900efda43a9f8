#!/usr/bin/env python3
"""Measures the codecs and the PyTorch code that they replace, on one thread, and writes the results to a folder.

The original sorts the flattened tensor with torch.sort, rounds each of the 2^S parts of the sorted values to its own range, and
puts the symbols back with the sort's permutation. Its fast variant finds the boundaries of the bins with torch.kthvalue and
rounds with masks. Both decode with masks, one bin after another. The original, our codecs and plain copies of the tensor take
turns, round by round, so that an outside disturbance affects all of them alike. The best of all rounds counts.

usage: bench/codecs.py --out FOLDER [--rounds 3] [--repeat 9] [--simd avx2] [--driver PROGRAM] [--without-original]
needs: torch unless --without-original is given, and cargo unless the compiled example codec_speed is given as PROGRAM
"""
import argparse
import json
import os
import subprocess
import time
from pathlib import Path

try:
    import torch
except ImportError:
    torch = None

from run import machine

HERE = Path(__file__).resolve().parent
DRIVER = "cargo run --locked --release --quiet -p distgpipe-core --example codec_speed -- --json --repeat".split()
SPLITS = {16: (12, 4), 12: (9, 3), 8: (6, 2), 4: (3, 1)}
TENSORS = {"relu [8, 32, 112, 112]": (8, 32, 112, 112), "gaussian [8, 128, 768]": (8, 128, 768)}


def symbol_type(q, s):
    return torch.uint8 if q + s <= 8 else torch.int32  # PyTorch has no unsigned 16-bit arithmetic


def round_to_range(values, q):
    lo, hi = values.min(), values.max()
    step = (hi - lo) / (2**q - 1)
    codes = torch.round((values - lo) / step) if step > 0 else torch.zeros_like(values)
    return codes, lo, step


def sort_encode(tensor, q, s):
    ordered, places = torch.sort(tensor.flatten())
    symbols = torch.empty(ordered.numel(), dtype=symbol_type(q, s))
    los, steps, parts = [], [], []
    for run, values in enumerate(torch.tensor_split(ordered, 2**s)):
        codes, lo, step = round_to_range(values, q)
        parts.append(codes.to(symbols.dtype) + (run << q))
        los.append(lo)
        steps.append(step)
    symbols.scatter_(0, places, torch.cat(parts))
    return symbols, torch.stack(los), torch.stack(steps)


def fast_encode(tensor, q, s):
    values = tensor.flatten()
    count = values.numel()
    begins = [torch.kthvalue(values, 1 + run * count // 2**s).values for run in range(2**s)]
    ends = begins[1:] + [values.max()]
    symbols = torch.zeros(count, dtype=symbol_type(q, s))
    steps = []
    for run, (begin, end) in enumerate(zip(begins, ends)):
        step = (end - begin) / (2**q - 1)
        steps.append(step)
        mask = (values >= begin) & ((values < end) if run + 1 < 2**s else (values <= end))
        codes = torch.round((values[mask] - begin) / step) if step > 0 else torch.zeros_like(values[mask])
        symbols[mask] = codes.to(symbols.dtype) + (run << q)
    return symbols, torch.stack(begins), torch.stack(steps)


def decode(encoded, q, s, shape):
    symbols, los, steps = encoded
    runs, codes = symbols >> q, symbols & (2**q - 1)
    values = torch.empty(symbols.numel())
    for run in range(2**s):
        mask = runs == run
        values[mask] = los[run] + codes[mask] * steps[run]
    return values.view(shape)


def timed(work, size):
    start = time.perf_counter()
    result = work()
    return result, size / (time.perf_counter() - start) / 1e9


def measure_original(tensors):
    rows = []
    for name, tensor in tensors.items():
        size = 4 * tensor.numel()
        target = torch.empty_like(tensor)
        for bits, (q, s) in SPLITS.items():
            for codec, encode in (("sort", sort_encode), ("fast", fast_encode)):
                encoded, encode_speed = timed(lambda: encode(tensor, q, s), size)
                decoded, decode_speed = timed(lambda: decode(encoded, q, s, tensor.shape), size)
                _, copy_speed = timed(lambda: target.copy_(tensor), size)
                error = (decoded - tensor).abs().max().item()
                assert error <= (tensor.max() - tensor.min()).item() / (2**q - 1), f"the error of {codec}:{bits} is {error}, which is too large"
                figures = {"encode_gb_s": encode_speed, "decode_gb_s": decode_speed, "copy_gb_s": copy_speed}
                rows.append({"by": "original", "codec": f"{codec}:{bits}", "tensor": name, **figures})
    return rows


def measure_ours(options):
    driver = [options.driver, "--json", "--repeat"] if options.driver else DRIVER
    variables = {**os.environ, **({"DISTGPIPE_SIMD": options.simd} if options.simd else {})}
    done = subprocess.run([*driver, str(options.repeat)], stdout=subprocess.PIPE, text=True, cwd=HERE.parent, env=variables)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(driver)} {options.repeat}")
    return [{"by": "ours", **json.loads(line)} for line in done.stdout.splitlines()]


def report(rows, options):
    best = {}
    for row in rows:
        figures = best.setdefault((row["by"], row["codec"], row["tensor"]), {})
        for key in ("encode_gb_s", "decode_gb_s", "copy_gb_s"):
            figures[key] = max(figures.get(key, 0), row[key])
    simd = f" --simd {options.simd}" if options.simd else ""
    original = " --without-original" if options.without_original else ""
    lines = [
        f"# Codecs on one thread{f', with {options.simd}' if options.simd else ''}",
        "",
        f"Machine: {machine()}{'' if options.without_original else f', torch {torch.__version__}'}.  ",
        f"Command: `bench/codecs.py --rounds {options.rounds} --repeat {options.repeat}{simd}{original}`; every round is in `raw.jsonl`.",
        "",
        "Speeds count the tensor's float32 values or, in the `pack` rows, 16-bit codes. `relu` is max(0, gaussian). Each figure is the best of all rounds.",
        "",
        "| codec | tensor | encoding, GB/s | speed relative to a copy | speed-up over the original (its GB/s) | decoding, GB/s | speed relative to a copy | speed-up over the original (its GB/s) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (by, codec, tensor), ours in best.items():
        if by != "ours":
            continue
        cells = [codec, tensor]
        theirs = best.get(("original", codec, tensor))
        for key in ("encode_gb_s", "decode_gb_s"):
            ratio = f"{ours[key] / theirs[key]:.0f} ({theirs[key]:.3f})" if theirs else ""
            cells += [f"{ours[key]:.2f}", f"1/{ours['copy_gb_s'] / ours[key]:.2f}", ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=9, help="repetitions of our codecs per round")
    parser.add_argument("--simd", choices=["portable", "avx2", "avx512"], help="instruction set of our codecs, instead of the best one")
    parser.add_argument("--driver", type=Path, help="the compiled example codec_speed, where there is no cargo")
    parser.add_argument("--without-original", action="store_true", help="measure our codecs and copies alone, which needs no torch")
    options = parser.parse_args()
    tensors = {}
    if not options.without_original:
        if torch is None:
            raise SystemExit("the original needs torch: install it (bench/requirements.txt), or pass --without-original")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        tensors = {name: torch.randn(shape) for name, shape in TENSORS.items()}
        tensors = {name: tensor.relu() if name.startswith("relu") else tensor for name, tensor in tensors.items()}
    rows = []
    for number in range(options.rounds):
        for row in measure_original(tensors) + measure_ours(options):
            rows.append({"round": number, **row})
        print(f"finished round {number} of {options.rounds}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (options.out / "README.md").write_text(report(rows, options))
    print(report(rows, options))


if __name__ == "__main__":
    main()
