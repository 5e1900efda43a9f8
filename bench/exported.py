#!/usr/bin/env python3
"""Compares a model that was exported from PyTorch with the same one written by hand, and writes the results to bench/runs/.

torchvision's MobileNetV2 (10 classes, 224×224, no dropout) is exported, and trained beside distgpipe's own on one worker with
one thread. On a GPU it is trained with and without CUDA graphs. The two take turns, in rounds that begin with either, so that an
outside disturbance affects both alike. The ratio compares medians over all steps of all rounds. On a shared machine these vary by
more than the two models differ; the fastest step of each varies least. The ratio of each round shows how much the machine varies.

usage: bench/exported.py [--rounds 8] [--steps 6] [--device cpu] [--chunks 1,4] [--name NAME]
needs: bench/requirements.txt, a release build

       bench/exported.py --instructions [--name NAME]                                   # needs valgrind as well
counts the instructions of a step of 4 small images (64×64) with AVX2 instead, which other work on the machine does not change.

A machine without torchvision takes the model as a file, and the binary from elsewhere; a GPU needs the torch package alone:
       bench/exported.py --export mobilenet_v2.pt2                                      # where torchvision is
       LD_LIBRARY_PATH=TORCH/lib bench/exported.py --model mobilenet_v2.pt2 --binary PATH --device cuda:0 --rounds 3 --steps 40 --chunks 4
"""
import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from run import machine

HERE = Path(__file__).resolve().parent
BINARY = HERE.parent / "target" / "release" / "distgpipe"
# With CUDA graphs, the third step records them.
WARM_UP = 4
BATCH = 16
TRAIN = "--data synthetic --optimizer sgd --momentum 0 --lr 0.005 --threads 1 --no-evaluate --epochs 1 --place a".split()
BUILT_IN = "--model mobilenet_v2 --set dropout=0.0".split()


def export(path, size=224):
    """Writes torchvision's model for images of this size."""
    sys.path.insert(0, str(HERE.parent / "python"))
    import torch
    import torchvision
    from distgpipe_export import export

    torch.manual_seed(0)
    export(torchvision.models.MobileNetV2(num_classes=10, dropout=0.0), (torch.randn(2, 3, size, size),), path)


def measure(flags, chunks, graphs, options):
    steps = options.steps + WARM_UP
    with tempfile.TemporaryDirectory() as log:
        command = ["train", *flags, *TRAIN, "--device", options.device, "--batch", str(BATCH), "--chunks", str(chunks), "--samples",
                   str(BATCH * steps), "--steps", str(steps), "--log", log, *(["--graphs", graphs] if graphs else [])]
        done = subprocess.run([str(options.binary), *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"failed: {' '.join(command)}\n{done.stderr}")
        lines = [json.loads(line) for line in (Path(log) / "steps.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["kind"] == "step"][WARM_UP:]
    return seconds, "distgpipe " + " ".join(command).replace(log, "LOG")


def instructions(flags, options):
    """The instructions of a step: those of a run of seven, less those of a run of two."""
    counts = []
    for steps in (2, 7):
        command = ["train", *flags, *TRAIN, "--device", "cpu", "--batch", "4", "--chunks", "4", "--samples", str(4 * steps), "--steps", str(steps)]
        # With a small rate, weights and so the work of a step stay alike.
        command[command.index("--lr") + 1] = "1e-6"
        limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
        valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(options.binary), *command]
        done = subprocess.run(valgrind, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **limits})
        found = re.search(r"Collected : (\d+)", done.stdout)
        if done.returncode or not found:
            raise SystemExit(f"failed: {' '.join(valgrind)}\n{done.stdout}")
        counts.append(int(found[1]))
    return (counts[1] - counts[0]) / 5


def count(options, folder):
    with tempfile.TemporaryDirectory() as temporary:
        model = f"{temporary}/mobilenet_v2.pt2"
        export(model, 64)
        built_in = instructions([*BUILT_IN, "--set", "image=64", "--weights", model], options)
        exported = instructions(["--model", model], options)
    text = (f"# Instructions of a step of the exported and the built-in MobileNetV2\n\n{machine()}. `bench/exported.py --instructions`: "
            "64×64, 4 micro-batches of one row, one thread, AVX2, counted by callgrind.\n\n| built-in | exported | exported − built-in | exported / built-in |\n"
            f"| --- | --- | --- | --- |\n| {built_in:,.0f} | {exported:,.0f} | {exported - built_in:,.0f} | **{exported / built_in:.4f}** |\n")
    (folder / "README.md").write_text(text)
    print(text)


def device(options):
    """The device in words."""
    if not options.device.startswith("cuda"):
        return f"device {options.device}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return f"device {options.device} ({found[int((options.device.split(':') + ['0'])[1])] if found else 'unknown'})"


def table(rows, options):
    text = [f"# Exported and built-in MobileNetV2\n\n{machine()}, {device(options)}. "
            f"`bench/exported.py --rounds {options.rounds} --steps {options.steps} --device {options.device} --chunks "
            f"{','.join(map(str, options.chunks))}`: 224×224, batch {BATCH}, one thread.\n",
            "| micro-batches | CUDA graphs | step, s | built-in | exported | exported / built-in | of each round |",
            "| --- | --- | --- | --- | --- | --- | --- |"]
    for chunks, graphs in sorted({(r["chunks"], r["graphs"] or "") for r in rows}):
        at = {kind: [r["step_s"] for r in rows if (r["kind"], r["chunks"], r["graphs"] or "") == (kind, chunks, graphs)]
              for kind in ("built-in", "exported")}
        for name, figure in (("median", statistics.median), ("fastest", min)):
            built_in, exported = (figure(sum(at[kind], [])) for kind in at)
            rounds = sorted(figure(e) / figure(b) for b, e in zip(at["built-in"], at["exported"]))
            text.append(f"| {chunks} | {graphs or '–'} | {name} | {built_in:.4f} | {exported:.4f} | **{exported / built_in:.3f}** | "
                        f"{', '.join(f'{r:.2f}' for r in rounds)} |")
    return "\n".join(text) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="steps per round, after the warm-up")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chunks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4], help="numbers of micro-batches")
    parser.add_argument("--binary", type=Path, default=BINARY)
    parser.add_argument("--model", help="the exported model, from --export [default: export it now]")
    parser.add_argument("--instructions", action="store_true", help="count instructions with valgrind instead of measuring time")
    parser.add_argument("--export", metavar="FILE.pt2", help="write the exported model, and measure nothing")
    parser.add_argument("--name", default=f"{datetime.date.today().isoformat()}-exported", help="name of the folder under bench/runs")
    options = parser.parse_args()
    if options.export:
        return export(options.export)
    if not options.binary.exists():
        raise SystemExit(f"{options.binary} does not exist: run `cargo build --release` first")
    folder = HERE / "runs" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    if options.instructions:
        return count(options, folder)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        model = options.model or f"{temporary}/mobilenet_v2.pt2"
        if not options.model:
            export(model)
        kinds = {"built-in": BUILT_IN, "exported": ["--model", model]}
        for number in range(options.rounds):
            for chunks in options.chunks:
                for graphs in ("off", "on") if options.device.startswith("cuda") else (None,):
                    for kind in list(kinds)[:: -1 if number % 2 else 1]:
                        seconds, command = measure(kinds[kind], chunks, graphs, options)
                        rows.append({"round": number, "kind": kind, "chunks": chunks, "graphs": graphs, "step_s": seconds,
                                     "command": command.replace(model, "FOLDER/mobilenet_v2.pt2")})
                        print(f"round {number}, {kind}, {chunks} micro-batches{f', graphs {graphs}' if graphs else ''}: median "
                              f"{statistics.median(seconds):.4f} s", flush=True)
            # After each round, so that a run that is stopped leaves what it has.
            (folder / "figures.json").write_text(json.dumps({"machine": machine(), "measurements": rows}, indent=1) + "\n")
            (folder / "README.md").write_text(table(rows, options))
    print(table(rows, options))


if __name__ == "__main__":
    main()
