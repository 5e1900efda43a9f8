#!/usr/bin/env python3
"""Measures distgpipe beside its peers in one run, and writes the run into bench/runs/.

Everything trains MobileNetV2 on 224×224 images, a batch of 32, SGD with a learning rate of 0.005. The measurements are
taken in rounds, each round through the whole list, so that a disturbance from outside hits all of them alike; ratios
are between medians over all steps of all rounds.

usage: bench/run.py [--rounds 3] [--steps 4] [--name NAME] [--only REGEX]      needs: bench/requirements.txt, a release build
"""
import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BINARY = HERE.parent / "target" / "release" / "distgpipe"
WARM_UP = 2

TRAIN = (
    "train --model mobilenet_v2 --set dropout=0.0 --data synthetic --batch 32 --optimizer sgd --momentum 0 --lr 0.005 "
    "--threads 1 --no-evaluate --json --epochs 1"
).split()

# What is measured: name, and the flags beside TRAIN for ours or the arguments of peers.py.
OURS = {
    "ours, 1 worker, 1 micro-batch": "--place a --chunks 1",
    "ours, 1 worker, 4 micro-batches": "--place a --chunks 4",
    "ours, 2 threads, 1f1b, never": "--place a,b --auto-balance 2 --chunks 4 --schedule 1f1b --recompute never",
    "ours, 2 threads, gpipe, except-last": "--place a,b --auto-balance 2 --chunks 4 --schedule gpipe --recompute except-last",
    "ours, 2 threads, gpipe, always": "--place a,b --auto-balance 2 --chunks 4 --schedule gpipe --recompute always",
    "ours, 2 processes, 1f1b, never": "--place a,b --auto-balance 2 --chunks 4 --schedule 1f1b --recompute never --workers processes",
    "ours, 2 processes, gpipe, always": "--place a,b --auto-balance 2 --chunks 4 --schedule gpipe --recompute always --workers processes",
    "ours, 2 replicas, threads": "--place a --replicas 2 --chunks 1",
    "ours, 2 replicas, processes": "--place a --replicas 2 --chunks 1 --workers processes",
}
PEERS = {
    "PyTorch, one process, 1 thread": "--only one-process --threads 1",
    "PyTorch, one process, 2 threads": "--only one-process --threads 2",
    "torchgpipe, except_last": "--only torchgpipe-except_last --threads 1",
    "torchgpipe, except_last, 2 threads": "--only torchgpipe-except_last --threads 2",
    "torchgpipe, always": "--only torchgpipe-always --threads 1",
    "torch pipelining, 1F1B": "--only pipelining-1f1b --threads 1",
    "torch DistributedDataParallel": "--only data-parallel --threads 1",
}
RATIOS = [
    # what, the figure, the figure it is compared with, at least
    ("except-last against torchgpipe's except_last", "ours, 2 threads, gpipe, except-last", "torchgpipe, except_last", 1.8),
    ("… with both cores for its operators", "ours, 2 threads, gpipe, except-last", "torchgpipe, except_last, 2 threads", None),
    ("1F1B, never, against torch pipelining's (threads)", "ours, 2 threads, 1f1b, never", "torch pipelining, 1F1B", 1.3),
    ("1F1B, never, against torch pipelining's (processes)", "ours, 2 processes, 1f1b, never", "torch pipelining, 1F1B", 1.3),
    ("2 replicas against DistributedDataParallel (threads)", "ours, 2 replicas, threads", "torch DistributedDataParallel", None),
    ("2 replicas against DistributedDataParallel (processes)", "ours, 2 replicas, processes", "torch DistributedDataParallel", None),
    ("2 replicas against 1F1B, never, in 2 partitions (threads)", "ours, 2 replicas, threads", "ours, 2 threads, 1f1b, never", None),
    ("one worker against PyTorch, 1 thread", "ours, 1 worker, 1 micro-batch", "PyTorch, one process, 1 thread", None),
]


def measure_ours(flags, steps):
    samples = 32 * (steps + WARM_UP)
    with tempfile.TemporaryDirectory() as log:
        command = [str(BINARY), *TRAIN, *flags.split(), "--samples", str(samples), "--log", log, "--trace"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"failed: {' '.join(command)}")
        summary = json.loads(out)
        lines = [json.loads(line) for line in (Path(log) / "steps.jsonl").read_text().splitlines()]
    times = [line["seconds"] for line in lines if "seconds" in line][WARM_UP:]
    overheads = []
    for worker in summary["workers"]:
        phases = worker["phases_s"]
        work = sum(phases[p] for p in ("forward", "recompute", "backward", "optimizer", "receive wait"))
        overheads.append((worker["steps_s"] - work) / worker["steps_s"])
    return {
        "step_s": times,
        "balance": summary["balance"],
        "peak_rss_bytes": [usage.ru_maxrss * 1024],
        "peak_tensor_bytes": [w["peak_bytes"] for w in summary["workers"]],
        "overhead": overheads,
        "workers": summary["workers"],
        "command": "distgpipe " + " ".join(command[1:]).replace(log, "LOG"),
    }


def measure_peer(arguments, steps):
    command = [sys.executable, str(HERE / "peers.py"), *arguments.split(), "--steps", str(steps), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}\n{done.stderr}")
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    figures["command"] = "peers.py " + " ".join(command[2:])
    return figures


def machine():
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    memory = int(next(l.split()[1] for l in open("/proc/meminfo") if l.startswith("MemTotal"))) // 1024 // 1024
    return f"{os.cpu_count()} cores of {model}, {memory} GiB, Linux {platform.release()}, Python {platform.python_version()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="per round, after the warm-up")
    parser.add_argument("--name", default=datetime.date.today().isoformat(), help="of the folder under bench/runs")
    parser.add_argument("--only", default="", help="only measurements whose name has a match of this regular expression")
    options = parser.parse_args()
    if not BINARY.exists():
        raise SystemExit(f"there is no {BINARY.relative_to(HERE.parent)}: run `cargo build --release` first")
    rows = []
    for round_number in range(options.rounds):
        for measure, table in ((measure_ours, OURS), (measure_peer, PEERS)):
            for name, arguments in table.items():
                if re.search(options.only, name):
                    figures = {**measure(arguments, options.steps), "name": name, "round": round_number}
                    rows.append(figures)
                    rate = 32 / statistics.median(figures["step_s"])
                    print(f"round {round_number}  {name:40} {rate:6.2f} samples/s", flush=True)
    folder = HERE / "runs" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text(report(rows, options))
    print(report(rows, options))


def report(rows, options):
    names = list(dict.fromkeys(row["name"] for row in rows))
    of = {name: [row for row in rows if row["name"] == name] for name in names}
    rate = {name: 32 / statistics.median(t for row in of[name] for t in row["step_s"]) for name in names}
    best = {name: 32 / min(t for row in of[name] for t in row["step_s"]) for name in names}
    only = f" --only '{options.only}'" if options.only else ""
    lines = [
        "# MobileNetV2, 224×224, batch 32, 4 micro-batches, SGD, on two cores",
        "",
        f"Machine: {machine()}.  ",
        f"Command: `bench/run.py --rounds {options.rounds} --steps {options.steps}{only}`; every step's time is in `raw.jsonl`.",
        "",
        "| | samples/s, median | best | peak resident memory | peak tensor memory per worker |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in names:
        resident = " + ".join(f"{b / 1e9:.2f}" for b in max(of[name], key=lambda r: sum(r["peak_rss_bytes"]))["peak_rss_bytes"])
        tensors = of[name][-1].get("peak_tensor_bytes")
        tensors = " + ".join(f"{b / 1e9:.2f}" for b in tensors) + " GB" if tensors else ""
        lines.append(f"| {name} | {rate[name]:.2f} | {best[name]:.2f} | {resident} GB | {tensors} |")
    lines += ["", "| ratio of medians | | wanted |", "| --- | --- | --- |"]
    for what, ours, theirs, wanted in RATIOS:
        if ours in rate and theirs in rate:
            lines.append(f"| {what} | {rate[ours] / rate[theirs]:.2f} | {f'at least {wanted}' if wanted else ''} |")
    one = "ours, 1 worker, 1 micro-batch"
    two = "ours, 2 threads, 1f1b, never"
    if one in rate and two in rate:
        share = rate[two] / (2 * rate[one] * 4 / 5)
        lines.append(f"| 1F1B, never, as a share of the limit 2 × (one worker) × m/(m+n−1) | {share:.2f} | at least 0.85 |")
    if two in of:
        worst = max(o for row in of[two] for o in row["overhead"])
        lines.append(f"| everything but computing and waiting, as a share of a step (worst worker, 1F1B, from the trace) | {worst:.2%} | under 2 % |")
    lines += [
        "",
        "Resident memory of ours with two processes is that of the larger one. torchgpipe runs both partitions in one process, and one",
        "thread after the other on a CPU (see ../../README.md), so its figure stands beside ours with two threads in one process.",
        "Replicas and DistributedDataParallel have half of the batch each, in one piece.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
