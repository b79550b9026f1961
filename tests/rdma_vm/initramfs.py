# SPDX-License-Identifier: Apache-2.0
"""The guest's first file system: busybox, the init beside this file and the kernel modules that it loads.

build() copies them into a temporary folder and packs that with cpio into the folder of the kernel. The archive's name
has a digest of its content, so a changed init or another list of modules makes another archive. build() raises an
Unavailable when the kernel lacks a module, or the machine busybox-static, cpio or kmod.
"""
import hashlib
import pathlib
import re
import shutil
import tempfile

import kernel as kernels

INIT = pathlib.Path(__file__).with_name("init")
BUSYBOX = pathlib.Path("/bin/busybox")
# rdma_rxe asks for crc32 by name only when a device is made, so modprobe does not know that it is needed.
MODULES = ["virtio_pci", "9pnet_virtio", "9p", "virtio_net", "overlay", "crc32_generic", "crc32-pclmul", "ib_uverbs",
           "rdma_ucm", "rdma_rxe", "veth", "dummy", "sch_netem", "sch_tbf", "sch_ingress", "cls_u32", "act_gact"]


def module_files(kernel):
    """Returns the files to load, each after those that it depends on."""
    files = []
    for module in MODULES:
        text = kernels.run("modprobe", "-C", "/dev/null", "-d", kernel.folder, "-S", kernel.release,
                           "--show-depends", module)
        for path in re.findall(r"^insmod (\S.*\.ko)", text, re.MULTILINE):
            if path not in files:
                files.append(path)
    return [pathlib.Path(path) for path in files]


def digest(paths):
    result = hashlib.sha256()
    for path in paths:
        result.update(path.name.encode() + b"\0" + path.read_bytes())
    return result.hexdigest()[:16]


def pack(files, archive):
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix="packing-") as scratch:
        root = pathlib.Path(scratch, "root")
        for folder in ("bin", "modules", "proc", "sys", "dev", "host", "root"):
            (root / folder).mkdir(parents=True)
        shutil.copy(BUSYBOX, root / "bin" / "busybox")
        shutil.copy(INIT, root / "init")
        for path in files:
            shutil.copy(path, root / "modules" / path.name)
        (root / "modules" / "order").write_text("".join(f"{path.name}\n" for path in files), encoding="ascii")
        packed = pathlib.Path(scratch, "packed")
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        kernels.run("cpio", "--quiet", "-o", "-H", "newc", "-R", "0:0", "-F", packed, cwd=root, input=names)
        packed.rename(archive)


def build(kernel):
    """Returns the path of an archive that fits the kernel."""
    if not BUSYBOX.exists():
        raise kernels.Unavailable(f"{BUSYBOX} is missing: as root, run apt-get install busybox-static")
    with kernels.only_one(kernel.folder.parent):
        files = module_files(kernel)
        archive = kernel.folder / f"initramfs-{digest([BUSYBOX, INIT, *files])}.cpio"
        if not archive.exists():
            pack(files, archive)
        return archive
