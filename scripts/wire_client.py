#!/usr/bin/env python3
"""A client of `distgpipe worker` that shares no code with it: docs/wire.md in 200 lines of Python.

    DISTGPIPE_TOKEN=… scripts/wire_client.py 127.0.0.1:7000

It runs one training step in split learning, with made-up activations and gradients in the place of the client's layers. It
needs nothing but Python 3.8. The test `wire_page` runs it against the real worker.
"""

import json
import os
import socket
import struct
import sys

VERSION = 3
BUILD = "0.1.0"
HELLO, WELCOME, REFUSE, JOB, READY, ACTIVATION, GRADIENT, COMMAND, REPORT = 1, 2, 3, 4, 5, 8, 9, 11, 12
ABORT, PING, GOODBYE = 14, 15, 16
NAMES = {ACTIVATION: "activation", GRADIENT: "gradient"}

# XXH3, 64 bits: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
P32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def u64(data, at):
    return struct.unpack_from("<Q", data, at)[0]


def fold(a, b):
    product = (a & M64) * (b & M64)
    return (product & M64) ^ (product >> 64)


def avalanche(h):
    h &= M64
    h = (h ^ h >> 37) * 0x165667919E3779F9 & M64
    return h ^ h >> 32


def avalanche64(h):
    h = (h ^ h >> 33) * P64[1] & M64
    h = (h ^ h >> 29) * P64[2] & M64
    return h ^ h >> 32


def xxh3(data, seed=0):
    n = len(data)

    def mix(at, key):
        return fold(u64(data, at) ^ (u64(SECRET, key) + seed & M64), u64(data, at + 8) ^ (u64(SECRET, key + 8) - seed & M64))

    if n == 0:
        return avalanche64(seed ^ u64(SECRET, 56) ^ u64(SECRET, 64))
    if n <= 3:
        combined = data[0] << 16 | data[n >> 1] << 24 | data[n - 1] | n << 8
        flip = struct.unpack_from("<I", SECRET, 0)[0] ^ struct.unpack_from("<I", SECRET, 4)[0]
        return avalanche64(combined ^ (flip + seed & M64))
    if n <= 8:
        seed ^= int.from_bytes(struct.pack("<I", seed & M32), "big") << 32
        first, last = struct.unpack_from("<I", data, 0)[0], struct.unpack_from("<I", data, n - 4)[0]
        h = (last + (first << 32)) ^ ((u64(SECRET, 8) ^ u64(SECRET, 16)) - seed & M64)
        rotated = lambda by: (h << by | h >> 64 - by) & M64
        h = (h ^ rotated(49) ^ rotated(24)) * 0x9FB21C651E98DF25 & M64
        h = (h ^ (h >> 35) + n) * 0x9FB21C651E98DF25 & M64
        return h ^ h >> 28
    if n <= 16:
        low = u64(data, 0) ^ ((u64(SECRET, 24) ^ u64(SECRET, 32)) + seed & M64)
        high = u64(data, n - 8) ^ ((u64(SECRET, 40) ^ u64(SECRET, 48)) - seed & M64)
        return avalanche(n + int.from_bytes(struct.pack("<Q", low), "big") + high + fold(low, high))
    if n <= 128:
        pairs = (n - 1) // 32
        return avalanche(n * P64[0] + sum(mix(16 * i, 32 * i) + mix(n - 16 * (i + 1), 32 * i + 16) for i in range(pairs + 1)))
    if n <= 240:
        h = avalanche(n * P64[0] + sum(mix(16 * i, 16 * i) for i in range(8)))
        return avalanche(h + sum(mix(16 * i, 16 * (i - 8) + 3) for i in range(8, n // 16)) + mix(n - 16, 119))
    words = struct.unpack("<24Q", SECRET)
    secret = struct.pack("<24Q", *((w - seed if i % 2 else w + seed) & M64 for i, w in enumerate(words)))
    acc = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]]

    def accumulate(at, key):
        for i in range(8):
            value = u64(data, at + 8 * i)
            keyed = value ^ u64(secret, key + 8 * i)
            acc[i ^ 1] = acc[i ^ 1] + value & M64
            acc[i] = acc[i] + (keyed & M32) * (keyed >> 32) & M64

    for stripe in range((n - 1) // 64):
        accumulate(64 * stripe, 8 * (stripe % 16))
        if stripe % 16 == 15:
            acc[:] = [(a ^ a >> 47 ^ u64(secret, 128 + 8 * i)) * P32[0] & M64 for i, a in enumerate(acc)]
    accumulate(n - 64, 121)
    merged = sum(fold(acc[2 * i] ^ u64(secret, 11 + 16 * i), acc[2 * i + 1] ^ u64(secret, 19 + 16 * i)) for i in range(4))
    return avalanche(n * P64[0] + merged)


def frame(kind, body=b"", step=0, micro_batch=0, worker_or_from=0, to=0, dims=None, sequence=0, acknowledged=0):
    # F32, contiguous, raw.
    tensor = struct.pack("<4B", 1, 1, 1, len(dims)) if dims else bytes(4)
    header = struct.pack("<4sHBB", b"\x89DGP", VERSION, kind, 0)
    header += struct.pack("<QIIIHH", step, micro_batch, worker_or_from, to, 0, 1) + tensor + bytes(4)
    header += struct.pack("<8Q", *(list(dims or []) + [0] * 8)[:8])
    header += struct.pack("<QQQ", sequence, acknowledged, len(body))
    checksum = xxh3(body, xxh3(header + bytes(8)))
    return header + struct.pack("<Q", checksum) + body


def text(value):
    return struct.pack("<H", len(value.encode())) + value.encode()


def texts(body):
    found = []
    while body:
        (length,) = struct.unpack_from("<H", body)
        found.append(body[2 : 2 + length].decode())
        body = body[2 + length :]
    return found


class Link:
    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.sequence = self.received = 0

    def handshake(self, kind, body):
        self.socket.sendall(frame(kind, body))

    def send(self, kind, body=b"", **fields):
        self.sequence += 1
        self.socket.sendall(frame(kind, body, sequence=self.sequence, acknowledged=self.received, **fields))

    def exactly(self, count):
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            if not piece:
                sys.exit("the worker has closed the connection")
            data += piece
        return data

    def receive(self, *kinds):
        """The next frame of one of these kinds: its header and its body. Heartbeats are passed over."""
        while True:
            header = self.exactly(136)
            magic, version, kind = struct.unpack_from("<4sHB", header)
            if (magic, version) != (b"\x89DGP", VERSION):
                sys.exit(f"the worker speaks version {version}, this client version {VERSION}")
            body = self.exactly(u64(header, 120))
            if u64(header, 128) != xxh3(body, xxh3(header[:128] + bytes(8))):
                sys.exit("a frame is damaged")
            sequence = u64(header, 104)
            if sequence:
                assert sequence == self.received + 1, (sequence, self.received)
                self.received = sequence
            if kind == REFUSE:
                sys.exit("refused: " + texts(body)[0])
            if kind == ABORT:
                worker, phase, message = texts(body)
                sys.exit(f"{worker} failed while {phase}: {message}")
            if kind in kinds:
                return header, body
            assert kind == PING, kind


PLAN = """distgpipe plan 1
mode train
partitions 3
micro_batches 1
placement client server client
client: 0F0 0F0>1 2F0<1 2F0 2B0 2B0>1 0B0<1 0B0
server: 1F0<0 1F0 1F0>2 1B0<2 1B0 1B0>0
"""

# Of the two hidden layers at the server: their input and output have as many columns as a hidden layer.
ROWS, COLUMNS = 3, 5


def job(address):
    return {
        "worker": 1,
        "recipe": {"name": "mlp", "settings": {"hidden": [COLUMNS] * 3, "input": [1, 8, 8], "classes": 10, "dropout": 0.0}},
        "balance": [1, 2, 1],
        "plan": PLAN,
        "replicas": 1,
        "seed": 0,
        "optim": {"sgd": {"momentum": 0.9, "weight_decay": 0.0, "nesterov": False}},
        "loss": "cross_entropy",
        "codecs": {"forward": "raw", "backward": "raw", "links": [], "warm_up_steps": 0, "evaluate": True},
        "devices": "cpu",
        "threads": 1,
        "channels_last": False,
        "precision": "fp32",
        "trace": False,
        "timeouts": {"stall_s": 300.0, "silence_s": 20.0, "connect_s": 20.0, "reconnect_s": 0.0},
        "faults": "",
        "addresses": [None, address],
    }


def main(address, token):
    link = Link(address)
    role = struct.pack("<BI", 0, 0)
    link.handshake(HELLO, os.urandom(16) + bytes.fromhex(token) + role + struct.pack("<QQ", 0, 1) + text(BUILD))
    _, welcome = link.receive(WELCOME)
    print("welcome from distgpipe", texts(welcome[13:])[0], flush=True)
    link.handshake(JOB, json.dumps(job(address)).encode())
    link.receive(READY)
    print("ready", flush=True)
    step = {"number": 0, "learned": 0, "purpose": "train", "rows": ROWS, "all_micro_batches": 1, "first": 0}
    step.update(micro_batches=1, batches=1, fresh=True, after={"update": {"learning_rate": 0.1}}, samples=[], capture=False)
    link.send(COMMAND, json.dumps({"step": step}).encode(), worker_or_from=1)
    ones = struct.pack(f"<{ROWS * COLUMNS}f", *[1.0] * (ROWS * COLUMNS))
    link.send(ACTIVATION, ones, worker_or_from=0, to=1, dims=[ROWS, COLUMNS])
    link.send(GRADIENT, ones, worker_or_from=2, to=1, dims=[ROWS, COLUMNS])
    for wanted in (ACTIVATION, GRADIENT):
        header, body = link.receive(wanted)
        dims = struct.unpack_from(f"<{header[35]}Q", header, 40)
        print(NAMES[wanted], *dims, "of", len(body), "bytes", flush=True)
    _, report = link.receive(REPORT)
    print("report of", len(json.loads(report)["phases"]), "phases", flush=True)
    link.send(COMMAND, b'"finish"', step=1, worker_or_from=1)
    link.send(GOODBYE)
    link.receive(GOODBYE)
    # The last word is an acknowledgement, so that the worker does not wait for this end to connect again.
    link.socket.sendall(frame(PING, b"0 0 idle", acknowledged=link.received))
    print("goodbye")


if __name__ == "__main__":
    main(sys.argv[1], os.environ["DISTGPIPE_TOKEN"])
