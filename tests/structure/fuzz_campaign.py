#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A fuzz campaign in an empty folder goes on with the counts and the corpora that the repository keeps."""
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile

import source

STORED = source.ROOT / "tests/fuzz/campaign_state"
MOST_BYTES = 2 << 20


def problems_of(folder, state):
    targets = {path.name[: -len("_fuzz.c")] for path in (source.ROOT / "tests/fuzz").glob("*_fuzz.c")}
    if wrong := set(state["targets"]) - targets:
        yield f"campaign_state: {wrong} is no target"
    for path in STORED.iterdir():
        if path.stat().st_size > MOST_BYTES:
            yield f"{path.name}: has more than {MOST_BYTES} bytes"
    table = subprocess.run([sys.executable, "-B", source.ROOT / "tests/fuzz/campaign", folder, "--table"],
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


def main():
    state = json.loads((STORED / "state.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        problems = list(problems_of(pathlib.Path(folder), state))
    source.finish(problems, len(state["targets"]))


if __name__ == "__main__":
    main()
