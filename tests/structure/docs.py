#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What documents name must exist: messages that docs/troubleshooting.md explains, files, and sections.

A heading of docs/troubleshooting.md in backticks is a message of a program, with ... in the place of what varies. Each
of its parts must be in a text of the sources.
"""
import re

import source

LITERAL = r'"((?:\\.|[^"\\\n])*)"'
LITERALS = re.compile(rf"{LITERAL}(?:\s*{LITERAL})*")
SOURCES = ("base/", "config/", "control/", "dataplane/", "server/", "tensor/")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]*)\)")
# A text in backticks that begins with a folder of the tree names a file or a folder.
FOLDERS = "base|config|control|dataplane|deploy|docs|examples|include|proto|server|tensor|tests"
NAMED = re.compile(rf"`((?:{FOLDERS})/[\w./*-]*)`")


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


def main():
    problems = []
    documents = source.files(".md")
    for path in documents:
        problems += problems_of(path, source.read(path))
    said = texts()
    troubles = list(messages(source.read("docs/troubleshooting.md")))
    problems += [f"docs/troubleshooting.md: no program says: {part} ({heading})" for heading, part in troubles
                 if part not in said]
    source.finish(problems, len(documents) + len(troubles))


if __name__ == "__main__":
    main()
