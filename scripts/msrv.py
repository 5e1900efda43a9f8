#!/usr/bin/env python3
"""Checks `rust-version`, the oldest Rust that distgpipe claims to build with, as far as a newer Rust can.

  1. No dependency that is built on Linux asks for a newer Rust (`cargo metadata`).
  2. The Makefile and the workflow of the public forge name the same version.

Two things are checked elsewhere. clippy's `incompatible_msrv` finds calls into the standard library that are newer. Syntax, macros
and dependencies that do not state a version are only found by a build with that Rust: the job `msrv` of .github/workflows/ci.yml.
"""
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = "x86_64-unknown-linux-gnu"


def numbers(version):
    """1.89 and 1.89.0 are the same."""
    parts = [int(part) for part in version.split("-")[0].split(".")]
    return tuple(parts + [0] * (3 - len(parts)))


def ours():
    text = (ROOT / "Cargo.toml").read_text()
    return re.search(r'^rust-version = "([\d.]+)"$', text, re.MULTILINE).group(1)


def newer_dependencies(version):
    command = ["cargo", "metadata", "--locked", "--all-features", "--format-version", "1", "--filter-platform", TARGET]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    built = {node["id"] for node in metadata["resolve"]["nodes"]}
    packages = [package for package in metadata["packages"] if package["id"] in built]
    stated = [package for package in packages if package["rust_version"]]
    for package in stated:
        if numbers(package["rust_version"]) > numbers(version):
            yield f"{package['name']} {package['version']} needs Rust {package['rust_version']}, more than our rust-version {version}"
    print(f"rust-version {version}: {len(packages)} packages, {len(stated)} of which state a version")


def other_places(version):
    minor = version.split(".")[1]
    for place, pattern, expected in [
        ("Makefile", r"^RUST_MINOR_MIN := (.*)$", minor),
        (".github/workflows/ci.yml", r"^\s*RUST_MIN: (.*)$", f'"{version}"'),
    ]:
        found = re.findall(pattern, (ROOT / place).read_text(), re.MULTILINE)
        if found != [expected]:
            yield f"{place}: expected {expected} for our rust-version {version}, got {found}"


def main():
    version = ours()
    wrong = [*newer_dependencies(version), *other_places(version)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
