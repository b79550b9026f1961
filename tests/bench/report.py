# SPDX-License-Identifier: Apache-2.0
"""The results as a table on the terminal, as docs/benchmarks.md and as a plot."""
import pathlib
import platform
import subprocess

MIB = 1 << 20
LARGE_BYTES = 1 << 16  # from here on a rate says more than a time


# -------------------------------------------------------------------------------------------------------- machine --

def first_line(*command):
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return (result.stdout.strip().splitlines() or ["unknown"])[0]


def package_version(name):
    return first_line("dpkg-query", "-W", "-f", "${Version}\\n", name)


def cpu_field(name):
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def processor():
    return f"{cpu_field('model name')}, family {cpu_field('cpu family')}, model {cpu_field('model')}"


def huge_pages():
    """The setting that is chosen of those that each file lists: for anonymous memory, and for shared memory."""
    chosen = []
    for name, what in (("enabled", "anonymous"), ("shmem_enabled", "shared")):
        path = pathlib.Path("/sys/kernel/mm/transparent_hugepage", name)
        words = path.read_text().partition("[")[2].partition("]")[0] if path.exists() else "not in this kernel"
        chosen.append(f"{what} {words}")
    return ", ".join(chosen)


def describe_machine(build):
    """What the numbers depend on."""
    memory_kib = int(pathlib.Path("/proc/meminfo").read_text().split()[1])
    processors = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cores = sum(line.startswith("processor") for line in processors)
    machine = {"processor": processor(), "huge pages": huge_pages(), "cores": cores, "memory": mib(memory_kib * 1024),
               "hypervisor": "yes" if "hypervisor" in cpu_field("flags").split() else "no",
               "kernel": platform.release(), "transport": "TCP over the loopback interface"}
    congestion = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")
    machine["congestion control"] = congestion.read_text().strip() if congestion.exists() else "unknown"
    cache = pathlib.Path(build, "CMakeCache.txt").read_text().splitlines()
    build_type = next((line.partition("=")[2] for line in cache if line.startswith("CMAKE_BUILD_TYPE:")), "unknown")
    versions = {"tensorlane": first_line(build / "bin" / "tensorlane", "--version"), "build": build_type,
                "compiler": first_line("cc", "--version"), "libgrpc29": package_version("libgrpc29"),
                "libgrpc++1.51": package_version("libgrpc++1.51"), "libc6": package_version("libc6")}
    return machine, versions


# ---------------------------------------------------------------------------------------------------------- numbers --

def amount(seconds, size_bytes):
    """A rate for large tensors, a time for small ones."""
    if size_bytes >= LARGE_BYTES:
        return f"{size_bytes / seconds / 1e6:,.0f} MB/s"
    return f"{seconds * 1e6:,.1f} us"


def verdict(is_met):
    return {None: "-", True: "ok", False: "below"}[is_met]


def target(row):
    return "-" if row["target"] is None else f">= {row['target']:.2f}"


def ratio(row):
    return f"{row['ratio']:.2f}"


def spread(row):
    return f"{row['ratio_low']:.2f}..{row['ratio_high']:.2f}"


def mib(count):
    return f"{count / MIB:,.1f} MiB"


def comparison_cells(rows):
    yield ["measure", "progress", "ours", "peer", "fastest peer", "peer's", "ratio", "middle half", "target", ""]
    for row in rows:
        yield [row["measure"], row["progress"], amount(row["ours_seconds"], row["size_bytes"]), row["peer"],
               row["peer_variant"].split()[-1], amount(row["peer_seconds"], row["size_bytes"]), ratio(row),
               spread(row), target(row), verdict(row["is_met"])]


def processor_cells(rows):
    """What both sides together cost, once per variant."""
    yield ["measure", "program", "processor time, sender and receiver, per tensor"]
    seen = set()
    for row in rows:
        for name, seconds in ((f"tensorlane, {row['progress']}", row["ours_cpu_seconds"]),
                              (row["peer_variant"], row["peer_cpu_seconds"])):
            if (row["measure"], name) not in seen:
                seen.add((row["measure"], name))
                yield [row["measure"], name, f"{seconds * 1e6:,.1f} us"]


def model_cells(model):
    yield ["VGG16, 553 MB", "first pull", "second pull"]
    for progress, seconds in model["summary"]["progress"].items():
        yield [f"receiver, {progress}", *(f"{seconds[which]:.3f} s, {amount(seconds[which], model['tensor_bytes'])}"
                                          for which in ("first_seconds", "second_seconds"))]
    seconds = model["summary"]["pull_command_seconds"]
    yield ["tensorlane pull", f"{seconds:.3f} s, {amount(seconds, model['tensor_bytes'])}", "-"]


def memory_cells(model):
    yield ["peak memory (VmHWM)", "peak", "limit: payload + 64 MiB", ""]
    for line in model["summary"]["memory"]:
        yield [line["who"], mib(line["peak_bytes"]), mib(line["limit_bytes"]), verdict(line["is_met"])]


def worker_cells(clusters):
    yield ["workers", "connections", "all ready after", "resident", "proportional", "threads", "descriptors", "stopped"]
    for cluster in clusters:
        yield [str(cluster["count"]), cluster["connect"], f"{cluster['ready_seconds']:.2f} s",
               mib(cluster["resident_bytes"]), mib(cluster["proportional_bytes"]), f"{cluster['thread_count']:.0f}",
               f"{cluster['descriptor_count']:.0f}", f"{cluster['stop_seconds']:.2f} s"]


def all_tables(results):
    """Title and cells of every table that there are results for."""
    if results["rows"]:
        yield "Comparison", list(comparison_cells(results["rows"]))
        yield "Processor time", list(processor_cells(results["rows"]))
    if results["model"]:
        yield "A whole model", list(model_cells(results["model"]))
        yield "Memory", list(memory_cells(results["model"]))
    if results["workers"]:
        yield "Many workers on one machine", list(worker_cells(results["workers"]))


# --------------------------------------------------------------------------------------------------------- terminal --

def plain(cells):
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def show(results):
    for title, cells in all_tables(results):
        print(f"\n{title}\n{plain(cells)}")
    for name, reason in results["skipped"].items():
        print(f"\nskipped: {name}: {reason}")
    print()


# ------------------------------------------------------------------------------------------------------------- docs --

def markdown(cells):
    lines = ["| " + " | ".join(cell or " " for cell in row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]])


EXPLAINED = {
    "Comparison": """Ratio: how many times faster ours is, from the medians of {rounds} rounds; above 1 is faster.
Middle half: the quartiles of the rounds' own ratios. A tensor is *published* (it stays, any number of receivers) or
*sent* (one receiver). Progress: *thread*, a thread of the library moves the data, the default; *caller*, the
thread that waits. Only ratios of one run mean anything: rates and times are those of a small virtual machine.""",
    "Processor time": """User and kernel time of all threads of both processes, over all rounds.""",
    "A whole model": """All 32 tensors of VGG16 are asked for at once from `tensorlane serve`, which has mapped the
file. The first pull of a receiver connects and allocates, the second is into the same tensors. Medians of {repeats}
receivers. Neither includes verification. `tensorlane pull` receives into the mapped output file; its time is the
transfer's.""",
    "Memory": """The highest peak among those receivers, and the server's after all of them. The payload is the tensors'
bytes for a receiver, the file's for the server.""",
    "Many workers on one machine": """`tensorlane up` with one job of so many tasks in gRPC-only mode. *lazy*: a worker
connects when it is asked to; *eager*: each connects to all others. Medians of the workers, {settle} s after all were
ready. Proportional: shared pages divided among those who share them.""",
}

PREAMBLE = """# Benchmarks

Written by `./dev bench --write-docs`, the sections on the data plane by `./dev bench` with `--rdma`, `--local` or
`--seeds` (VGG16 and a tensor of 100 MB over each transport) and `--write-docs`; the raw numbers of a run are in
`build/bench/results.json`.

![ratios](benchmarks.svg)

## How

Sender and receiver are two processes on one machine. Ours compares what it has received with what was sent, outside of
the time; the gRPC C++ peer counts the bytes. All variants of a group run in turn, round after round, each for about
{sample} s, in another order in every round; there are {starts} starts of all programs. The peers:

- **gRPC C++** of Debian. `unary_typed`: the call that gRPC generates, a protobuf message with a `bytes` field, which is
  left where the message has it; synchronous client and server. `unary_raw`: the same call with `ByteBuffer`, sent
  without a copy, copied once into the destination. `unary_tuned`: that, without bandwidth probing, the best of the
  channel arguments that were tried. `unary_async_server`: `unary_raw` to a completion-queue server. `stream`,
  `stream_tuned`: one stream that stays open, a request per tensor, 1 MiB chunks sent without a copy and copied once
  into the destination. `burst_*`: 1,000 asynchronous calls on a completion queue, the next 1,000 when all are answered;
  `window_*`: always 1,000. The fastest variant is the peer; the unary call of 64 MiB, where the variants are far apart,
  has a row for each. Its sockets use the system's congestion control, ours over loopback use `reno`.
- **TensorFlow** from PyPI: a variable of one task is read by another over TensorFlow's own gRPC server.
- **PyTorch** from PyPI: `send` and `recv` of the gloo backend; the sender does not wait to be asked.
"""


def other_sections(path):
    """The sections of the page that other benchmarks have written, which come last, between marks of theirs."""
    text = path.read_text() if path.exists() else ""
    _, mark, rest = text.partition("\n<!-- ")
    return mark + rest


def write_docs(results, path):
    settings = results["settings"]
    text = [PREAMBLE.format(sample=settings["sample_seconds"], starts=settings["starts"])]
    text.append("## Machine and versions\n")
    text += [f"- {key}: {value}"
             for key, value in {**results["machine"], **results["versions"]}.items()]
    text.append(f"- load when the run began and ended: {results['load'][0]:.2f}, {results['load'][1]:.2f}\n")
    text.append("## Commands\n\n```\n" + "\n".join(results["commands"]) + "\n```\n")
    for title, cells in all_tables(results):
        explained = EXPLAINED[title].format(rounds=settings["rounds"], repeats=settings["model_repeats"],
                                            settle=settings["settle_seconds"])
        text.append(f"## {title}\n\n{explained}\n\n{markdown(cells)}\n")
    text += [f"Skipped: {name}: {reason}\n" for name, reason in results["skipped"].items()]
    path.write_text("\n".join(text) + other_sections(path))


# ------------------------------------------------------------------------------------------------------------- plot --

def plot(rows, path):
    """Ratios as bars, targets as marks, on a logarithmic axis. Returns why there is none, or None."""
    try:
        import matplotlib
        matplotlib.use("svg")
        matplotlib.rcParams["svg.hashsalt"] = "tensorlane"
        from matplotlib import pyplot, ticker
    except ImportError as error:
        return f"{error} (Debian: python3-matplotlib)"
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.26 * len(rows)))
    places = range(len(rows))
    ratios = [row["ratio"] for row in rows]
    errors = [[max(0, row["ratio"] - row["ratio_low"]) for row in rows],
              [max(0, row["ratio_high"] - row["ratio"]) for row in rows]]
    colours = ["#c0504d" if row["is_met"] is False else "#4f81bd" if row["progress"] == "thread" else "#9bbb59"
               for row in rows]
    axes.barh(places, ratios, xerr=errors, color=colours, ecolor="#555555", height=0.7)
    for place, row in zip(places, rows):
        if row["target"] is not None:
            axes.plot([row["target"]] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axes.set_yticks(places, [f"{row['measure']} vs {row['peer']} ({row['progress']})" for row in rows], fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.axvline(1, color="#888888", linewidth=0.8)
    axes.set_xlabel("times faster than the peer; blue: thread, green: caller, red: below target; black mark: target",
                    fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    return None
