#!/usr/bin/env python3
"""Measures the MPI transport on one host, and writes the results to bench/runs/.

  messages   large tensors between two of four ranks, over our transport (crates/distgpipe/benches/mpi_links.rs) and with plain MPI
             calls in C (bench/mpi_messages.c): windows of messages, as osu_bw measures throughput, and ping-pong, which measures
             latency. Ours verifies checksums, and hands each message from thread to thread.
  steps      training steps of MobileNetV2 in two and in four partitions: as many ranks, and as many processes over TCP, with the time
             of the processor that the whole run took.

Measurements run in rounds, each going through the whole list, so that an outside disturbance affects all of them alike. Ratios compare
medians over all rounds.

usage: bench/mpi.py [--rounds 5] [--steps 6] [--name NAME]
needs: what `make bench-mpi` builds before it calls this: Open MPI, `make mpi`, and
       `cargo build --locked --release -p distgpipe --features mpi --bench mpi_links`
"""
import argparse
import datetime
import json
import os
import resource
import shutil
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
    "train --model mobilenet_v2 --set dropout=0.0 --chunks 4 --schedule 1f1b --data synthetic --epochs 1 --batch 32 "
    "--optimizer sgd --momentum 0 --lr 0.005 --threads 1 --device cpu --no-evaluate"
).split()
# Partitions of about the same time, by their number.
BALANCES = {2: "9,11", 4: "3,4,6,7"}
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


def steps(name, workers, count, folder):
    """A run over MPI or TCP: the seconds of each step after the warm-up, and of the processor over the whole run."""
    log = folder / "log"
    shutil.rmtree(log, ignore_errors=True)
    prefix, more = ([*MPIRUN, str(workers)], []) if name == "MPI" else ([], ["--workers", "processes"])
    total = count + WARM_UP
    size = ["--balance", BALANCES[workers], "--samples", str(32 * total), "--steps", str(total), "--log", str(log)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output([*prefix, TARGET / "distgpipe", *TRAIN, *size, *more])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = map(json.loads, (log / "steps.jsonl").read_text().splitlines())
    spent = {field: getattr(after, field) - getattr(before, field) for field in ("ru_utime", "ru_stime", "ru_nvcsw", "ru_nivcsw")}
    return {
        "workers": workers,
        "step_s": [line["seconds"] for line in lines if line["kind"] == "step"][WARM_UP:],
        "cpu_s": spent["ru_utime"] + spent["ru_stime"],
        "switches": spent["ru_nvcsw"] + spent["ru_nivcsw"],
    }


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
            raw += [
                {"measured": "steps", "round": number, "with": name, **steps(name, workers, options.steps, Path(folder))}
                for workers in BALANCES
                for name in ("MPI", "TCP")
            ]
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

    def median(name, workers, of):
        runs = (line for line in raw if line["measured"] == "steps" and (line["with"], line["workers"]) == (name, workers))
        return statistics.median(value for line in runs for value in of(line))

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
    lines += [
        "", "## Training steps", "",
        f"`distgpipe {' '.join(TRAIN)}`, one partition for each worker. Medians over all steps of all rounds, after {WARM_UP} step of",
        "each. The time of the processor is that of all processes over a whole run, their start included.", "",
        "| workers | step, ranks over MPI | step, processes over TCP | ratio | processor, MPI | processor, TCP | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for workers in BALANCES:
        (mpi, tcp), (mpi_cpu, tcp_cpu) = (
            [median(name, workers, of) for name in ("MPI", "TCP")]
            for of in (lambda line: line["step_s"], lambda line: [line["cpu_s"]])
        )
        cells = [f"{mpi * 1e3:.0f} ms", f"{tcp * 1e3:.0f} ms", f"{mpi / tcp:.2f}"]
        cells += [f"{mpi_cpu:.1f} s", f"{tcp_cpu:.1f} s", f"{mpi_cpu / tcp_cpu:.2f}"]
        lines.append(f"| {workers} | {' | '.join(cells)} |")
    lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
