# SPDX-License-Identifier: Apache-2.0
"""The table of ./dev bench --python."""
import statistics

from measures import quartiles

HEAD = ["measure", "ours", "beside", "its", "ratio", "middle half", "target", ""]


def amount(seconds):
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.2f} us"
    return f"{seconds * 1e3:,.2f} ms"


def compare(kind, ours, theirs):
    """What a target bounds, in one round."""
    if kind == "more":
        return (ours - theirs) * 1e6
    return ours / theirs if kind == "part" else theirs / ours


def verdict(row, value):
    if row.target is None:
        return ["-", ""]
    is_met = value >= row.target if row.kind == "faster" else value <= row.target
    return [f"{'>=' if row.kind == 'faster' else '<='} {row.target}", "ok" if is_met else "below"]


def line(row, ours, theirs):
    """The samples of both, round by round. The value is the median of the rounds' own: a machine that is slower for
    longer than a round is so for both."""
    values = [compare(row.kind, our, their) for our, their in zip(ours, theirs)]
    value = statistics.median(values)
    low, high = quartiles(values)
    unit = " us more" if row.kind == "more" else ""
    return [row.title, amount(statistics.median(ours)), row.peer_title, amount(statistics.median(theirs)),
            f"{value:.2f}{unit}", f"{low:.2f}..{high:.2f}", *verdict(row, value)]


def lines(rows, samples):
    """samples: name of a variant -> seconds for one tensor, in each round. Rows of which a side is missing are left
    out."""
    yield HEAD
    for row in rows:
        if row.ours.name in samples and row.peer.name in samples:
            yield line(row, samples[row.ours.name], samples[row.peer.name])
