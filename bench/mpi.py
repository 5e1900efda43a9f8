#!/usr/bin/env python3
"""Measures the MPI transport on one host, and writes the results to bench/runs/.

  messages   large tensors between two of four ranks, over our transport (crates/distgpipe/benches/mpi_links.rs) and with plain MPI
             calls in C (bench/mpi_messages.c): windows of messages, as osu_bw measures throughput, and ping-pong, which measures
             latency. Ours verifies checksums, and hands each message from thread to thread.
  steps      training steps of MobileNetV2 in two partitions: two ranks, and two processes over TCP.

Measurements run in rounds, each going through the whole list, so that an outside disturbance affects all of them alike. Ratios compare
medians over all rounds.

usage: bench/mpi.py [--rounds 5] [--steps 6] [--name NAME]
needs: Open MPI, `make mpi`, and `cargo build --locked --release -p distgpipe --features mpi --bench mpi_links`
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from run import machine

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "target" / "release"
# Not bound to cores, as the processes over TCP are not.
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-n"]
TRAIN = (
    "train --model mobilenet_v2 --set dropout=0.0 --balance 9,11 --chunks 4 --schedule 1f1b --data synthetic --epochs 1 --batch 32 "
    "--optimizer sgd --momentum 0 --lr 0.005 --threads 1 --device cpu --no-evaluate"
).split()
WARM_UP = 1


def output(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def bench_binary():
    found = [path for path in (TARGET / "deps").glob("mpi_links-*") if os.access(path, os.X_OK) and not path.suffix]
    if not found:
        raise SystemExit("no mpi_links: cargo build --locked --release -p distgpipe --features mpi --bench mpi_links")
    return max(found, key=lambda path: path.stat().st_mtime)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--name", default=f"{datetime.date.today()}-mpi")
    options = parser.parse_args()
    raw = []
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "mpi_messages"
        subprocess.run(["mpicc", "-O2", HERE / "mpi_messages.c", "-o", plain], check=True)
        programs = {"plain MPI in C": plain, "distgpipe": bench_binary()}
        for number in range(options.rounds):
            for name, program in programs.items():
                for line in output([*MPIRUN, "4", program]).splitlines():
                    raw.append({"measured": "messages", "round": number, "with": name, **json.loads(line)})
            steps = options.steps + WARM_UP
            for name, prefix, more in (("MPI", [*MPIRUN, "2"], []), ("TCP", [], ["--workers", "processes"])):
                log = Path(folder) / f"{name}-{number}"
                command = [*TRAIN, "--samples", str(32 * steps), "--steps", str(steps), "--log", str(log), *more]
                output([*prefix, TARGET / "distgpipe", *command])
                lines = map(json.loads, (log / "steps.jsonl").read_text().splitlines())
                seconds = [line["seconds"] for line in lines if line["kind"] == "step"][WARM_UP:]
                raw.append({"measured": "steps", "round": number, "with": name, "step_s": seconds})
    folder = HERE / "runs" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "raw.jsonl").write_text("".join(json.dumps(line) + "\n" for line in raw))
    (folder / "README.md").write_text(report(raw, options))
    print((folder / "README.md").read_text())


def report(raw, options):
    def rates(name, pattern, mib):
        wanted = (name, pattern, mib)
        found = (line for line in raw if (line["with"], line.get("pattern"), line.get("mib")) == wanted)
        return statistics.median(line["bytes_per_s"] for line in found)

    def step(name):
        return statistics.median(s for line in raw if line["measured"] == "steps" and line["with"] == name for s in line["step_s"])

    version = output(["mpirun", "--version"]).splitlines()[0]
    lines = [
        "# The MPI transport on one host", "",
        f"Machine: {machine()}, {version}.  ",
        f"Command: `bench/mpi.py --rounds {options.rounds} --steps {options.steps}`; all figures are in `raw.jsonl`.", "",
        "## Throughput of large messages", "",
        "Windows of 64 messages, and of 256 MiB at most, from rank 0 to rank 1 of four ranks, in shared memory, each answered by a short",
        "message. Medians of the rounds. As osu_bw, plain MPI sends all messages of a window from one buffer and receives them into one,",
        "which stay in the cache; with own buffers, each message of the window has one. Each tensor of distgpipe has its own memory.", "",
        "| size | plain MPI, one buffer | plain MPI, own buffers | distgpipe | ratio to one buffer | ratio to own buffers |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    plain, sizes = "plain MPI in C", sorted({line["mib"] for line in raw if "mib" in line})
    for mib in sizes:
        one, own, ours = (rates(plain, "window", mib), rates(plain, "own buffers", mib), rates("distgpipe", "window", mib))
        cells = [f"{rate / 1e9:.2f} GB/s" for rate in (one, own, ours)] + [f"{ours / one:.2f}", f"{ours / own:.2f}"]
        lines.append(f"| {mib} MiB | {' | '.join(cells)} |")
    lines += [
        "", "## Ping-pong", "",
        "One message there, one back: the time of a single message, in which ours passes three threads at each end.", "",
        "| size | plain MPI in C | distgpipe | ratio |", "| --- | --- | --- | --- |",
    ]
    for mib in sizes:
        there, ours = rates(plain, "ping-pong", mib), rates("distgpipe", "ping-pong", mib)
        lines.append(f"| {mib} MiB | {there / 1e9:.2f} GB/s | {ours / 1e9:.2f} GB/s | {ours / there:.2f} |")
    mpi, tcp = step("MPI"), step("TCP")
    lines += [
        "", "## Training steps", "",
        f"`distgpipe {' '.join(TRAIN)}`, two workers. Medians over all steps of all rounds, after {WARM_UP} step of each.", "",
        "| two ranks over MPI | two processes over TCP | ratio |", "| --- | --- | --- |",
        f"| {mpi * 1e3:.0f} ms | {tcp * 1e3:.0f} ms | {mpi / tcp:.2f} |", "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
