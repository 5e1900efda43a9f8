#!/usr/bin/env python3
"""Measures `distgpipe bandwidth --workers 2` beside what the host allows, and writes the results to bench/runs/.

Each round measures iperf3's single stream over loopback, one core's AES-256-GCM in records of 16 KiB (`openssl speed`), and raw
tensors over plain TCP and over TLS through a server. A core that encrypts and also copies to the socket can at best deliver
1 / (1/iperf3 + 1/AES-GCM), so TLS is compared with that, too. Ratios are medians of the rounds' own ratios.

usage: bench/loopback.py [--rounds 7] [--sizes 256KiB,2MiB,16MiB] [--name NAME] [--binary FILE]      needs: iperf3, openssl, a release build
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

from run import BINARY, HERE, machine

PORT = "5287"


def printed(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def iperf3(seconds):
    server = subprocess.Popen(["iperf3", "--server", "--one-off", "--bind", "127.0.0.1", "--port", PORT], stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.3)
        result = json.loads(printed("iperf3", "--client", "127.0.0.1", "--port", PORT, "--time", str(seconds), "--json"))
    finally:
        server.kill()
        server.wait()
    return result["end"]["sum_received"]["bits_per_second"] / 8


def aes_gcm():
    text = printed("openssl", "speed", "-seconds", "1", "-bytes", "16384", "-evp", "aes-256-gcm")
    return float(text.split()[-1].rstrip("k")) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="256KiB,2MiB,16MiB")
    parser.add_argument("--name", default=datetime.date.today().isoformat() + "-loopback", help="name of the folder under bench/runs")
    parser.add_argument("--binary", type=Path, default=BINARY)
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        measured = json.loads(printed(str(options.binary), "bandwidth", "--workers", "2", "--codec", "raw", "--sizes", options.sizes, "--json"))
        rounds.append({"load": os.getloadavg()[0], "iperf3": iperf3(1), "aes_gcm": aes_gcm(), "links": measured["links"]})
        print(json.dumps({key: value for key, value in rounds[-1].items() if key != "links"}), flush=True)
    folder = HERE / "runs" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "loopback.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    text = report(rounds, options)
    (folder / "loopback.md").write_text(text)
    print(text)


def report(rounds, options):
    middle = lambda values: statistics.median(values)
    loads = [line["load"] for line in rounds]
    lines = [
        "# Loopback: plain TCP and TLS beside iperf3 and AES-GCM",
        "",
        f"Machine: {machine()}; load average {min(loads):.1f} to {max(loads):.1f}.  ",
        f"Command: `bench/loopback.py --rounds {options.rounds} --sizes {options.sizes}`; every figure is in `loopback.jsonl`.",
        "",
        f"Medians: iperf3, one stream {middle(line['iperf3'] for line in rounds) / 1e9:.2f} GB/s; "
        f"AES-256-GCM on one core {middle(line['aes_gcm'] for line in rounds) / 1e9:.2f} GB/s.",
        "",
        "| transport | tensor | direction | GB/s | ratio to iperf3 | ratio to AES-GCM and iperf3 on one core | ratio to AES-GCM |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, link in enumerate(rounds[0]["links"]):
        for index, row in enumerate(link["measurements"]):
            for way in ("there", "back"):
                rates = [line["links"][number]["measurements"][index][way]["tensor_bytes_per_s"] for line in rounds]
                to = lambda limit: middle(rate / limit(line) for rate, line in zip(rates, rounds))
                plain = f"{to(lambda line: line['iperf3']):.2f}"
                both = f"{to(lambda line: 1 / (1 / line['iperf3'] + 1 / line['aes_gcm'])):.2f}"
                cipher = f"{to(lambda line: line['aes_gcm']):.2f}"
                encrypted = link["transport"] == "tls"
                lines.append(f"| {link['transport'].upper()} | {row['tensor_bytes'] >> 10} KiB | {way} | {middle(rates) / 1e9:.2f} | {plain} | "
                             f"{both if encrypted else '–'} | {cipher if encrypted else '–'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
