# SPDX-License-Identifier: Apache-2.0
"""The transports that scenarios run over, and how they differ: addresses, settings, paths, and what they hold.

    transport = transports.BY_NAME["local"]
    with Worker(transport.cluster(rdma="require"), "worker") as here: ...
"""
import contextlib
import os
import re
import socket
import subprocess
import tempfile

import workers


def descriptors(pid):
    """Returns how many descriptors a process has, by kind; sockets of the control plane come and go and are one
    kind."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            kind = re.sub(r"\d+", "", os.readlink(f"/proc/{pid}/fd/{name}"))
            found[kind] = found.get(kind, 0) + 1
    return found


def shared_maps(pid):
    """Returns how many mappings of unnamed memory a process has."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        return sum("/memfd:" in line and "fake-cuda-memory" not in line for line in maps)


class Transport:
    """A cluster in which tensors travel over gRPC alone; each cluster has ports of its own."""
    name = "grpc"
    protocol = "grpc"
    # The column of the table that says what runs over it.
    column = "grpc"
    # The paths of plain tensors, the fastest first; and those from a GPU to the host, from the host to a GPU, and from
    # one GPU to another.
    paths = from_gpu = to_gpu = between_gpus = ("grpc",)
    checkpoint_paths = {"grpc": [32]}
    # The address of each job.
    hosts = {"ps": "127.0.0.1", "worker": "127.0.0.1"}
    # The section of the configuration with the settings of the transport; its settings unless a scenario says
    # otherwise; and, under prefer and require, its settings where peers fail. There the peer time-out is longer than a
    # busy machine pauses.
    section, defaults, faulty = None, {}, {"prefer": {}, "require": {}}
    # Settings of a worker that cannot have the transport, and what the reason then says.
    lacking = None
    # With default settings, a receive with this deadline ends with the reason why a frozen peer does not answer.
    give_up_sec = None
    # The sizes of tensors that are all under way at once.
    sizes = (1, 100, 3000, 40000, 300000)
    # How often a scenario that repeats itself does so, and how many times less often with tensors on GPUs.
    cycle_count = 200
    gpu_divisor = 10

    def cluster(self, data_plane=None, **settings):
        """Returns a configuration with two tasks of each job. data_plane has settings of the transport: None means the
        product's defaults, {} those of scenarios in which no peer is stopped."""
        ports = iter(workers.free_ports(4))
        config = {"cluster": {job: [f"{host}:{next(ports)}" for _ in range(2)] for job, host in self.hosts.items()},
                  "protocol": self.protocol} | settings
        if self.section and data_plane is not None:
            config[self.section] = self.defaults | data_plane
        return config

    def paths_between(self, owner, receiver):
        """Returns the paths of plain tensors from one device to another."""
        return ((self.paths, self.to_gpu), (self.from_gpu, self.between_gpus))[owner.kind][receiver.kind]

    def held(self, pid):
        """Returns what a process holds of the machine."""
        found = descriptors(pid)
        # Memory of another process that was imported stays while its owner keeps it; whether the last tensor was
        # imported depends on when the data connection came back.
        found.pop("/memfd:fake-cuda-memory-of-gpu (deleted)", None)
        return {"descriptors": found, "maps": shared_maps(pid)}

    def held_by_devices(self):
        """Returns what all processes together hold of devices."""
        return {}

    def cut(self):
        """Ends the connections of this process, as if the kernel had lost them."""
        cut_sockets(socket.AF_INET)


class Tls(Transport):
    """The same with mutual TLS; each task and the tools have a certificate."""
    name = "tls"
    cycle_count = 50

    def __init__(self):
        self.folder = None

    def cluster(self, data_plane=None, **settings):
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(prefix="tensorlane-certificates.")
            names = [f"--name={job}:{task}" for job in self.hosts for task in range(2)]
            for command in (["init"], ["issue", *names, "--name=client", "--host=127.0.0.1"]):
                subprocess.run([workers.PROGRAM, "cert", *command, "--folder", self.folder.name], check=True,
                               stdout=subprocess.DEVNULL)
        tls = {"ca": f"{self.folder.name}/ca.pem", "certificate": f"{self.folder.name}/{{name}}.pem",
               "key": f"{self.folder.name}/{{name}}.key"}
        everything = ["read", "publish", "push", "withdraw", "list", "peers"]
        security = {"tls": tls, "allow": [{"who": ["any"], "what": everything}]}
        return super().cluster(data_plane, security=security, **settings)


class Local(Transport):
    name = column = "local"
    protocol = "grpc+local"
    paths = ("zero-copy", "bounce", "inline")
    from_gpu = to_gpu = ("gpu-proxy",)
    between_gpus = ("gpu-ipc", "gpu-proxy")
    # Seventeen tensors have at most 4 KiB, and two have 2 MiB or more. How many of the others find free memory in the
    # pool depends on the time.
    checkpoint_paths = {"zero-copy": range(2, 10), "bounce": range(6, 14), "inline": [17]}
    section, defaults = "local", {"peer_timeout": "20s"}
    faulty = {"prefer": {"peer_timeout": "5s"}, "require": {"peer_timeout": "5s", "process_vm": "off"}}
    lacking = {"socket_folder": "/nowhere/at/all"}, "/nowhere/at/all"
    give_up_sec = 20

    def cut(self):
        cut_sockets(socket.AF_UNIX)


class Verbs(Transport):
    """In the guest with two devices and a wire between them."""
    name = column = "verbs"
    protocol = "grpc+verbs"
    paths = ("zero-copy", "bounce", "inline")
    from_gpu = to_gpu = between_gpus = ("gpu-direct", "gpu-proxy", "bounce")
    checkpoint_paths = {"zero-copy": [17], "inline": [15]}
    hosts = {"ps": "10.9.0.2", "worker": "10.9.0.1"}
    # These settings suit the guests of a busy machine. The setting timeout avoids that rxe sends packets again: it
    # would bind windows again, which fails because they are bound.
    section, defaults = "verbs", {"timeout": 22, "piece": "1MiB", "peer_timeout": "10s", "pool": "4MiB"}
    # Every packet that rxe sends again may break a path under keys of windows.
    faulty = {rdma: {"keys": keys, "piece": "128KiB", "peer_timeout": "5s", "pool": "16MiB"}
              for rdma, keys in (("prefer", "window"), ("require", "region"))}
    # More packets at once in both directions than the wire's queue of 1000 holds would cost the path.
    sizes = (1, 100, 3000, 20000)
    lacking = {"devices": "^rxe"}, "excluded by devices"
    give_up_sec = 2
    cycle_count = 50
    gpu_divisor = 50

    def held_by_devices(self):
        return workers.resources()


class Gdr(Verbs):
    """Over the same cards; what is received is read, which only keys of windows allow."""
    name = column = "gdr"
    protocol = "grpc+gdr"
    faulty = {rdma: {"keys": "window", "piece": "128KiB", "peer_timeout": "5s", "pool": "16MiB"}
              for rdma in ("prefer", "require")}
    cycle_count = 10


def cut_sockets(family):
    """Shuts down the connections of this process over sockets of the family."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family == family:
                    found.getpeername()
                    found.shutdown(socket.SHUT_RDWR)


BY_NAME = {transport.name: transport for transport in (Transport(), Tls(), Local(), Verbs(), Gdr())}
