# SPDX-License-Identifier: Apache-2.0
"""What ./dev bench --python measures: programs, what each of them is asked, and the ratios that are wanted."""
import dataclasses

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"8 B": 8, "64 KiB": 64 * KIB, "1 MiB": MIB, "64 MiB": 64 * MIB}
SMALL_BYTES, SMALL_COUNT = 4 * KIB, 1000
THOUSAND = "1,000 x 4 KiB"
NIXL_GAP = 64  # of nixl_peer.py
PROGRESS = ("thread", "caller")
PROTOCOLS = {"local": "grpc+local", "grpc": "grpc"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a program is asked for, with what takes tensor_count tensors."""
    program: str
    command: str
    size_bytes: int
    tensor_count: int = 1

    @property
    def name(self):
        return f"{self.program} {self.command} {self.size_bytes}"


@dataclasses.dataclass(frozen=True)
class Row:
    """kind: what the target bounds. "faster": the peer's time by ours, at least; "part": our time by that of the peer,
    which is the whole, at most; "more": the microseconds that ours takes beyond the peer's, at most."""
    group: str
    title: str
    ours: Variant
    peer_title: str
    peer: Variant
    kind: str
    target: float


def _pull(program, size):
    return Variant(program, "pull", SIZES[size])


def _many(program, command="many", tensor_bytes=SMALL_BYTES):
    return Variant(program, command, tensor_bytes, SMALL_COUNT)


def _beside_c():
    for progress in PROGRESS:
        for size, (kind, target) in {"8 B": ("more", 3.0), "64 KiB": ("more", 3.0), "1 MiB": ("faster", 0.98),
                                     "64 MiB": ("faster", 0.98)}.items():
            yield Row("c", f"{size}, local, {progress}", _pull(f"local {progress}", size), "our C library",
                      _pull(f"c {progress}", size), kind, target)
        yield Row("c", f"{THOUSAND}, local, {progress}", _many(f"local {progress}"), "our C library",
                  _many(f"c {progress}"), "more", None)


def _beside_nixl():
    for progress in PROGRESS:
        for size in SIZES:
            yield Row("nixl", f"{size}, local, {progress}", _pull(f"local {progress}", size), "NIXL",
                      Variant("nixl", "make", SIZES[size]), "faster", 1.5 if size == "64 MiB" else 1.0)
        yield Row("nixl", f"{THOUSAND}, local, {progress}", _many(f"local {progress}"), "NIXL",
                  _many("nixl", "make_many"), "faster", 2.0)


def _beside_mooncake():
    for protocol, targets in {"grpc": {"1 MiB": 1.0, "64 MiB": 1.5, THOUSAND: 1.5},
                              "local": {"1 MiB": 3.0, "64 MiB": 3.0, THOUSAND: 3.0}}.items():
        for progress in PROGRESS:
            program = f"{protocol} {progress}"
            for size, target in targets.items():
                ours, theirs = ((_many(program), _many("mooncake", "read_many")) if size == THOUSAND else
                                (_pull(program, size), Variant("mooncake", "read", SIZES[size])))
                yield Row("mooncake", f"{size}, {protocol}, {progress}", ours, "Mooncake, TCP", theirs, "faster",
                          target)


def _beside_gloo():
    for protocol in PROTOCOLS:
        for progress in PROGRESS:
            for size in ("1 MiB", "64 MiB"):
                yield Row("gloo", f"{size}, {protocol}, {progress}", _pull(f"{protocol} {progress}", size),
                          "PyTorch gloo", Variant("gloo", "recv", SIZES[size]), "faster", None)


def _beside_a_copy():
    """What the memory of the machine allows."""
    for progress in PROGRESS:
        program = f"local {progress}"
        yield Row("copy", f"64 MiB, local, {progress}", _pull(program, "64 MiB"), "a copy within one process",
                  Variant(program, "copy", SIZES["64 MiB"]), "faster", None)


def _parts():
    for protocol in PROTOCOLS:
        for progress in PROGRESS:
            program = f"{protocol} {progress}"
            for command, title, target in (("rows", "a quarter of the rows", 0.3), ("columns", "of the columns", 0.6),
                                           ("rows_box", "of the rows, in their place", 0.3),
                                           ("columns_box", "of the columns, in their place", 0.6)):
                yield Row("parts", f"64 MiB, {title}, {protocol}, {progress}", Variant(program, command, 0),
                          "the whole", Variant(program, "whole", 0), "part", target)


def _state():
    for progress in PROGRESS:
        yield Row("state", f"VGG16 into a module, local, {progress}", Variant(f"local {progress}", "state", 0),
                  "our C library", Variant(f"c model {progress}", "into_model", 0), "faster", 0.9)


ROWS = (*_beside_c(), *_beside_nixl(), *_beside_mooncake(), *_beside_gloo(), *_beside_a_copy(), *_parts(), *_state())
