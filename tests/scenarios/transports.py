# SPDX-License-Identifier: Apache-2.0
"""The transports that scenarios run over, and what differs between them: addresses, settings, paths, what they hold.

    transport = transports.BY_NAME["local"]
    with Worker(transport.cluster(rdma="require"), "worker") as here: ...
"""
import contextlib
import os
import re
import socket

import workers


def descriptors(pid):
    """How many descriptors a process has, by kind; sockets of the control plane come and go and are one kind."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            kind = re.sub(r"\d+", "", os.readlink(f"/proc/{pid}/fd/{name}"))
            found[kind] = found.get(kind, 0) + 1
    return found


def shared_maps(pid):
    """How many mappings of memory without a name in a file system a process has."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        return sum("/memfd:" in line for line in maps)


class Transport:
    """What a cluster is like in which tensors travel over gRPC alone; each cluster has ports of its own."""
    name = "grpc"
    protocol = "grpc"
    # Of plain tensors.
    paths = ("grpc",)
    checkpoint_paths = {"grpc": 32}
    # Address of the job.
    hosts = {"ps": "127.0.0.1", "worker": "127.0.0.1"}
    # The section of the configuration that its settings are in; what they are unless a scenario says otherwise, and, under
    # prefer and require, in scenarios in which peers fail: there the silence is longer than a busy machine's.
    section, defaults, faulty = None, {}, {"prefer": {}, "require": {}}
    # Settings of a worker that cannot have the transport, and what the reason says then.
    lacking = None
    # Who waits so long hears why a frozen peer does not answer, with the product's own defaults.
    give_up_sec = None
    # Of tensors that are all under way at once.
    sizes = (1, 100, 3000, 40000, 300000)
    # Of scenarios that are repeated.
    cycle_count = 200

    def cluster(self, data_plane=None, **settings):
        """Two tasks of each job. data_plane: settings of the transport itself, None: the product's own defaults, {}: those
        of scenarios in which nobody is stopped."""
        ports = iter(workers.free_ports(4))
        config = {"cluster": {job: [f"{host}:{next(ports)}" for _ in range(2)] for job, host in self.hosts.items()},
                  "protocol": self.protocol} | settings
        if self.section and data_plane is not None:
            config[self.section] = self.defaults | data_plane
        return config

    def held(self, pid):
        """What a process holds of the machine."""
        return {"descriptors": descriptors(pid), "maps": shared_maps(pid)}

    def held_by_devices(self):
        """What all processes together hold of devices."""
        return {}

    def cut(self):
        """Ends the connections of this process, as if the kernel had lost them."""
        cut_sockets(socket.AF_INET)


class Local(Transport):
    name = "local"
    protocol = "grpc+local"
    paths = ("zero-copy", "bounce")
    checkpoint_paths = {"zero-copy": 14, "bounce": 18}  # small ones are copied twice
    section, defaults = "local", {"peer_timeout": "20s"}
    faulty = {"prefer": {"peer_timeout": "5s"}, "require": {"peer_timeout": "5s", "process_vm": "off"}}
    lacking = {"socket_folder": "/nowhere/at/all"}, "/nowhere/at/all"
    give_up_sec = 20

    def cut(self):
        cut_sockets(socket.AF_UNIX)


class Verbs(Transport):
    """In the guest with two devices and a wire between them."""
    name = "verbs"
    protocol = "grpc+verbs"
    paths = ("zero-copy", "bounce")
    checkpoint_paths = {"zero-copy": 32}
    hosts = {"ps": "10.9.0.2", "worker": "10.9.0.1"}
    # For guests of a busy machine. timeout: rxe binds windows anew when it sends packets again, which fails since they
    # are bound.
    section, defaults = "verbs", {"timeout": 22, "piece": "1MiB", "peer_timeout": "10s", "pool": "4MiB"}
    # Every packet that is sent again may break a path under keys of windows.
    faulty = {rdma: {"keys": keys, "piece": "128KiB", "peer_timeout": "5s", "pool": "16MiB"}
              for rdma, keys in (("prefer", "window"), ("require", "region"))}
    # More at once in both directions than the wire's queue of 1000 packets takes costs the path.
    sizes = (1, 100, 3000, 20000)
    lacking = {"devices": "^rxe"}, "excluded by devices"
    give_up_sec = 2
    cycle_count = 50

    def held_by_devices(self):
        return workers.resources()


def cut_sockets(family):
    """Shuts down what this process has connected, over sockets of the family."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family == family:
                    found.getpeername()
                    found.shutdown(socket.SHUT_RDWR)


BY_NAME = {transport.name: transport for transport in (Transport(), Local(), Verbs())}
