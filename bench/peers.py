#!/usr/bin/env python3
"""Measures the alternatives to distgpipe on this machine's CPU, all doing the same work.

The work: training steps of torchvision's MobileNetV2 on 224×224 images, a batch of 32 in 4 micro-batches, SGD with a
learning rate of 0.005; two partitions, where there are partitions, and one compute thread per worker.

torchgpipe has one worker thread per device, and a machine has one CPU device, so its two partitions take turns on one core.
`--threads 2` lets its operators use both cores; quote that figure too when comparing torchgpipe with something on two cores.

usage: bench/peers.py [--only NAME] [--steps N] [--json] ...      needs: bench/requirements.txt

Each measurement runs in its own process, one after the other, so that its peak memory is not affected by the others. Instead
of a table, --json prints a line per measurement with the time of every step and the peak resident memory (VmHWM) of every
process that took part, in bytes.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

NAMES = [
    "one-process",
    "torchgpipe-except_last",
    "torchgpipe-always",
    "torchgpipe-never",
    "pipelining-gpipe",
    "pipelining-1f1b",
    "data-parallel",
]
# Layers in the first of two partitions, out of 23; bench/README.md explains why 4.
PIPELINING_CUT = 4
LEARNING_RATE = 0.005
CLASSES = 10


def layers():
    """MobileNetV2 as a flat sequence of 23 layers, the form that both pipeline libraries accept."""
    import torch
    from torchvision.models import mobilenet_v2

    torch.manual_seed(0)
    model = mobilenet_v2(num_classes=CLASSES, dropout=0.0)
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), *model.classifier]
    return torch.nn.Sequential(*model.features, *head).train()


def batch_of(options):
    import torch

    torch.manual_seed(1)
    return torch.randn(options.batch, 3, 224, 224), torch.randint(CLASSES, (options.batch,))


def timed(step, options):
    """The duration in seconds of each step after the warm-up."""
    times = []
    for index in range(options.warmup + options.steps):
        start = time.perf_counter()
        step()
        if index >= options.warmup:
            times.append(time.perf_counter() - start)
    return times


def peak_rss_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def training_step(model, options):
    """A function that runs one step (zero gradients, forward, backward, update) of a model that is called like a module."""
    import torch

    x, labels = batch_of(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def one_process(options):
    """Plain PyTorch with the whole batch at once: the baseline for a pipeline of two."""
    model = layers()
    return timed(training_step(model, options), options), [peak_rss_bytes()], [len(model)]


def torchgpipe(options, checkpoint):
    """One process, one worker thread (both partitions are on the one CPU device), balanced by torchgpipe's own profiler unless --cut is given."""
    import torch
    from torchgpipe import GPipe
    from torchgpipe.balance import balance_by_time

    model = layers()
    if options.cut:
        balance = [options.cut, len(model) - options.cut]
    else:
        sample = batch_of(options)[0][: options.batch // options.chunks]
        balance = balance_by_time(2, model, sample, device=torch.device("cpu"), timeout=8.0)
    pipeline = GPipe(model, balance, devices=["cpu", "cpu"], chunks=options.chunks, checkpoint=checkpoint)
    return timed(training_step(pipeline, options), options), [peak_rss_bytes()], balance


def in_two_processes(rank_of, options, *arguments):
    """Runs both ranks in processes connected by Gloo. A step ends when both have finished it."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting_file = os.path.join(folder, "meet")
        ranks = [context.Process(target=rank_of, args=(rank, options, meeting_file, results, *arguments)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(f"the ranks exited with {[process.exitcode for process in ranks]}")
    by_rank = dict(results.get() for _ in ranks)
    times = [max(pair) for pair in zip(by_rank[0]["times"], by_rank[1]["times"])]
    return times, [by_rank[rank]["peak"] for rank in range(2)], by_rank[0]["balance"]


def data_parallel_rank(rank, options, meeting_file, results):
    """DistributedDataParallel: each process has the whole model and half of the batch, without micro-batches."""
    import torch
    import torch.distributed as distributed

    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    distributed.init_process_group("gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=2)
    model = layers()
    balance = [len(model)]
    model = torch.nn.parallel.DistributedDataParallel(model)
    x, labels = (part.chunk(2)[rank] for part in batch_of(options))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        distributed.barrier()

    results.put((rank, {"times": timed(step, options), "peak": peak_rss_bytes(), "balance": balance}))
    distributed.destroy_process_group()


def pipelining_rank(rank, options, meeting_file, results, schedule):
    """torch.distributed.pipelining: one process per partition."""
    import torch
    import torch.distributed as distributed
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    distributed.init_process_group("gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=2)
    model = layers()
    cut = options.cut or PIPELINING_CUT
    balance = [cut, len(model) - cut]
    # Drop the other half before measuring, so that only one partition's memory counts.
    part = model[:cut] if rank == 0 else model[cut:]
    del model
    x, labels = batch_of(options)
    optimizer = torch.optim.SGD(part.parameters(), lr=LEARNING_RATE)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    runner = kind(stage, options.chunks, loss_fn=torch.nn.functional.cross_entropy)

    def step():
        optimizer.zero_grad()
        if rank == 0:
            runner.step(x)
        else:
            runner.step(target=labels)
        optimizer.step()
        distributed.barrier()

    results.put((rank, {"times": timed(step, options), "peak": peak_rss_bytes(), "balance": balance}))
    distributed.destroy_process_group()


def measure(name, options):
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    if name == "one-process":
        times, peaks, balance = one_process(options)
    elif name.startswith("torchgpipe-"):
        times, peaks, balance = torchgpipe(options, name[len("torchgpipe-"):])
    elif name == "data-parallel":
        times, peaks, balance = in_two_processes(data_parallel_rank, options)
    else:
        times, peaks, balance = in_two_processes(pipelining_rank, options, name[len("pipelining-"):])
    return {
        "name": name,
        "samples_per_s_median": options.batch / statistics.median(times),
        "samples_per_s_best": options.batch / min(times),
        "step_s": times,
        "peak_rss_bytes": peaks,
        "balance": balance,
        "batch": options.batch,
        "chunks": options.chunks,
        "threads": options.threads,
        "torch": torch.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NAMES, metavar="NAME", help="one of: " + ", ".join(NAMES))
    parser.add_argument("--steps", type=int, default=5, help="steps to time, after the warm-up (default 5)")
    parser.add_argument("--warmup", type=int, default=2, help="warm-up steps (default 2)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches per batch (default 4)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per process (default 1)")
    parser.add_argument("--cut", type=int, help=f"layers in the first partition, 1 to 22 (default: what torchgpipe's profiler finds, or {PIPELINING_CUT} for pipelining)")
    parser.add_argument("--json", action="store_true", help="print a JSON line per measurement")
    options = parser.parse_args()
    if min(options.steps, options.batch, options.chunks, options.threads) < 1 or options.warmup < 0 or not 1 <= (options.cut or 1) <= 22:
        parser.error("--steps, --batch, --chunks and --threads must be at least 1, --warmup at least 0, and --cut 1 to 22")

    # Set the number of compute threads before any library is loaded, whatever its own default is.
    os.environ.update(OMP_NUM_THREADS=str(options.threads), MKL_NUM_THREADS=str(options.threads), GLOO_SOCKET_IFNAME="lo")
    if options.only:
        result = measure(options.only, options)
        if options.json:
            print(json.dumps(result), flush=True)
        else:
            peaks = " + ".join(f"{peak / 1e9:.2f}" for peak in result["peak_rss_bytes"])
            print(f"{result['name']:24} {options.threads} threads {result['samples_per_s_median']:7.2f} samples/s (best {result['samples_per_s_best']:.2f})"
                  f"  peak {peaks} GB  balance {result['balance']}", flush=True)
        return
    failed = [name for name in NAMES if subprocess.run([sys.executable, *sys.argv, "--only", name]).returncode]
    if failed:
        sys.exit("failed: " + ", ".join(failed))


if __name__ == "__main__":
    main()
