#!/usr/bin/env python3
"""Measures distgpipe and its peers in one run, and writes the results to bench/runs/.

Every measurement trains MobileNetV2 on 224×224 images with a batch of 32 and SGD with a learning rate of 0.005.
Measurements run in rounds, each going through the whole list, so that an outside disturbance affects all of them alike.
Ratios compare medians over all steps of all rounds.

usage: bench/run.py [--rounds 3] [--steps 4] [--name NAME] [--only REGEX] [--against BINARY]      needs: bench/requirements.txt, a release build
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
OTHER = ", other build"

TRAIN = (
    "train --model mobilenet_v2 --set dropout=0.0 --data synthetic --batch 32 --optimizer sgd --momentum 0 --lr 0.005 "
    "--threads 1 --device cpu --no-evaluate --json --epochs 1"
).split()

# What is measured: its name, and the flags added to TRAIN for distgpipe, or the arguments of peers.py.
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
    # label, measurement, the measurement it is compared with, target (at least)
    ("GPipe, `except-last`: speed-up over torchgpipe (`except_last`)", "ours, 2 threads, gpipe, except-last", "torchgpipe, except_last", 1.8),
    ("GPipe, `except-last`: speed-up over torchgpipe (`except_last`) with two compute threads", "ours, 2 threads, gpipe, except-last", "torchgpipe, except_last, 2 threads", None),
    ("1F1B in 2 threads: speed-up over torch.distributed.pipelining's 1F1B", "ours, 2 threads, 1f1b, never", "torch pipelining, 1F1B", 1.3),
    ("1F1B in 2 processes: speed-up over torch.distributed.pipelining's 1F1B", "ours, 2 processes, 1f1b, never", "torch pipelining, 1F1B", 1.3),
    ("2 replicas in 2 threads: speed-up over DistributedDataParallel", "ours, 2 replicas, threads", "torch DistributedDataParallel", 1.7),
    ("2 replicas in 2 processes: speed-up over DistributedDataParallel", "ours, 2 replicas, processes", "torch DistributedDataParallel", 1.7),
    ("2 replicas in 2 threads: speed-up over 1F1B with 2 partitions in 2 threads", "ours, 2 replicas, threads", "ours, 2 threads, 1f1b, never", None),
    ("one worker: speed-up over plain PyTorch, 1 thread", "ours, 1 worker, 1 micro-batch", "PyTorch, one process, 1 thread", None),
]


def measure_ours(flags, steps, binary=BINARY):
    samples = 32 * (steps + WARM_UP)
    with tempfile.TemporaryDirectory() as log:
        command = [str(binary), *TRAIN, *flags.split(), "--samples", str(samples), "--log", log, "--trace"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"failed: {' '.join(command)}")
        summary = json.loads(out)
        lines = [json.loads(line) for line in (Path(log) / "steps.jsonl").read_text().splitlines()]
        lines = [line for line in lines if line["kind"] == "step"]
        exposed = exposed_sharing(Path(log) / "trace.jsonl")
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
        "exposed_sharing": exposed,
        "command": "distgpipe " + " ".join(command[1:]).replace(log, "LOG"),
    }


def exposed_sharing(trace):
    """For each step after the warm-up, from the spans `gradient_wait`: its seconds, the longest wait of a replica, and how long the
    last replica waited, when all gradients were there. The difference of the two waits is time in which a replica waits for another
    one to compute."""
    spans = {}
    for line in trace.read_text().splitlines():
        span = json.loads(line)
        spans.setdefault(span["step"], []).append(span)
    steps = []
    for number in sorted(spans)[WARM_UP:]:
        waits = [span for span in spans[number] if span["phase"] == "gradient_wait"]
        if waits:
            start, end = min(s["start_ns"] for s in spans[number]), max(s["end_ns"] for s in spans[number])
            longest = max(s["end_ns"] - s["start_ns"] for s in waits)
            last = max(s["end_ns"] for s in waits) - max(s["start_ns"] for s in waits)
            steps.append({"step_s": (end - start) / 1e9, "longest_wait_s": longest / 1e9, "exposed_s": last / 1e9})
    return steps


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
    parser.add_argument("--steps", type=int, default=4, help="steps per round, after the warm-up")
    parser.add_argument("--name", default=datetime.date.today().isoformat(), help="name of the folder under bench/runs")
    parser.add_argument("--only", default="", help="run only measurements whose name matches this regular expression")
    parser.add_argument("--against", type=Path, help="another build of distgpipe, measured in the same rounds: an older commit, say")
    options = parser.parse_args()
    if not BINARY.exists():
        raise SystemExit(f"{BINARY.relative_to(HERE.parent)} does not exist: run `cargo build --release` first")
    rows = []
    for round_number in range(options.rounds):
        measurements = [(measure_ours, OURS), (measure_peer, PEERS)]
        if options.against:
            other = lambda flags, steps: measure_ours(flags, steps, options.against)
            measurements.insert(1, (other, {f"{name}{OTHER}": flags for name, flags in OURS.items()}))
        # Every second round in reverse, so that no measurement always has the same neighbours.
        measurements = [(measure, name, flags) for measure, table in measurements for name, flags in table.items()]
        measurements.sort(key=lambda entry: entry[1].removesuffix(OTHER))
        for measure, name, arguments in measurements[:: -1 if round_number % 2 else 1]:
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
    only += " --against OTHER_BUILD" if options.against else ""
    lines = [
        "# MobileNetV2, 224×224, batch 32, 4 micro-batches, SGD, on two cores",
        "",
        f"Machine: {machine()}.  ",
        f"Command: `bench/run.py --rounds {options.rounds} --steps {options.steps}{only}`; every step's time is in `raw.jsonl`.",
        "",
        "| configuration | samples/s, median | samples/s, best | peak resident memory | peak tensor memory per worker |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in names:
        resident = " + ".join(f"{b / 1e9:.2f}" for b in max(of[name], key=lambda r: sum(r["peak_rss_bytes"]))["peak_rss_bytes"])
        tensors = of[name][-1].get("peak_tensor_bytes")
        tensors = " + ".join(f"{b / 1e9:.2f}" for b in tensors) + " GB" if tensors else ""
        lines.append(f"| {name} | {rate[name]:.2f} | {best[name]:.2f} | {resident} GB | {tensors} |")
    lines += ["", "| ratio of medians | value | target |", "| --- | --- | --- |"]
    for what, ours, theirs, wanted in RATIOS:
        if ours in rate and theirs in rate:
            lines.append(f"| {what} | {rate[ours] / rate[theirs]:.2f} | {f'at least {wanted}' if wanted else ''} |")
    for name in names:
        if f"{name}{OTHER}" in rate:
            lines.append(f"| {name}: speed-up over the other build | {rate[name] / rate[name + OTHER]:.3f} | |")
    one = "ours, 1 worker, 1 micro-batch"
    two = "ours, 2 threads, 1f1b, never"
    if one in rate and two in rate:
        share = rate[two] / (2 * rate[one] * 4 / 5)
        lines.append(f"| 1F1B in 2 threads: share of the limit 2 × (one worker) × m/(m+n−1) | {share:.2f} | at least 0.85 |")
    if two in of:
        worst = max(o for row in of[two] for o in row["overhead"])
        lines.append(f"| 1F1B in 2 threads: share of a step spent neither computing nor waiting (worst worker, from the trace) | {worst:.2%} | under 2% |")
    for name in names:
        steps = [step for row in of[name] for step in row.get("exposed_sharing") or []]
        if steps:
            share = lambda of_step: statistics.median(step[of_step] / step["step_s"] for step in steps)
            waits = f"{name}: share of a step that the replica which ends first waits for gradients (median, from the trace)"
            lines.append(f"| {waits} | {share('longest_wait_s'):.2%} | |")
            exposed = f"{name}: share of a step in which gradients are shared after the last backward pass (median, from the trace)"
            lines.append(f"| {exposed} | {share('exposed_s'):.2%} | under 10% |")
    lines += [
        "",
        "The resident memory of distgpipe (*ours*) with two processes is that of the larger process. torchgpipe runs both",
        "partitions in one process, one after the other on a CPU (see ../../README.md), so compare it with ours in two threads.",
        "Replicas and DistributedDataParallel processes each take half of the batch, in one piece.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
