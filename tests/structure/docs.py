#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What documents name must exist: messages that docs/troubleshooting.md explains, files, sections, and measurements.

A heading of docs/troubleshooting.md in backticks is a message of a program, with ... in the place of what varies. Each
of its parts must be in a text of the sources. A time or rate in docs/comparison.md is one of docs/benchmarks.md, which
the benchmarks write; after "some" it is rounded. That support for GPUs has not run on hardware is said until
docs/evidence has a log.
"""
import re

import source

LITERAL = r'"((?:\\.|[^"\\\n])*)"'
LITERALS = re.compile(rf"{LITERAL}(?:\s*{LITERAL})*")
SOURCES = ("base/", "config/", "control/", "dataplane/", "security/", "server/", "tensor/")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]*)\)")
# A text in backticks that begins with a folder of the tree names a file or a folder.
FOLDERS = "base|config|control|dataplane|deploy|docs|examples|include|proto|python|security|server|tensor|tests"
NAMED = re.compile(rf"`((?:{FOLDERS})/[\w./*-]*)`")
MEASURED = re.compile(r"(?<!some )\b\d[\d.,]*(?: to \d[\d.,]*)?\s(?:us|MB/s|MiB/s|/s)\b")


def texts():
    """All texts of the sources, with adjacent literals joined."""
    found = []
    for path in source.files(".c", ".h"):
        if str(path).startswith(SOURCES):
            for match in LITERALS.finditer(source.read(path)):
                found.append("".join(re.findall(LITERAL, match[0])).replace('\\"', '"'))
    return "\n".join(found)


def messages(text):
    """The fixed parts of all messages in headings: yields (heading, part)."""
    for heading in HEADING.findall(FENCE.sub("", text)):
        for message in re.findall(r"`([^`]+)`", heading):
            for part in message.split("..."):
                part = part.strip(" ,;:")
                if len(part) > 3:
                    yield heading, part


def anchor(heading):
    """What GitHub calls the section of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def problems_of(path, text):
    text = FENCE.sub("", text)
    for target in LINK.findall(text):
        if "://" in target:
            continue
        name, _, section = target.partition("#")
        file = path.parent / name if name else path
        if not (source.ROOT / file).exists():
            yield f"{path}: there is no {target}"
        elif section and section not in map(anchor, HEADING.findall(FENCE.sub("", source.read(file)))):
            yield f"{path}: {file} has no section {section}"
    for name in NAMED.findall(text):
        if not any(source.ROOT.glob(name.rstrip("/"))) and "NAME" not in name:  # NAME stands for any
            yield f"{path}: there is no {name}"


def measurements(text):
    """The times and rates in a text, with single spaces."""
    return [" ".join(found.split()) for found in MEASURED.findall(text)]


def problems_of_evidence():
    """Until there is a log of a GPU, the documents say so; then they do not."""
    is_run = any(path.suffix == ".log" for path in source.files() if str(path).startswith("docs/evidence/gpu-"))
    for path in ("README.md", "docs/gpu.md", "server/cli/devices_gpus.c"):
        if ("not yet run on hardware" in source.read(path)) == is_run:
            yield f"{path}: there is {'a' if is_run else 'no'} log of a GPU in docs/evidence"


def main():
    problems = list(problems_of_evidence())
    documents = source.files(".md")
    for path in documents:
        problems += problems_of(path, source.read(path))
    said = texts()
    troubles = list(messages(source.read("docs/troubleshooting.md")))
    problems += [f"docs/troubleshooting.md: no program says: {part} ({heading})" for heading, part in troubles
                 if part not in said]
    measured = set(measurements(source.read("docs/benchmarks.md")))
    compared = measurements(source.read("docs/comparison.md"))
    problems += [f"docs/comparison.md: docs/benchmarks.md has no {found}" for found in compared
                 if found not in measured]
    source.finish(problems, len(documents) + len(troubles) + len(compared))


if __name__ == "__main__":
    main()
