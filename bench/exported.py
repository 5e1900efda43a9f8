#!/usr/bin/env python3
"""Compares a model that was exported from PyTorch with the same one written by hand, and writes the results to bench/runs/.

torchvision's MobileNetV2 (10 classes, 224×224, no dropout) is exported, and trained beside distgpipe's own on one worker with
one thread. The two take turns, in rounds that begin with either, so that an outside disturbance affects both alike. The ratio
compares medians over all steps of all rounds. On a shared machine these vary by more than the two models differ; the fastest
step of each varies least. The ratio of each round shows how much the machine varies.

usage: bench/exported.py [--rounds 8] [--steps 6] [--device cpu] [--name NAME]      needs: bench/requirements.txt, a release build
"""
import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from run import machine

HERE = Path(__file__).resolve().parent
BINARY = HERE.parent / "target" / "release" / "distgpipe"
WARM_UP = 2
BATCH = 16
TRAIN = "--data synthetic --optimizer sgd --momentum 0 --lr 0.005 --threads 1 --no-evaluate --epochs 1 --place a".split()
CHUNKS = (1, 4)


def export(path):
    """Writes torchvision's model."""
    sys.path.insert(0, str(HERE.parent / "python"))
    import torch
    import torchvision
    from distgpipe_export import export

    torch.manual_seed(0)
    export(torchvision.models.MobileNetV2(num_classes=10, dropout=0.0), (torch.randn(2, 3, 224, 224),), path)


def measure(flags, chunks, options):
    steps = options.steps + WARM_UP
    with tempfile.TemporaryDirectory() as log:
        command = ["train", *flags, *TRAIN, "--device", options.device, "--batch", str(BATCH), "--chunks", str(chunks), "--samples",
                   str(BATCH * steps), "--steps", str(steps), "--log", log]
        done = subprocess.run([str(BINARY), *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"failed: {' '.join(command)}\n{done.stderr}")
        lines = [json.loads(line) for line in (Path(log) / "steps.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["kind"] == "step"][WARM_UP:]
    return seconds, "distgpipe " + " ".join(command).replace(log, "LOG")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="steps per round, after the warm-up")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default=f"{datetime.date.today().isoformat()}-exported", help="name of the folder under bench/runs")
    options = parser.parse_args()
    if not BINARY.exists():
        raise SystemExit(f"{BINARY.relative_to(HERE.parent)} does not exist: run `cargo build --release` first")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/mobilenet_v2.pt2"
        export(model)
        kinds = {"built-in": ["--model", "mobilenet_v2", "--set", "dropout=0.0"], "exported": ["--model", model]}
        for number in range(options.rounds):
            for chunks in CHUNKS:
                for kind in list(kinds)[:: -1 if number % 2 else 1]:
                    seconds, command = measure(kinds[kind], chunks, options)
                    rows.append({"round": number, "kind": kind, "chunks": chunks, "step_s": seconds,
                                 "command": command.replace(folder, "FOLDER")})
                    print(f"round {number}, {kind}, {chunks} micro-batches: median {statistics.median(seconds):.3f} s", flush=True)
    folder = HERE / "runs" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps({"machine": machine(), "measurements": rows}, indent=1) + "\n")
    text = [f"# Exported and built-in MobileNetV2\n\n{machine()}, device {options.device}. "
            f"`bench/exported.py --rounds {options.rounds} --steps {options.steps}`: 224×224, batch {BATCH}, one thread.\n",
            "| micro-batches | step, s | built-in | exported | exported / built-in | of each round |",
            "| --- | --- | --- | --- | --- | --- |"]
    for chunks in CHUNKS:
        steps = {kind: [r["step_s"] for r in rows if (r["kind"], r["chunks"]) == (kind, chunks)] for kind in kinds}
        for name, figure in (("median", statistics.median), ("fastest", min)):
            built_in, exported = (figure(sum(steps[kind], [])) for kind in ("built-in", "exported"))
            rounds = sorted(figure(e) / figure(b) for b, e in zip(steps["built-in"], steps["exported"]))
            text.append(f"| {chunks} | {name} | {built_in:.3f} | {exported:.3f} | **{exported / built_in:.3f}** | "
                        f"{', '.join(f'{r:.2f}' for r in rounds)} |")
    (folder / "README.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
