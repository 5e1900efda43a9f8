#!/usr/bin/env python3
"""Measures what codecs cost and gain in training steps, and writes the results to bench/runs/.

  overhead   two processes on this host, MobileNetV2 224×224 cut after its first block, so that the link carries
             [rows, 32, 112, 112] in both directions. The socket is as fast as memory, so codecs can only cost time.
  thin       client and server in separate network namespaces, connected by a link of --mbit Mbit/s (veth, `tc … tbf`), with
             the same model and with one that computes almost nothing, so that the link is the bottleneck.
             Needs root, `ip` and `tc` (Debian: iproute2); removes everything it created.
  real       like thin, with pretrained models on real data, because what zstd saves depends on the data: MobileNetV2 on
             photographs, and a small text encoder on CoLA, with first and last layers on the client. --files names a folder with
             mobilenet_v2_features.safetensors, food101/, encoder/ (config.json, model.safetensors, tokenizer.json) and CoLA/.
  tls        split learning over `distgpipe serve` in such a link, at each of --mbits, with small models, so that the link is the
             bottleneck where it is slow. Compares each run with the simulator (`distgpipe balance`), which gets the rate and the
             latency that `distgpipe bandwidth` measured, and the computing times of the run's own trace.

All compare raw with several codecs. Measurements run in rounds, each going through the whole list, so that an outside
disturbance affects all of them alike. Ratios compare medians over all steps of all rounds.

usage: bench/links.py overhead|thin|real|tls [--files FOLDER] [--rounds 3] [--steps 4] [--mbit 100] [--mbits LIST] [--chunks 16]
                                               [--congestion cubic] [--codecs LIST] [--models LIST] [--name NAME]            needs: a release build
"""
import argparse
import contextlib
import datetime
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from run import machine

HERE = Path(__file__).resolve().parent
BINARY = HERE.parent / "target" / "release" / "distgpipe"
WARM_UP = 1
LOSSY = ["raw", "bf16", "sort:16", "sort:12", "sort:8", "sort:4", "tile:4"]
CODECS = {
    "overhead": LOSSY,
    "thin": LOSSY,
    "tls": ["raw", "tile:4", "sort:8"],
    "real": [codec for inner in ("raw", "tile:4", "tile:3", "sort:8") for codec in (inner, f"zstd({inner})")],
}
TOKEN = "5e" * 32

SYNTHETIC = "--place client,server --schedule 1f1b --data synthetic --epochs 1 --optimizer sgd --momentum 0 --lr 0.005"
SPLIT = (
    "--cut first=1,last=1 --place client,server,client --chunks CHUNKS --data synthetic --epochs 1 --optimizer sgd --momentum 0 --lr 0.005")
# Flags, and the rows of a batch in each mode; in tls, those of 16 micro-batches.
MODELS = {
    "MobileNetV2": (f"--model mobilenet_v2 --set dropout=0.0 --balance 1,19 --chunks 8 {SYNTHETIC}", {"overhead": 32, "thin": 16}),
    "wide layer": (f"--model mlp --set input=[64] --set hidden=[32768] --balance 1,1 --chunks 8 {SYNTHETIC}", {"thin": 64}),
    "MobileNetV2 on photographs": (
        "--model mobilenet_v2 --set classes=101 --weights FILES/mobilenet_v2_features.safetensors --init-missing --data food101 "
        "--data-dir FILES/food101 --cut first=1,last=1 --chunks 2 --optimizer sgd --lr 0.02 --epochs 100", {"real": 16}),
    "encoder on CoLA": (
        "--model roberta --set config=FILES/encoder/config.json --set classes=2 --weights FILES/encoder/model.safetensors --init-missing "
        "--tokenizer FILES/encoder/tokenizer.json --data cola --data-dir FILES/CoLA --cut roberta-1 --chunks 4 --optimizer adamw "
        "--lr 3e-5", {"real": 32}),
    "MobileNetV2, 32×32": (f"--model mobilenet_v2 --set image=32 --set dropout=0.0 {SPLIT}", {"tls": 64}),
    "RoBERTa, small": (
        "--model roberta --set layers=2 --set hidden=128 --set heads=4 --set feed_forward=256 --set vocabulary=1000 --set dropout=0.0 "
        f"{SPLIT}", {"tls": 32}),
}


def train(model, codec, options, workers, prefix=()):
    flags, rows = MODELS[model]
    rows, steps = rows[options.mode], options.steps + WARM_UP
    if options.mode == "tls":
        flags, rows = flags.replace("CHUNKS", str(options.chunks)), rows * options.chunks // 16
    samples = ["--samples", str(rows * steps)] if "synthetic" in flags else []
    with tempfile.TemporaryDirectory() as log:
        command = [
            *prefix, str(BINARY), "train", *flags.replace("FILES", str(options.files)).split(), *samples, "--steps", str(steps),
            "--batch", str(rows), "--threads", "1", "--device", "cpu", "--no-evaluate", "--json", "--codec", codec, "--log", log,
            "--trace", *workers,
        ]
        summary = output_of(command)
        lines = [json.loads(line) for line in (Path(log) / "steps.jsonl").read_text().splitlines()]
        lines = [line for line in lines if line["kind"] == "step"]
        spans = [json.loads(line) for line in (Path(log) / "trace.jsonl").read_text().splitlines()]
    cuts = [cut for link in summary["links"] for cut in link["cuts"]]
    rates = [link["delivered_bytes_per_s"] for link in summary["links"]]
    return {
        "model": model,
        "codec": codec,
        "rows": rows,
        "chunks": options.chunks if options.mode == "tls" else None,
        "step_s": [line["seconds"] for line in lines][WARM_UP:],
        "wire_bytes_a_step": sum(cut["wire_bytes"] for cut in cuts) / len(lines),
        "encode_ms_a_step": sum(cut["encode_ms"] for cut in cuts) / len(lines),
        "decode_ms_a_step": sum(cut["decode_ms"] for cut in cuts) / len(lines),
        "overlap": overlap(spans),
        "delivered_bytes_per_s": rates,
        "busier_direction_bytes_a_step": max(link["training_bytes"] for link in lines[-1]["links"]),
        "computing_s": computing(spans),
        "command": "distgpipe " + " ".join(command[len(prefix) + 1:]).replace(log, "LOG").replace(str(options.files), "FILES"),
    }


def output_of(command):
    """What a command prints with --json. A server that still ends the last job is asked again."""
    for _ in range(20):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "DISTGPIPE_TOKEN": TOKEN})
        if done.returncode != 3:
            break
        time.sleep(0.5)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def computing(spans):
    """The mean time of a forward and of a backward pass of each partition, without the first step."""
    times = {}
    for span in spans:
        if span["phase"] in ("forward", "backward") and span["step"] > WARM_UP:
            partition = int(span["action"].split(span["phase"][0].upper())[0])
            times.setdefault((partition, span["phase"]), []).append((span["end_ns"] - span["start_ns"]) / 1e9)
    partitions = sorted({partition for partition, _ in times})
    return [{phase: statistics.mean(times.get((partition, phase), [0])) for phase in ("forward", "backward")} for partition in partitions]


def link_of(prefix, workers):
    """Rate and latency of a link, as `distgpipe bandwidth` measures them."""
    sizes = ["--codec", "raw", "--sizes", "256KiB", "--seconds", "2", "--json"]
    link = output_of([*prefix, str(BINARY), "bandwidth", *workers, *sizes])["links"][0]
    [row] = link["measurements"]
    return {"bytes_per_s": min(row[way]["wire_bytes_per_s"] for way in ("there", "back")), "latency_s": link["round_trip_s"] / 2}


def predicted(row, link, profiles):
    """The simulator's time of a step: the layers of each partition take together what its trace says."""
    flags = MODELS[row["model"]][0].split()
    model = [flags[flags.index("--model") + 1], *(word for i, flag in enumerate(flags) if flag == "--set" for word in flags[i:i + 2])]
    chunks = row["chunks"]
    rows = ["--rows", str(row["rows"] // chunks), "--threads", "1", "--device", "cpu", "--json"]
    if row["model"] not in profiles:
        profiles[row["model"]] = output_of([str(BINARY), "models", *model, "--profile", *rows])
    profile = json.loads(json.dumps(profiles[row["model"]]))
    layers, times = profile["layers"], row["computing_s"]
    for part, time_of in zip((layers[:1], layers[1:-1], layers[-1:]), times):
        for phase in ("forward", "backward"):
            whole = sum(layer[f"{phase}_s"] for layer in part)
            for layer in part:
                layer[f"{phase}_s"] *= time_of[phase] / whole if whole else 0
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        costs.write_text(json.dumps(profile))
        estimate = output_of([
            str(BINARY), "balance", *model, "--cut", "first=1,last=1", "--place", "client,server,client", "--chunks", str(chunks),
            "--codec", row["codec"], "--costs", str(costs), "--rows", rows[1], "--json",
            "--link-rate", f"{link['bytes_per_s']:.0f}B/s", "--link-latency", f"{1000 * link['latency_s']:.4f}"])
    return estimate["given"]["step_s"]


def overlap(spans):
    """The share of the encoding and decoding time during which some stage computes; None without a codec."""
    work = sorted((s["start_ns"], s["end_ns"]) for s in spans if s["phase"] in ("forward", "recompute", "backward"))
    busy = []
    for start, end in work:
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    coding = [(s["start_ns"], s["end_ns"]) for s in spans if s["phase"] in ("encode", "decode")]
    shared = sum(max(0, min(end, e) - max(start, b)) for start, end in coding for b, e in busy)
    total = sum(end - start for start, end in coding)
    return shared / total if total else None


def run(*command):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def burst(mbit):
    """Bytes that may pass at once after a pause: what the link carries in a millisecond, and two packets at least."""
    return max(4000, mbit * 125)


@contextlib.contextmanager
def thin_link(mbit, tls=False, congestion=None):
    """Connects two network namespaces by a slow link and starts the server's worker, or a server, in one of them. `congestion` is TCP's
    congestion control on the link; None: the system's."""
    if os.geteuid() != 0:
        raise SystemExit("creating network namespaces needs root: run this with sudo")
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            raise SystemExit(f"`{tool}` is not installed: install iproute2")
    names = [f"dg{os.getpid()}{end}" for end in "cs"]
    worker, folder = None, tempfile.TemporaryDirectory()
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, ("10.77.0.1/24", "10.77.0.2/24")):
            run("ip", "link", "set", name, "netns", name)
            run("ip", "-n", name, "addr", "add", address, "dev", name)
            run("ip", "-n", name, "link", "set", name, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            if congestion:
                run("ip", "-n", name, "route", "replace", "10.77.0.0/24", "dev", name, "congctl", congestion)
            # The simulator's link loses nothing, so for tls the queue takes all that a step has on its way. While TCP sends a lost packet
            # again, nothing behind it arrives, and the link is idle.
            queue = "1000ms" if tls else "100ms"
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", name, "root", "tbf",
                "rate", f"{mbit}mbit", "burst", f"{burst(mbit)}" if tls else "128kb", "latency", queue)
        join = Path(folder.name) / "join"
        serve = ["serve", "--listen", "10.77.0.2:7443", "--device", "cpu", "--identity", str(Path(folder.name) / "identity")]
        command = serve if tls else ["worker", "--listen", "10.77.0.2:7000", "--expose"]
        worker = subprocess.Popen(
            ["ip", "netns", "exec", names[1], str(BINARY), *command],
            env={**os.environ, "DISTGPIPE_TOKEN": TOKEN}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        worker.stdout.readline()
        if tls:
            join.write_text(subprocess.run([str(BINARY), *serve, "--join-string"], check=True, stdout=subprocess.PIPE, text=True).stdout)
        yield ["ip", "netns", "exec", names[0]], ["--server-file", str(join)] if tls else ["--workers", "10.77.0.2:7000"]
    finally:
        if worker:
            worker.kill()
            worker.wait()
        folder.cleanup()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        time.sleep(0.2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["overhead", "thin", "real", "tls"])
    parser.add_argument("--files", type=Path, help="the pretrained models and the data of real")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps per round, after the warm-up")
    parser.add_argument("--mbit", type=int, default=100, help="rate of the thin link, in Mbit/s")
    parser.add_argument("--mbits", type=lambda text: [int(word) for word in text.split()], default=[10, 100, 1000], help="rates for tls")
    parser.add_argument("--chunks", type=int, default=16, help="micro-batches per batch for tls")
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control for tls; cubic, Linux's default, if not given")
    parser.add_argument("--codecs", type=lambda text: text.split(), help="measure these codecs, of those of the mode, separated by spaces")
    parser.add_argument("--models", type=lambda text: text.split(","), help="measure these models, separated by commas")
    parser.add_argument("--name", default=datetime.date.today().isoformat() + "-links", help="name of the folder under bench/runs")
    options = parser.parse_args()
    if not BINARY.exists():
        raise SystemExit(f"{BINARY.relative_to(HERE.parent)} does not exist: run `cargo build --release` first")
    if (options.mode == "real") != (options.files is not None):
        raise SystemExit("--files belongs to real: give both or neither")
    if options.mode == "tls":
        return over_tls(options)
    rows = []
    link = thin_link(options.mbit) if options.mode != "overhead" else contextlib.nullcontext(([], ["--workers", "processes"]))
    with link as (prefix, workers):
        for round_number in range(options.rounds):
            for model in (m for m, (_, sizes) in MODELS.items() if options.mode in sizes and m in (options.models or MODELS)):
                for codec in options.codecs or CODECS[options.mode]:
                    row = train(model, codec, options, workers, prefix)
                    rows.append({**row, "round": round_number})
                    print(f"round {round_number}  {model:12} {codec:12} {statistics.median(row['step_s']):7.3f} s per step", flush=True)
    folder = HERE / "runs" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    name = options.mode if options.mode != "real" else f"real-{options.mbit}"
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report(rows, options, name)
    (folder / f"{name}.md").write_text(text)
    print(text)


def over_tls(options):
    rows, profiles = [], {}
    for round_number in range(options.rounds):
        for mbit in options.mbits:
            with thin_link(mbit, tls=True, congestion=options.congestion) as (prefix, workers):
                link = link_of(prefix, workers)
                for model in (m for m, (_, sizes) in MODELS.items() if "tls" in sizes and m in (options.models or MODELS)):
                    for codec in options.codecs or CODECS["tls"]:
                        row = train(model, codec, options, workers, prefix)
                        row = {**row, "round": round_number, "mbit": mbit, "link": link, "load": os.getloadavg()[0]}
                        row["predicted_s"] = predicted(row, link, profiles)
                        row["command"] = row["command"].replace(workers[1], "JOIN")
                        rows.append(row)
                        print(f"round {round_number}  {mbit:5} Mbit/s  {model:18} {codec:8} {statistics.median(row['step_s']):7.3f} s per step, "
                              f"predicted {row['predicted_s']:7.3f}, share {share(row):.2f}", flush=True)
    folder = HERE / "runs" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    name = "tls" if options.chunks == 16 else f"tls-{options.chunks}"
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = tls_report(rows, options)
    (folder / f"{name}.md").write_text(text)
    print(text)


# What a packet of 1,448 bytes takes on the link, and a TLS record of 16 KiB.
PACKET, RECORD = 1514 / 1448, (16384 + 22) / 16384


def share(row):
    """The share of the link's rate that the busier direction uses, from the first to the last byte of a step."""
    return row["busier_direction_bytes_a_step"] * PACKET * RECORD / (statistics.median(row["step_s"]) * row["mbit"] * 1e6 / 8)


def tls_report(rows, options):
    loads = [row["load"] for row in rows]
    lines = [
        "# Split learning over TLS at " + ", ".join(f"{mbit}" for mbit in options.mbits) + " Mbit/s",
        "",
        f"Machine: {machine()}; load average during the runs {min(loads):.1f} to {max(loads):.1f}.  ",
        f"Command: `bench/links.py tls --rounds {options.rounds} --steps {options.steps} --mbits '{' '.join(map(str, options.mbits))}' "
        f"--chunks {options.chunks} --congestion {options.congestion}`; every step's time is in the file of the same name that ends in `.jsonl`.",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        lines += [
            "", f"## {model}, {of_model[0]['rows']} rows per batch", "", f"`{of_model[0]['command']}`", "",
            "| link | codec | bytes in the busier direction per step | steps per second | simulated | measured / simulated | share of the link "
            "used | simulated |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for mbit, codec in dict.fromkeys((row["mbit"], row["codec"]) for row in of_model):
            of = [row for row in of_model if (row["mbit"], row["codec"]) == (mbit, codec)]
            step = statistics.median(t for row in of for t in row["step_s"])
            simulated = statistics.median(row["predicted_s"] for row in of)
            busier = of[0]["busier_direction_bytes_a_step"]
            used = busier * PACKET * RECORD / (step * mbit * 1e6 / 8)
            lines.append(f"| {mbit} Mbit/s | {codec} | {busier / 1e6:.3f} MB | {1 / step:.2f} | {1 / simulated:.2f} | {simulated / step:.2f} | "
                         f"{used:.2f} | {used * step / simulated:.2f} |")
    lines += [
        "",
        "The share is that of the busier direction over the whole step, with the headers of Ethernet, IP and TCP (66 bytes for every 1,448) "
        "and TLS. The simulated share is what the schedule allows: nothing comes back before the first micro-batch has crossed the link, and "
        "1F1B limits how many are on their way.",
    ]
    return "\n".join(lines) + "\n"


def report(rows, options, name):
    thin, codecs = options.mode != "overhead", options.codecs or CODECS[options.mode]
    title = f"over a {options.mbit} Mbit/s link" if thin else "on one host, where the link is as fast as memory"
    flags = (" --files FILES" if options.files else "") + (f" --mbit {options.mbit}" if thin else "")
    flags += f" --codecs '{' '.join(options.codecs)}'" if options.codecs else ""
    flags += f" --models '{','.join(options.models)}'" if options.models else ""
    lines = [
        f"# Codecs in training steps, {title}",
        "",
        f"Machine: {machine()}.  ",
        f"Command: `bench/links.py {options.mode} --rounds {options.rounds} --steps {options.steps}{flags}`; "
        f"every step's time is in `{name}.jsonl`.",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {codec: [row for row in rows if (row["model"], row["codec"]) == (model, codec)] for codec in codecs}
        step = {codec: statistics.median(t for row in of[codec] for t in row["step_s"]) for codec in codecs}
        lines += [
            "",
            f"## {model}, {of['raw'][0]['rows']} rows per batch",
            "",
            f"`{of['raw'][0]['command']}`",
            "",
            "| codec | seconds per step, median | speed-up over raw | bytes on the wire per step | encoding per step | decoding per step | overlap with compute | delivered at |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for codec in codecs:
            mean = lambda key: statistics.mean(row[key] for row in of[codec])
            beside = [row["overlap"] for row in of[codec] if row["overlap"] is not None]
            beside = f"{statistics.mean(beside):.0%}" if beside else "–"
            rates = [rate for row in of[codec] for rate in row["delivered_bytes_per_s"] if rate]
            rates = f"{min(rates) / 1e6:.2f} to {max(rates) / 1e6:.2f} MB/s" if rates else "not measured"
            lines.append(
                f"| {codec} | {step[codec]:.3f} | {step['raw'] / step[codec]:.2f} | {mean('wire_bytes_a_step') / 1e6:.2f} MB | "
                f"{mean('encode_ms_a_step'):.0f} ms | {mean('decode_ms_a_step'):.0f} ms | {beside} | {rates} |")
    lines += [
        "",
        "Overlap with compute is the share of the encoding and decoding time during which a stage was computing, from the trace. "
        "*Delivered at* is the lowest and the highest rate that a run reported for either direction, as its receivers timed it.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
