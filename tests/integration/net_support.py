# SPDX-License-Identifier: Apache-2.0
"""A network of two hosts, without privileges: each is a network namespace behind a router, which is the namespace that
the test itself runs in. The router can lose what passes through it.

    10.1.0.2 (A) ---- 10.1.0.1  router  10.2.0.1 ---- 10.2.0.2 (B)
"""
import os
import pathlib
import subprocess
import sys

import cli_support

INSIDE = "TENSORLANE_TEST_HAS_NETWORK"


def enter():
    """Runs the test again in namespaces of its own. Exits with 77 where that is not possible."""
    if INSIDE in os.environ:
        return
    unshare = ["unshare", "--map-root-user", "--net", "--mount", "--kill-child", "--fork"]
    trial = "ip link add name ta type veth peer name tb && ip rule add pref 5 to 10.1.0.2 ipproto tcp blackhole"
    lacking = ""
    try:
        result = subprocess.run([*unshare, "sh", "-c", trial], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            lacking = result.stderr.strip() or "no network namespace"
    except OSError as error:
        lacking = str(error)
    if lacking:
        print(f"no network of its own: {lacking}")
        sys.exit(cli_support.SKIPPED)
    os.environ[INSIDE] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


class Host:
    """A network namespace with one interface, and its address."""

    def __init__(self, case, name, net):
        self.name, self.address, self.gateway = name, f"{net}.2", f"{net}.1"
        own = os.readlink("/proc/self/ns/net")
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        case.addCleanup(holder.wait)
        case.addCleanup(holder.kill)
        cli_support.wait_until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own, "a network namespace")
        self.inside = ("nsenter", "-t", str(holder.pid), "-n")
        ip("link", "add", "name", f"r{name}", "type", "veth", "peer", "name", f"v{name}")
        case.addCleanup(subprocess.run, ["ip", "link", "del", f"r{name}"], check=False)
        ip("link", "set", f"v{name}", "netns", str(holder.pid))
        ip("addr", "add", f"{self.gateway}/24", "dev", f"r{name}")
        ip("link", "set", f"r{name}", "up")
        for line in (f"addr add {self.address}/24 dev v{name}", f"link set v{name} up", "link set lo up",
                     f"route add default via {self.gateway}"):
            subprocess.run([*self.inside, "ip", *line.split()], check=True)


class Network:
    """The router with both hosts; what it does to packets ends with the test."""

    def __init__(self, case):
        self.case = case
        ip("link", "set", "lo", "up")
        pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
        self.a, self.b = Host(case, "a", "10.1.0"), Host(case, "b", "10.2.0")

    def rule(self, *rule):
        ip("rule", "add", *rule)
        self.case.addCleanup(subprocess.run, ["ip", "rule", "del", *rule], check=False)

    def block_tcp(self):
        """Between the hosts; the router still reaches both."""
        self.rule("pref", "5", "iif", "ra", "to", self.b.address, "ipproto", "tcp", "blackhole")
        self.rule("pref", "5", "iif", "rb", "to", self.a.address, "ipproto", "tcp", "blackhole")

    def lose_large_to_b(self):
        """Packets above 1,400 bytes from A to B vanish, and A does not learn of it."""
        ip("link", "set", "rb", "mtu", "1400")
        self.rule("pref", "6", "iif", "lo", "ipproto", "icmp", "to", self.a.address, "blackhole")
