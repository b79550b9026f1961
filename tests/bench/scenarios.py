# SPDX-License-Identifier: Apache-2.0
"""What is measured of our programs alone: a whole model pulled from `tensorlane serve`, and many workers on one machine
started by `tensorlane up`."""
import contextlib
import json
import pathlib
import statistics
import subprocess
import time

from processes import Failure, Process, children_of, free_ports, proportional_bytes, status_field

MEMORY_SLACK_BYTES = 64 << 20
WORKER_COUNT = 64
SETTLE_SEC = 3
COMMAND_SEC = 300
UNUSED_COUNT = 2
NEW_COUNT = 15


def run_json(command):
    """What a command of ours prints with --json."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=COMMAND_SEC,
                            check=False)
    if result.returncode:
        raise Failure(f"{' '.join(map(str, command))}: exit code {result.returncode}\n    {result.stderr.strip()}")
    return json.loads(result.stdout)


def make_model(build, folder):
    path = folder / "vgg16.safetensors"
    if not path.exists():
        subprocess.run([build / "examples" / "make_vgg16", path], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
    return path


# ---------------------------------------------------------------------------------------------------------- model --

@contextlib.contextmanager
def served_model(build, folder, protocol):
    """`tensorlane serve` with the mapped model; gives the process, its address, and what it lists."""
    config = folder / f"model-{protocol}.json"
    config.write_text(json.dumps({"cluster": {"ps": ["127.0.0.1:1"]}, "protocol": protocol}))
    command = [build / "bin" / "tensorlane", "serve", "--config", config, "--job", "ps", "--task", "0", "--listen",
               "127.0.0.1:0", "--publish", make_model(build, folder)]
    with Process("serve", command, folder / "logs") as server:
        words = server.wait_logged("worker ready").split()
        address = "127.0.0.1:" + next(word for word in words if word.startswith("port=")).partition("=")[2]
        yield server, address, run_json([build / "bin" / "tensorlane", "ls", "--address", address, "--json"])
        server.stop()


def pull_twice(build, address, listing, progress, protocol, log_folder, is_apart=False):
    """One receiver: the first pull connects and allocates, the second is into the same tensors. is_apart: connecting is
    measured apart, and further pulls are into tensors of the caller's that are new, in turn with a memcpy into such
    tensors. The first two of each are left out, and the median of the others counts: the first
    one takes up to thirty times as long as a copy, presumably because the host of a virtual machine has to find the
    memory."""
    names = log_folder / "names"
    names.write_text("".join(tensor["name"] + "\n" for tensor in listing["tensors"]))
    command = [build / "bin" / "bench" / "tl_bench", "pull", address.rpartition(":")[2], progress, protocol, names]
    with Process(f"model {progress}", command, log_folder) as client:
        client.wait_ready()
        results = {"path_seconds": client.ask("path 0 1")} if is_apart and protocol != "grpc" else {}
        for name in ("first", "second"):
            results[f"{name}_seconds"] = client.ask(f"model {listing['bytes']} 1")
        if is_apart:
            takes = [(client.ask(f"copy_model {listing['bytes']} 1"), client.ask(f"new_model {listing['bytes']} 1"))
                     for _ in range(UNUSED_COUNT + NEW_COUNT)]
            results["copied_seconds"], results["new_seconds"] = map(statistics.median, zip(*takes[UNUSED_COUNT:]))
        return {**results, "peak_bytes": status_field(client.pid, "VmHWM")}


def pull_command(build, address, folder, *options):
    """`tensorlane pull`, which writes a file."""
    output = folder / "pulled.safetensors"
    report = run_json([build / "bin" / "tensorlane", "pull", "--address", address, "-o", output, "--json", *options])
    output.unlink()
    return report["seconds"]


def measure_model(build, folder, repeat_count, say):
    """VGG16 from a mapped file to receivers with either kind of progress, and to `tensorlane pull`."""
    with served_model(build, folder, "grpc") as (server, address, listing):
        pulls = {"thread": [], "caller": []}
        for index in range(repeat_count):
            say(f"VGG16: pull {index + 1} of {repeat_count}")
            for progress, results in pulls.items():
                results.append(pull_twice(build, address, listing, progress, "grpc", folder / "logs"))
        command_seconds = [pull_command(build, address, folder) for _ in range(repeat_count)]
        peak_bytes = status_field(server.pid, "VmHWM")
    file_bytes = make_model(build, folder).stat().st_size
    return {"tensor_count": listing["count"], "tensor_bytes": listing["bytes"], "file_bytes": file_bytes,
            "pulls": pulls, "pull_command_seconds": command_seconds, "server_peak_bytes": peak_bytes,
            "summary": summarize_model(listing["bytes"], file_bytes, pulls, command_seconds, peak_bytes)}


def summarize_model(tensor_bytes, file_bytes, pulls, command_seconds, server_peak_bytes):
    summary = {"pull_command_seconds": statistics.median(command_seconds), "progress": {}, "memory": []}
    for progress, results in pulls.items():
        summary["progress"][progress] = {which: statistics.median(result[which] for result in results)
                                         for which in ("first_seconds", "second_seconds")}
        summary["memory"].append(memory_line(f"receiver, {progress}", max(result["peak_bytes"] for result in results),
                                             tensor_bytes))
    summary["memory"].append(memory_line("server", server_peak_bytes, file_bytes))
    return summary


def memory_line(who, peak_bytes, payload_bytes):
    return {"who": who, "peak_bytes": peak_bytes, "payload_bytes": payload_bytes,
            "limit_bytes": payload_bytes + MEMORY_SLACK_BYTES,
            "is_met": peak_bytes <= payload_bytes + MEMORY_SLACK_BYTES}


# ----------------------------------------------------------------------------------------------------- many workers --

def wait_all_ready(process):
    """`tensorlane up` says so in one line."""
    while True:
        line = process.read_line(COMMAND_SEC)
        if "all ready" in line:
            return


def measure_workers(build, folder, connect, count, say):
    """So many workers of one cluster on this machine. connect: lazy, or eager: each connects to all others."""
    say(f"{count} workers, {connect} connections")
    config = folder / f"workers-{connect}.json"
    config.write_text(json.dumps({"cluster": {"worker": [f"127.0.0.1:{port}" for port in free_ports(count)]},
                                  "protocol": "grpc", "connect": connect, "log": {"level": "warn"}}))
    start = time.monotonic()
    with Process(f"up {connect}", [build / "bin" / "tensorlane", "up", "--config", config], folder / "logs") as up:
        wait_all_ready(up)
        ready_sec = time.monotonic() - start
        time.sleep(SETTLE_SEC)
        pids = children_of(up.pid)
        if len(pids) != count:
            up.fail(f"has {len(pids)} workers instead of {count}")
        result = {"connect": connect, "count": count, "ready_seconds": ready_sec,
                  "resident_bytes": statistics.median(status_field(pid, "VmRSS") for pid in pids),
                  "proportional_bytes": statistics.median(proportional_bytes(pid) for pid in pids),
                  "thread_count": statistics.median(status_field(pid, "Threads") for pid in pids),
                  "descriptor_count": statistics.median(len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))
                                                        for pid in pids)}
        start = time.monotonic()
        up.stop()
        result["stop_seconds"] = time.monotonic() - start
    return result
