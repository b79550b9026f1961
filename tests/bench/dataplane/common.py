# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of the data plane share: running pairs of programs, ratios of medians, and their sections of
docs/benchmarks.md."""
import pathlib
import statistics
import subprocess
import textwrap
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM_SEC = 120
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
# The card of the virtual machine.
DEVICE, GID, GUEST_ADDRESS = "rxe0", "1", "10.10.0.1"
GUEST_UCX = {"UCX_IB_GID_INDEX": GID, "UCX_WARN_UNUSED_ENV_VARS": "n"}


def last_numbers(text):
    """The numbers of the last line that has only numbers."""
    for line in reversed(text.splitlines()):
        try:
            return [float(word) for word in line.split()]
        except ValueError:
            continue
    raise ValueError(f"no numbers in {text!r}")


def pair(*command, address, env=None):
    """Runs a program as server, and as client of it; what the client prints."""
    environment = {"PATH": PATH, **(env or {})}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        for _ in range(60):
            time.sleep(0.1)
            client = subprocess.run([*command, address], capture_output=True, text=True, timeout=PROGRAM_SEC,
                                    env=environment, check=False)
            if client.returncode == 0:
                return client.stdout
        raise RuntimeError(f"{command}: {client.stdout}{client.stderr}")
    finally:
        server.kill()
        server.wait()


def perftest(name, size, count, *options):
    """The numbers of a program of perftest, in the virtual machine."""
    return last_numbers(pair(name, "-d", DEVICE, "-x", GID, "-F", "-s", str(size), "-n", str(count), *options,
                             address=GUEST_ADDRESS))


def ucx_put_per_sec(way, size, count):
    """Puts in a second by UCX in the virtual machine, zcopy or bcopy."""
    return last_numbers(pair("ucx_perftest", "-x", "rc_verbs", "-d", f"{DEVICE}:1", "-t", "put_bw", "-D", way, "-s",
                             str(size), "-n", str(count), "-f", address=GUEST_ADDRESS, env=GUEST_UCX))[-1]


# ---------------------------------------------------------------------------------------------------------- ratios --

def amount(name, value):
    """name: of the sample, whose last word is its unit."""
    if name.endswith("_us"):
        return f"{value:,.2f} us" if value < 10 else f"{value:,.1f} us"
    if name.endswith("_per_sec"):
        return f"{value:,.0f}/s"
    if name.endswith("_bw"):
        return f"{value:,.1f} MiB/s"
    return f"{value:.3f} s"


def verdict(ratio, is_more_better, target):
    if target is None:
        return "-"
    bound = f"{'>=' if is_more_better else '<='} {target}"
    is_met = ratio >= target if is_more_better else ratio <= target
    return f"{bound} {'ok' if is_met else 'not met'}"


def table(rows, samples):
    """rows: title, the name of ours, the peer, the peer's as a function of the medians, whether more is better, and the
    target. A peer of None: there is nothing to compare with. A row of which one side is missing is left out."""
    medians = {name: statistics.median(values) for name, values in samples.items() if values}
    yield ["measure", "ours", "peer", "peer's", "ratio", "target"]
    for title, ours, peer, peers_value, is_more_better, target in rows:
        if ours not in medians:
            continue
        if peer is None:
            yield [title, amount(ours, medians[ours]), "-", "-", "-", "-"]
            continue
        theirs = peers_value(medians)
        if theirs is None:
            continue
        ratio = medians[ours] / theirs
        yield [title, amount(ours, medians[ours]), peer, amount(ours, theirs), f"{ratio:.2f}",
               verdict(ratio, is_more_better, target)]


def show(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


# ------------------------------------------------------------------------------------------------------------ docs --

def write_section(mark, title, before, rows, after):
    """Replaces the section between the marks of docs/benchmarks.md, or adds it. before, after: paragraphs."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    path = ROOT / "docs" / "benchmarks.md"
    text = path.read_text()
    head, *body = rows
    before, after = (textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)
                     for paragraph in (before, after))
    lines = [begin, "", f"## {title}", "", before, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    block = "\n".join([*lines, "", after, "", end])
    if begin in text:
        text = text[:text.index(begin)] + block + text[text.index(end) + len(end):]
    else:
        text = text.rstrip("\n") + "\n\n" + block + "\n"
    path.write_text(text)
