#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A fuzz campaign in an empty folder goes on with the counts and the corpora that the repository keeps, and it takes an
edge for new only when no slice before has reached it."""
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile

import source

CAMPAIGN = source.ROOT / "tests/fuzz/campaign"
STORED = source.ROOT / "tests/fuzz/campaign_state"
MOST_BYTES = 2 << 20


def problems_of(folder, state):
    targets = {path.name[: -len("_fuzz.c")] for path in (source.ROOT / "tests/fuzz").glob("*_fuzz.c")}
    if wrong := set(state["targets"]) - targets:
        yield f"campaign_state: {wrong} is no target"
    for path in STORED.iterdir():
        if path.stat().st_size > MOST_BYTES:
            yield f"{path.name}: has more than {MOST_BYTES} bytes"
    table = subprocess.run([sys.executable, "-B", CAMPAIGN, folder, "--table"],
                           capture_output=True, text=True, check=True).stdout
    for target in targets:
        executions = state["targets"].get(target, {"executions": 0})["executions"]
        if f"| {target} | {executions / 1e6:.2f} million |" not in table:
            yield f"the campaign does not begin with the {executions} executions of {target}:\n{table}"
    with tarfile.open(STORED / "corpus.tar.xz") as archive:
        for member in archive:
            path = folder / "corpus" / member.name
            if not path.is_file() or path.read_bytes() != archive.extractfile(member).read():
                yield f"the campaign does not begin with the input {member.name}"


def load_campaign():
    loader = importlib.machinery.SourceFileLoader("campaign", str(CAMPAIGN))
    campaign = importlib.util.module_from_spec(importlib.util.spec_from_loader("campaign", loader))
    loader.exec_module(campaign)
    return campaign


def slice_of(edges, *functions):
    """Returns what a slice says that did not reach these lines of each function; None is a function not called."""
    said = f"#1\tINITED cov: {edges} ft: 1 corp: 1/1b\nstat::number_of_executed_units: 2\nCOVERAGE:\n"
    for number, lines in enumerate(functions):
        said += f"{'UN' if lines is None else ''}COVERED_FUNC: hits: 1 edges: 1/4 f{number} {source.ROOT}/f.c:1\n"
        said += "".join(f"  UNCOVERED_PC: {source.ROOT}/f.c:{line}\n" for line in lines or ())
    return said


def wrong_news(folder):
    campaign = load_campaign().Campaign(folder, ["npy"])
    campaign.programs = {"npy": "this one"}
    slices = [
        ("of another program", slice_of(5, (2, 3, 3), None), True),
        ("with other edges that are reached for the first time", slice_of(5, (3, 3, 4), None), True),
        ("with edges that one slice or the other has reached", slice_of(7, (3, 3), None), False),
        ("with fewer edges", slice_of(4, (2, 3, 3, 4), None), False),
        ("with the second edge of a line", slice_of(4, (2, 3, 4), None), True),
        ("with a function that was not called before", slice_of(4, (2, 3, 4), (8, 9)), True),
        ("without that function", slice_of(4, (2, 3, 4), None), False),
        ("with another edge of that function", slice_of(4, (2, 3, 4), (8,)), True),
    ]
    for name, said, is_news in slices:
        with contextlib.redirect_stdout(io.StringIO()):
            campaign.count("npy", 0, said, 1.0)
        if (campaign.state["targets"]["npy"]["news_seconds"] == campaign.state["targets"]["npy"]["seconds"]) != is_news:
            yield f"a slice {name} is {'not ' if is_news else ''}taken for news"


def main():
    state = json.loads((STORED / "state.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        problems = list(problems_of(pathlib.Path(folder), state)) + list(wrong_news(pathlib.Path(folder)))
    source.finish(problems, len(state["targets"]))


if __name__ == "__main__":
    main()
