#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A worker under TLS whose peer restarts again and again: it keeps neither memory, descriptors nor threads of the peer
that has gone. TENSORLANE_TEST_CYCLES asks for more restarts than the suite has time for."""
import contextlib
import os
import pathlib
import resource

import cli_support
from cli_support import wait_until
from tls_support import TlsCase

CYCLES = int(os.environ.get("TENSORLANE_TEST_CYCLES", "10"))


class Held:
    """What a process holds. Threads of gRPC are counted apart, since it adds to them while all are busy."""

    def __init__(self, pid):
        process = pathlib.Path("/proc", str(pid))
        names = []
        for path in (process / "task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has just ended
                names.append(path.read_text())
        self.pages = int((process / "statm").read_text().split()[1])
        self.descriptors = len(os.listdir(process / "fd"))
        self.threads = len([name for name in names if name.startswith(("tl-", "tensorlane"))])
        self.others = len(names) - self.threads

    def is_within(self, earlier):
        return self.descriptors <= earlier.descriptors and self.threads <= earlier.threads

    def row(self, restarts):
        kib = self.pages * resource.getpagesize() // 1024
        return f"| {restarts:,} | {kib:,} | {self.descriptors} | {self.threads} | {self.others} |"


class Restarts(TlsCase):
    def restart(self, cluster, stays):
        """Starts the peer, and stops it when it has a data connection."""
        # A second link may take the place of the first one, so that a connection comes up twice.
        ups, ends = (stays.output.count(text) for text in ("data connection up", "has closed its connection"))
        restarts = cluster.start("ps", 1)
        wait_until(lambda: stays.output.count("data connection up") > ups, "the data connection", lambda: stays.output)
        self.assertEqual(restarts.stop(), 0)
        wait_until(lambda: stays.output.count("has closed its connection") > ends, "the end", lambda: stays.output)

    def test_a_peer_that_restarts(self):
        cluster = self.secured(extra={"connect": "eager"}, ps=2)
        stays = cluster.start("ps", 0)
        held = []
        print("\n| restarts | resident memory, KiB | descriptors | threads of tensorlane | of gRPC |")
        print("|---:|---:|---:|---:|---:|")
        for cycle in range(1, CYCLES + 1):
            self.restart(cluster, stays)
            held.append(Held(stays.pid))
            if cycle in (1, 2) or cycle % max(CYCLES // 10, 1) == 0:
                print(held[-1].row(cycle), flush=True)
        wait_until(lambda: Held(stays.pid).is_within(held[1]), "descriptors and threads are given back",
                   lambda: Held(stays.pid).row(CYCLES))
        self.assertLess(held[-1].others, held[0].others + 8, "threads of gRPC")
        if not cli_support.SANITIZE:  # they keep what was freed
            # A TLS session takes ten pages; the first restarts fill what the allocator keeps. Another thread of gRPC
            # has a stack and an arena of the allocator.
            half = held[CYCLES // 2]
            gained = max(held[-1].others - half.others, 0)
            self.assertLess(held[-1].pages - half.pages, 24 + CYCLES // 20 + 16 * gained, "pages")


if __name__ == "__main__":
    cli_support.main()
