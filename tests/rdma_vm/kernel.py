# SPDX-License-Identifier: Apache-2.0
"""Debian's kernel for the guest: a stock one, because it has soft-RoCE (rdma_rxe) as a module.

fetch() looks for the newest linux-image-6.1.0-N-amd64 that apt offers, downloads it (which needs no root) and unpacks
it into a folder of the cache named after its version; nothing is installed on this machine. Later calls find it there,
also when apt offers none. The kernel is kept uncompressed, because an emulated processor needs as long to decompress it
as for all the rest of the boot.

A failure is an Unavailable whose text says what to run: apt knows no such package, or only ones older than OLDEST,
whose rdma_rxe uses freed memory; or the download fails because the package lists are out of date (root updates them and
tries once more).
"""
import contextlib
import fcntl
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

OLDEST = (6, 1, 187)
PACKAGE = re.compile(r"linux-image-(6\.1\.0-(\d+)-amd64)")
UPDATE = "as root, run apt-get update and try again"


class Unavailable(Exception):
    """The guest cannot be had here; the text says what to do."""


class Kernel:
    """A kernel in its folder of the cache; release is what uname -r says in the guest, version is the package's."""

    def __init__(self, cache, release, version):
        self.release = release
        self.version = version
        self.folder = pathlib.Path(cache, f"linux-image-{release}_{version}")

    @property
    def image(self):
        return self.folder / "vmlinux"

    @property
    def age_key(self):
        return [int(number) for number in re.findall(r"\d+", self.version)]


def run(*command, **options):
    """Runs a command of this machine; raises an Unavailable with its output when it fails."""
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    try:
        result = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, errors="replace", check=False, env=environment, **options)
    except OSError as error:
        raise Unavailable(f"{command[0]}: {error.strerror}; ./dev lists the packages that this needs") from error
    if result.returncode:
        raise Unavailable(f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout.rstrip()}")
    return result.stdout


@contextlib.contextmanager
def only_one(cache):
    """While one process fills the cache, the others wait."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def newest_cached(cache):
    found = [Kernel(cache, match[1], match[2]) for match in
             (re.fullmatch(PACKAGE.pattern.replace(r"(\d+)", r"\d+") + r"_(.+)", path.name) for path in cache.iterdir())
             if match]
    return max(found, key=lambda kernel: kernel.age_key, default=None)


def newest_offered(cache):
    """Returns what apt offers, or None when it knows no such package."""
    names = run("apt-cache", "pkgnames", "linux-image-6.1.0-").split()
    found = [match for match in map(PACKAGE.fullmatch, names) if match]
    if not found:
        return None
    newest = max(found, key=lambda match: int(match[2]))
    policy = run("apt-cache", "policy", newest[0])
    candidate = re.search(r"^  Candidate: (?:\d+:)?([^\s(]+)$", policy, re.MULTILINE)
    return Kernel(cache, newest[1], candidate[1]) if candidate else None


def download(kernel, folder):
    """Puts the package into the folder and returns its path."""
    command = ["apt-get", "-q", "download", f"linux-image-{kernel.release}={kernel.version}"]
    try:
        run(*command, cwd=folder)
    except Unavailable as error:
        if os.geteuid() != 0:
            raise Unavailable(f"{error}\nthe package lists may be out of date: {UPDATE}") from error
        run("apt-get", "-q", "update")
        run(*command, cwd=folder)
    return next(pathlib.Path(folder).glob("*.deb"))


def decompress(packed, image):
    """Does what the kernel's own start-up code would do."""
    data = packed.read_bytes()
    start = data.find(b"\xfd7zXZ\0")
    if start < 0:
        raise Unavailable(f"{packed.name} is not compressed with xz, as Debian 12's kernels are")
    image.write_bytes(lzma.LZMADecompressor().decompress(data[start:]))


def unpack(kernel, cache):
    for leftover in cache.glob("unpacking-*"):  # Left by a process that was killed.
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=cache, prefix="unpacking-") as scratch:
        package = download(kernel, scratch)
        root = pathlib.Path(scratch, "root")
        run("dpkg", "-x", package, root)
        run("depmod", "-b", root, kernel.release)
        decompress(root / "boot" / f"vmlinuz-{kernel.release}", root / "vmlinux")
        if kernel.folder.exists():
            shutil.rmtree(kernel.folder)
        root.rename(kernel.folder)


def fetch(cache, say=lambda text: None):
    """Returns the newest kernel that apt offers or the cache has, unpacked."""
    cache = pathlib.Path(cache)
    with only_one(cache):
        cached, offered = newest_cached(cache), newest_offered(cache)
        kernel = max((it for it in (cached, offered) if it), key=lambda it: it.age_key, default=None)
        if kernel is None:
            raise Unavailable(f"apt knows no package linux-image-6.1.0-N-amd64: {UPDATE}, on Debian 12 (amd64)")
        if kernel.age_key[:3] < list(OLDEST):
            raise Unavailable(f"the newest kernel that apt offers is {kernel.version}, and one of"
                              f" {'.'.join(map(str, OLDEST))} or later is needed: {UPDATE}")
        if not kernel.image.exists():
            say(f"fetching Debian's kernel {kernel.version}")
            unpack(kernel, cache)
        return kernel
