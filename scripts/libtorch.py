#!/usr/bin/env python3
"""Makes `.libtorch` in this checkout a link to libtorch 2.11.0, downloading it only if there is none.

It uses the first of these that works:
  1. $LIBTORCH, if it is set: a directory with lib/ and include/. An unusable one is an error and is never skipped.
  2. The directory that `.libtorch` already points to. (Remove the link to choose again.)
  3. The torch 2.11.0 package of the python3 that runs this script. To build against a CUDA libtorch, run
     `pip install torch==2.11.0` in a virtual environment, activate it, and run `make setup`.
  4. The per-user cache, ${XDG_CACHE_HOME:-~/.cache}/distgpipe/libtorch-2.11.0-<machine>.
  5. The torch wheel from pip's package index (530 MB). Its CPU half goes into that cache (about 500 MB).

With --cuda (`make setup CUDA=1`), only a libtorch with CUDA will do: of the first three sources, or, instead of the last two, the
torch 2.11.0 package in a virtual environment of its own in the cache, where pip installs it with all of CUDA (some 5 GB).

This script downloads the wheel itself, because pip starts over after an interruption and this script resumes. pip only
says where the wheel is. Every wheel is pinned by its SHA-256.

Needs Python 3.8 or later, and pip only for step 5. distgpipe itself needs no Python.
"""
import contextlib
import errno
import hashlib
import http.client
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

VERSION = "2.11.0"
CHECKOUT = Path(__file__).resolve().parent.parent
LINK = CHECKOUT / ".libtorch"

# Per machine: (requirement, platform tag, wheel, SHA-256, folder inside the wheel, libraries to take from it).
# The list has libtorch_cpu.so and the libraries that it needs. It looks for them in its own folder (its RPATH ends in
# $ORIGIN). It needs the CUDA runtime and CUPTI even without a GPU; both load without a driver.
# The aarch64 list was read from the wheel's ELF headers and has not been tried on such a machine.
WHEELS = {
    "x86_64": [
        ("torch==2.11.0", "manylinux_2_28_x86_64", "torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl",
         "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a", "torch/lib/",
         ["libtorch_cpu.so", "libc10.so", "libgomp.so.1"]),
        ("nvidia-cuda-runtime==13.0.96", "manylinux2014_x86_64",
         "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
         "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548", "nvidia/cu13/lib/", ["libcudart.so.13"]),
        ("nvidia-cuda-cupti==13.0.85", "manylinux_2_25_x86_64",
         "nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_x86_64.whl",
         "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8", "nvidia/cu13/lib/", ["libcupti.so.13"]),
    ],
    "aarch64": [
        ("torch==2.11.0", "manylinux_2_28_aarch64", "torch-2.11.0-cp311-cp311-manylinux_2_28_aarch64.whl",
         "d91aac77f24082809d2c5a93f52a5f085032740a1ebc9252a7b052ef5a4fddc6", "torch/lib/",
         ["libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libgfortran.so.5", "libarm_compute.so",
          "libarm_compute_graph.so", "libnvpl_blas_core.so.0", "libnvpl_blas_lp64_gomp.so.0",
          "libnvpl_lapack_core.so.0", "libnvpl_lapack_lp64_gomp.so.0"]),
        ("nvidia-cuda-runtime==13.0.96", "manylinux2014_aarch64",
         "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
         "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55", "nvidia/cu13/lib/", ["libcudart.so.13"]),
        ("nvidia-cuda-cupti==13.0.85", "manylinux_2_25_aarch64",
         "nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_aarch64.whl",
         "796bd679890ee55fb14a94629b698b6db54bcfd833d391d5e94017dd9d7d3151", "nvidia/cu13/lib/", ["libcupti.so.13"]),
    ],
}

# torch-sys links -ltorch_cpu -ltorch -lc10 -lgomp. The wheel's own libtorch.so is an empty library that pulls in
# libtorch_cuda.so, so a CPU directory needs a different one. We use a linker script (GNU ld, gold, lld and mold read it)
# rather than an empty library, because it needs no compiler, is the same on every machine, and adds nothing to load at run
# time.
LIBTORCH_SO = "/* libtorch without CUDA: everything is in libtorch_cpu. */\nINPUT(-ltorch_cpu)\n"

# The wheel, what is extracted from it, and some margin.
DISK_BYTES_NEEDED = 1_150_000_000
# The packages with all of CUDA, and what pip keeps while it installs them.
CUDA_DISK_BYTES_NEEDED = 12_000_000_000
ATTEMPTS_WITHOUT_PROGRESS_MAX = 5
TIMEOUT_S = 60
STAMP = ".complete"


class Trouble(Exception):
    """A problem that the user can act on. Its text is the message shown."""


class Refused(Exception):
    """The server rejected the request, or its certificate is not trusted. pip has its own settings and may still succeed."""


def say(text):
    print(f"libtorch: {text}", flush=True)


# --- Is this directory a libtorch 2.11.0? ------------------------------------------------------------------------------


def version_of(root):
    """The version of libtorch in a directory, or None. libtorch's archives contain build-version; all contain the headers."""
    with contextlib.suppress(OSError):
        return (root / "build-version").read_text().strip().split("+")[0]
    for header in ("include/torch/headeronly/version.h", "include/torch/csrc/api/include/torch/version.h"):
        with contextlib.suppress(OSError):
            text = (root / header).read_text()
            numbers = [re.search(rf"#define TORCH_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
            if all(numbers):
                return ".".join(number.group(1) for number in numbers)
    return None


def fault_of(root):
    """Why `root` cannot be used, or None if it can."""
    if not root.is_dir():
        return "is not a directory"
    for name in ("lib/libtorch_cpu.so", "lib/libtorch.so", "lib/libc10.so", "include/torch/csrc/api/include/torch/torch.h"):
        if not (root / name).exists():
            return f"has no {name}"
    version = version_of(root)
    if version != VERSION:
        return f"contains libtorch {version or 'of an unknown version'}, not {VERSION}"
    return None


def loading_fault_of(root):
    """Why the dynamic loader cannot load libtorch_cpu.so (a missing library, an old libc), or None if it can. Runs in
    another process, because half a gigabyte of static initializers may also crash."""
    probe = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", probe, str(root / "lib/libtorch_cpu.so")],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, universal_newlines=True)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"the loader exited with status {done.returncode}"])[-1]


# --- The five sources -------------------------------------------------------------------------------------------------------


def has_cuda(root):
    return (root / "lib/libtorch_cuda.so").exists()


def from_environment():
    value = os.environ.get("LIBTORCH")
    if not value:
        return None
    root = Path(value).expanduser()
    # torch-sys resolves a relative LIBTORCH in its own source folder, where it means nothing.
    if not root.is_absolute():
        raise Trouble(f"LIBTORCH is {value!r}, which is a relative path: set it to an absolute one.")
    fault = fault_of(root) or loading_fault_of(root)
    if fault:
        raise Trouble(f"LIBTORCH is {value}, which cannot be used: it {fault}. Set it to the directory of a libtorch {VERSION}, or unset it.")
    return root


def from_link():
    return LINK if fault_of(LINK) is None else None


def from_python():
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").split("+")[0] != VERSION:
            return None
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return None
        root = Path(list(spec.submodule_search_locations)[0])
        fault = fault_of(root) or loading_fault_of(root)
        if fault is None:
            return root
        say(f"not using the installed torch at {root}: {fault}")
    return None


def from_virtual_environment():
    """The torch package with CUDA in a virtual environment in the cache, made at the first call."""
    cache = cache_folder()
    folder = cache / f"torch-cuda-{VERSION}"
    package = lambda: next(iter(folder.glob("lib/python3*/site-packages/torch")), None)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise Trouble(f"cannot create the cache folder {cache} ({e.strerror}): set XDG_CACHE_HOME to a folder you can write to.")
    with locked(cache / "lock"):
        if not (folder / STAMP).exists():
            free = shutil.disk_usage(str(cache)).free
            if free < CUDA_DISK_BYTES_NEEDED:
                raise Trouble(f"{cache} has {free // 10**6} MB free, and about {CUDA_DISK_BYTES_NEEDED // 10**6} MB are needed:"
                              " free some space, or set XDG_CACHE_HOME to a folder on a larger disk.")
            say(f"installing torch {VERSION} with CUDA into {folder}; this downloads about 3 GB, once")
            for command, trouble in (
                ([sys.executable, "-m", "venv", "--clear", str(folder)],
                 f"{sys.executable} cannot make a virtual environment: install venv (Debian, Ubuntu: python3-venv)"),
                ([str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", f"torch=={VERSION}"],
                 f"pip could not install torch {VERSION}: see its message above"),
            ):
                if subprocess.run(command).returncode != 0:
                    raise Trouble(f"{trouble}, or install torch {VERSION} yourself and activate its environment.")
            (folder / STAMP).write_text(VERSION)
    root = package()
    fault = "has no package torch" if root is None else fault_of(root) or loading_fault_of(root)
    if fault is None and not has_cuda(root):
        fault = "has a torch without CUDA, which is what the package index offers for this machine"
    if fault:
        raise Trouble(f"{folder} {fault}: remove it and try again, or set LIBTORCH to the directory of a libtorch {VERSION} with CUDA.")
    return root


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore a relative path.
    if not base or not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base) / "distgpipe"


def from_cache_or_index():
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    if sys.platform != "linux" or machine not in WHEELS:
        raise Trouble(f"there is no prebuilt libtorch {VERSION} for {sys.platform} on {machine}: install one and set LIBTORCH to its directory.")
    cache = cache_folder()
    target = cache / f"libtorch-{VERSION}-{machine}"
    if is_complete(target, machine):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise Trouble(f"cannot create the cache folder {cache} ({e.strerror}): set XDG_CACHE_HOME to a folder you can write to.")
    with locked(cache / "lock"):
        # Another checkout may have completed it while we waited for the lock.
        if not is_complete(target, machine):
            build(target, machine)
    return target


def recipe(machine):
    """A hash of everything that determines the content of a cached directory. If it changes, the directory is stale."""
    return hashlib.sha256(repr((WHEELS[machine], LIBTORCH_SO)).encode()).hexdigest()


def is_complete(target, machine):
    with contextlib.suppress(OSError):
        return (target / STAMP).read_text() == recipe(machine) and fault_of(target) is None
    return False


@contextlib.contextmanager
def locked(path):
    """Allows one setup at a time per cache. On a file system without locks, two at once only waste a download, because
    the directory is renamed into place and every wheel is checked."""
    import fcntl

    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EAGAIN, errno.EACCES):
                say("another setup is using the same cache; waiting for it to finish")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- Building the CPU directory ------------------------------------------------------------------------------------------


def build(target, machine):
    downloads = target.parent / "downloads"
    downloads.mkdir(exist_ok=True)
    already = sum(path.stat().st_size for path in downloads.iterdir() if path.is_file())
    free = shutil.disk_usage(str(downloads)).free
    if free + already < DISK_BYTES_NEEDED:
        raise Trouble(f"{target.parent} has {free // 10**6} MB free, and about {(DISK_BYTES_NEEDED - already) // 10**6} MB are needed:"
                      " free some space, or set XDG_CACHE_HOME to a folder on a larger disk.")
    say(f"downloading the torch {VERSION} wheel and two small ones, 545 MB in total; this happens once and resumes if interrupted")
    wheels = [fetch_wheel(downloads, *wheel[:4]) for wheel in WHEELS[machine]]

    for leftover in target.parent.glob(".making-*"):
        shutil.rmtree(str(leftover), ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=str(target.parent)))
    try:
        making.chmod(0o755)
        (making / "lib").mkdir()
        say("unpacking")
        for path, (_, _, _, _, folder, libraries) in zip(wheels, WHEELS[machine]):
            unpack(path, folder, libraries, making)
        (making / "lib/libtorch.so").write_text(LIBTORCH_SO)
        # For -lgomp with compilers that have no libgomp of their own (clang).
        (making / "lib/libgomp.so").symlink_to("libgomp.so.1")
        (making / "build-version").write_text(VERSION + "\n")
        fault = fault_of(making)
        if fault:
            raise Trouble(f"the directory made from the wheels {fault}: please report this as a bug, and name your operating system.")
        fault = loading_fault_of(making)
        if fault:
            raise Trouble(f"libtorch was unpacked but does not load on this machine ({fault}): install a libtorch {VERSION} built for it, and set LIBTORCH to its directory.")
        (making / STAMP).write_text(recipe(machine))
        if target.exists():
            shutil.rmtree(str(target))
        making.rename(target)
    finally:
        shutil.rmtree(str(making), ignore_errors=True)
    shutil.rmtree(str(downloads), ignore_errors=True)


def unpack(wheel, folder, libraries, root):
    with zipfile.ZipFile(str(wheel)) as archive:
        for name in archive.namelist():
            if name.startswith(folder) and name[len(folder):] in libraries:
                copy_member(archive, name, root / "lib" / name[len(folder):])
            elif name.startswith("torch/include/") and not name.endswith("/"):
                copy_member(archive, name, root / name[len("torch/"):])


def copy_member(archive, name, destination):
    destination.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(name) as source, open(str(destination), "wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)


# --- Downloading one wheel --------------------------------------------------------------------------------------------------


def fetch_wheel(downloads, requirement, tag, name, sha256):
    """The path of the wheel in `downloads`, after downloading it (or resuming, or finding it there) and checking its hash."""
    path, part = downloads / name, downloads / (name + ".part")
    if path.exists() and sha256_of(path) == sha256:
        return path
    resumed = part.exists()
    url = ask_pip(requirement, tag, name, downloads)
    if url is None:
        part = downloads / name
    else:
        try:
            fetch(url, part, name)
        except Refused as e:
            say(f"{e}; downloading with pip instead, which cannot resume")
            ask_pip(requirement, tag, name, downloads, download=True)
            part = downloads / name
    got = sha256_of(part)
    if got != sha256:
        part.unlink()
        if resumed:
            say(f"{name}: the partial download from an earlier attempt was corrupt; deleting it and downloading again")
            return fetch_wheel(downloads, requirement, tag, name, sha256)
        raise Trouble(f"{name} has SHA-256 {got}, but {sha256} was expected. The file has been deleted: check what your package index serves, or try again.")
    if part != path:
        part.rename(path)
    return path


def sha256_of(path):
    digest = hashlib.sha256()
    with open(str(path), "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def ask_pip(requirement, tag, name, downloads, download=False):
    """The wheel's URL in pip's package index. pip has no command for that (`install --dry-run --report` downloads the
    wheel first, up to pip 23 at least), but `download -vv` lists the links it sees before it downloads one. Returns None if
    pip found the wheel elsewhere (in a local folder) or was asked to download it: it is then in `downloads`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-vv", "--no-deps", "--no-cache-dir",
               "--only-binary=:all:", "--python-version", "3.11", "--platform", tag, "--dest", str(downloads), requirement]
    # A new session, so that Ctrl-C reaches pip only once, through us. The default SIGINT handler, because a background job
    # of a shell script ignores SIGINT and its children inherit that.
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, errors="replace",
                           env=dict(os.environ, PYTHONUNBUFFERED="1", COLUMNS="2000", NO_COLOR="1"), start_new_session=True,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    address = re.compile(r"Found link (https?://\S+?/" + re.escape(name) + r")(?:[#?]\S*)?\s")
    unreachable, errors = False, []
    try:
        for line in pip.stdout:
            found = address.search(line)
            # pip masks passwords in its output; a masked URL is of no use.
            if found and not download and "****" not in found.group(1):
                return found.group(1)
            if "No module named pip" in line:
                raise Trouble(f"{sys.executable} has no pip: install it (Debian, Ubuntu: python3-pip), or set LIBTORCH to the directory of a libtorch {VERSION}.")
            if "connection broken" in line or "Could not fetch URL" in line:
                if not unreachable:
                    unreachable = True
                    say("the package index does not answer; pip keeps trying")
            if "ERROR: " in line:
                errors.append(line.split("ERROR: ", 1)[1].strip())
        if pip.wait() != 0:
            if unreachable:
                raise Trouble(f"cannot reach the package index: connect to a network (or set the proxy or pip's index-url) and try again, or set LIBTORCH to the directory of a libtorch {VERSION}.")
            reason = errors[0] if errors else f"it exited with status {pip.returncode}"
            raise Trouble(f"pip could not download {requirement}: {reason}. Upgrade pip, check its index, or set LIBTORCH to the directory of a libtorch {VERSION}.")
    finally:
        if pip.poll() is None:
            # SIGINT lets pip remove its temporary files.
            pip.send_signal(signal.SIGINT)
            try:
                pip.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                pip.kill()
                pip.wait()
        pip.stdout.close()
    if not (downloads / name).exists():
        raise Trouble(f"pip downloaded a different wheel for {requirement} than {name}: check what your package index serves, or set LIBTORCH to the directory of a libtorch {VERSION}.")
    return None


def opener():
    """A urllib opener that also uses the certificates and the proxy configured for pip."""
    bundle = next((os.environ[name] for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE") if os.environ.get(name)), None)
    context = ssl.create_default_context()
    if bundle and os.path.isdir(bundle):
        context.load_verify_locations(capath=bundle)
    elif bundle and os.path.exists(bundle):
        context.load_verify_locations(cafile=bundle)
    handlers = [urllib.request.HTTPSHandler(context=context)]
    proxy = os.environ.get("PIP_PROXY")
    if proxy:
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    return urllib.request.build_opener(*handlers)


def fetch(url, part, name):
    """Downloads to `part` until it is complete. After a lost connection, resumes at the last byte."""
    connection, progress, failures = opener(), Progress(name), 0
    while True:
        have = part.stat().st_size if part.exists() else 0
        try:
            if fetch_rest(connection, url, part, have, progress):
                return
            trouble = "the connection ended early"
        except urllib.error.HTTPError as e:
            if e.code == 416:  # Nothing after the last byte: complete or too long. The SHA-256 check decides.
                progress.end()
                return
            if e.code in (401, 403, 404, 407):
                raise Refused(f"{urlsplit(url).hostname} answered {e.code}")
            trouble = f"the server answered {e.code}"
        except OSError as e:
            if e.errno == errno.ENOSPC:
                raise Trouble(f"the disk that holds {part.parent} is full: free some space and try again; the download will resume.")
            reason = getattr(e, "reason", e)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise Refused("the server's certificate is not trusted here")
            trouble = str(reason)
        except http.client.HTTPException as e:
            trouble = str(e) or type(e).__name__
        now = part.stat().st_size if part.exists() else 0
        failures = 1 if now > have else failures + 1
        if failures >= ATTEMPTS_WITHOUT_PROGRESS_MAX:
            raise Trouble(f"could not download {name} ({trouble}): try again when the network is back; the download will resume.")
        progress.end()
        say(f"{trouble}; retrying in {2 ** failures // 2} s")
        time.sleep(2 ** failures // 2)


def fetch_rest(connection, url, part, have, progress):
    """Makes one request for what is missing. Returns whether the file is complete, as far as the server says."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "distgpipe-setup"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with connection.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as response:
        resumes = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if not resumes:
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        # Unbuffered, so that received data is in the file even if this process is killed.
        with open(str(part), "ab" if resumes else "wb", buffering=0) as out:
            for block in iter(lambda: response.read(1 << 18), b""):
                view = memoryview(block)
                while view:
                    view = view[out.write(view):]
                have += len(block)
                progress.show(have, total)
    progress.end()
    return total is None or have == total


class Progress:
    """Shows one updating line on a terminal. Elsewhere (CI logs) prints a line per 20%, or one for a small file."""

    def __init__(self, name):
        self.name, self.live = "-".join(name.split("-")[:2]), sys.stdout.isatty()
        self.started, self.first_bytes, self.shown, self.open_line = time.monotonic(), None, -1, False

    def show(self, have, total):
        now = time.monotonic()
        if self.first_bytes is None:
            self.first_bytes = have
        rate = (have - self.first_bytes) / max(now - self.started, 1e-3)
        of = f" of {total / 1e6:.0f}" if total else ""
        text = f"libtorch: {self.name} {have / 1e6:.0f}{of} MB, {rate / 1e6:.1f} MB/s"
        if self.live:
            if now - max(self.shown, 0) >= 0.2 or have == total:
                self.shown, self.open_line = now, True
                print(f"\r{text:<78.78}", end="", flush=True)
        elif total and have * self.lines(total) // total > max(self.shown, 0):
            self.shown = have * self.lines(total) // total
            print(text, flush=True)

    @staticmethod
    def lines(total):
        return 5 if total > 50_000_000 else 1

    def end(self):
        if self.open_line:
            print(flush=True)
            self.open_line = False


# --- The link ------------------------------------------------------------------------------------------------------------


def link(root):
    """Points `.libtorch` at `root` atomically: a concurrent build sees either the old or the new target."""
    root = root.resolve()
    if LINK.resolve() == root:
        return
    if LINK.exists() and not LINK.is_symlink():
        raise Trouble(f"{LINK} is not a link and does not contain a usable libtorch {VERSION}: move it away and try again.")
    fresh = LINK.with_name(f".libtorch.{os.getpid()}")
    os.symlink(str(root), str(fresh))
    os.replace(str(fresh), str(LINK))
    if (CHECKOUT / "target").is_dir():
        say("what has been built uses another libtorch: run `make clean` before the next build")


def main():
    if sys.version_info < (3, 8):
        sys.exit("libtorch: Python 3.8 or later is needed.")
    try:
        if "--cuda" in sys.argv[1:]:
            root = from_environment()
            if root and not has_cuda(root):
                raise Trouble(f"LIBTORCH is {root}, which has no lib/libtorch_cuda.so: set it to a libtorch {VERSION} with CUDA, or unset it.")
            found = (source() for source in (from_link, from_python))
            root = root or next((root for root in found if root and has_cuda(root)), None) or from_virtual_environment()
        else:
            root = from_environment() or from_link() or from_python() or from_cache_or_index()
        link(root)
    except Trouble as trouble:
        sys.exit(f"libtorch: {trouble}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        print("libtorch: interrupted; run it again to resume.", file=sys.stderr)
        sys.exit(130)
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        sys.exit(f"libtorch: the disk that holds {cache_folder()} is full: free about {DISK_BYTES_NEEDED // 10**6} MB, or set XDG_CACHE_HOME to a folder on a larger disk.")
    say(f"{VERSION} at {root.resolve()}")


if __name__ == "__main__":
    main()
