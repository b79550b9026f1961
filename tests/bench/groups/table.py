# SPDX-License-Identifier: Apache-2.0
"""The table of ./dev bench --groups."""
import statistics

from measures import quartiles
from peers import PEER_ROWS
from rows import BESIDE, BY_TITLE, LOCAL_TARGET, MEASURES, VARIANTS

HEAD = ["transport", "progress", "workload", "for one tensor", *VARIANTS, "ratio", "middle half", "target", ""]
OWN = ("single", "group")  # ways of this tree


def amount(measure, values):
    if not values:
        return "-"
    value = statistics.median(values)
    return f"{value:.4f}" if measure == "messages" else f"{value * 1e6:,.2f}"


def ratio_cells(theirs, ours, target):
    """How many times less ours is, round by round; nothing when one of them was not measured."""
    ratios = [their / our for their, our in zip(theirs or (), ours or ()) if our > 0]
    if not ratios:
        return ["-"] * 4
    ratio = statistics.median(ratios)
    low, high = quartiles(ratios)
    wanted = ["-", "-"] if target is None else [f">= {target:.2f}", "ok" if ratio >= target else "below"]
    return [f"{ratio:.2f}", f"{low:.2f}..{high:.2f}", *wanted]


def row_lines(transport, progress, title, variants):
    """A workload with all ways to receive it, a line for each measure."""
    row = BY_TITLE[title]
    for measure in row.measures:
        target = row.targets.get(measure, {}).get(transport)
        values = {variant: variants.get(variant, {}).get(measure) for variant in VARIANTS}
        yield [transport, progress, title, MEASURES[measure],
               *(amount(measure, values[variant]) for variant in VARIANTS),
               *ratio_cells(values["before"], values["group"], target)]


def beside_line(transport, progress, title, variant, theirs, ours, target):
    cells = ["-"] * len(VARIANTS)
    cells[list(VARIANTS).index(variant)] = amount("seconds", ours)
    return [transport, progress, title, MEASURES["seconds"], *cells, *ratio_cells(theirs, ours, target)]


def beside_lines(samples):
    """Times of this tree beside other times of this tree."""
    for transport, by_progress in samples.items():
        for progress, rows in sorted(by_progress.items()):
            for title, other, target in BESIDE:
                for variant in OWN:
                    if variant in rows.get(title, {}) and variant in rows.get(other, {}):
                        yield beside_line(transport, progress, f"{title}, beside: {other}", variant,
                                          rows[other][variant]["seconds"], rows[title][variant]["seconds"],
                                          target if variant == "group" else None)
    for progress, rows in sorted(samples.get("local", {}).items()):
        for title in sorted(rows, key=list(BY_TITLE).index):
            variants, others = rows[title], samples.get("grpc", {}).get(progress, {}).get(title, {})
            for variant in OWN:
                if variant in variants and variant in others:
                    yield beside_line("local", progress, f"{title}, beside gRPC", variant, others[variant]["seconds"],
                                      variants[variant]["seconds"], LOCAL_TARGET)


def peer_lines(samples, peers):
    """Times of this tree's groups beside those of other systems, which stand in the column of what was before."""
    for row in PEER_ROWS:
        theirs = peers.get(f"{row.name} {row.title}")
        for progress, rows in sorted(samples.get(row.transport, {}).items()):
            ours = rows.get(row.title, {}).get("group", {}).get("seconds")
            if theirs and ours:
                cells = [amount("seconds", theirs), "-", amount("seconds", ours)]
                yield [row.transport, progress, f"{row.title}, beside: {row.peer}", MEASURES["seconds"], *cells,
                       *ratio_cells(theirs, ours, row.targets.get(progress))]


def lines(samples, peers):
    """samples: as those of Rounds; peers: as those of Peers."""
    yield HEAD
    for transport, by_progress in samples.items():
        for progress, rows in sorted(by_progress.items()):
            for title in sorted(rows, key=list(BY_TITLE).index):
                yield from row_lines(transport, progress, title, rows[title])
    yield from beside_lines(samples)
    yield from peer_lines(samples, peers)


def short_lines(samples):
    """The table of docs/benchmarks.md: a line for each workload, with the ratios of all measures."""
    yield ["transport", "progress", "workload", "before or beside, us", "group, us",
           *(cell for measure in MEASURES for cell in (measure_name(measure), "target"))]
    for transport, by_progress in samples["ours"].items():
        for progress, rows in sorted(by_progress.items()):
            for title in sorted(rows, key=list(BY_TITLE).index):
                variants = {variant: rows[title].get(variant, {}) for variant in ("before", "group")}
                yield [transport, progress, title,
                       *(amount("seconds", variants[variant].get("seconds")) for variant in ("before", "group")),
                       *(cell for measure in MEASURES for cell in short_cells(BY_TITLE[title], transport, measure,
                                                                               variants))]
    for line in (*beside_lines(samples["ours"]), *peer_lines(samples["ours"], samples["peers"])):
        transport, progress, title, _, theirs, _, ours, ratio, _, target, verdict = line
        if ours != "-":
            yield [transport, progress, title, theirs, ours, ratio, f"{target} {verdict}".strip("- ") or "-",
                   *["-"] * 4]


def measure_name(measure):
    return MEASURES[measure].removesuffix(", us")


def short_cells(row, transport, measure, variants):
    """A ratio and its target."""
    values = [variants[variant].get(measure) for variant in ("before", "group")]
    if measure not in row.measures:
        return ["-", "-"]
    ratio, _, target, verdict = ratio_cells(*values, row.targets.get(measure, {}).get(transport))
    return [ratio, f"{target} {verdict}".strip("- ") or "-"]


def show(samples):
    """samples: all that was measured."""
    cells = list(lines(samples["ours"], samples["peers"]))
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    for name, reason in samples["skipped"].items():
        print(f"skipped: {name}: {reason}")
