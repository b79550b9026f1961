#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What names, comments and lines must be like: no retired words in the identifiers of C, no comment of C that begins
with "of" or speaks of nobody or somebody, no long lines in code and documents, no section banner that the formatter has
split.

Retired words are those that the project once used instead of the field's terms (docs/design.md, "Words").
"""
import re

import source

# The retired words, and what to use instead.
RETIRED = {
    "letter": "closure", "porter": "helper", "door": "accept_socket", "driver": "progress", "home": "executor",
    "guest": "client_peer", "loan": "borrow", "plane": "transport", "introduction": "address", "introduce": "address",
    "greeting": "handshake", "greet": "handshake", "sever": "disconnect", "silence": "peer_timeout", "news": "packets",
    "remains": "leftovers", "errand": "deferred_call", "told": "sent or reported",
    "turn": "pending post, round or sequence", "room": "space or memory",
}
# "guest" is the right word for the virtual machine of these tests.
GUEST_FOLDER = "tests/rdma_vm"
# "data plane" is a standard term.
DATA_PLANE = re.compile(r"data_?plane", re.IGNORECASE)
MAX_LINE = 120

TOKEN = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*", re.DOTALL)
SPLIT_BANNER = re.compile(r"^/\* -{10,}[^\n]*(?<!\*/)$", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
# A comment is a sentence, or says what a thing is; a machine, process or thread is no somebody.
FRAGMENT = re.compile(r"^[/*\s]+(of)\b|\b((?i:nobody|somebody|anybody|no one|someone|whoever|whom))\b")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def retired_in(path, text):
    """Yields (identifier, word) for each retired word in the identifiers of a C file."""
    seen = set()
    for match in TOKEN.finditer(text):
        name = match[0]
        if name[0] in "/\"'" or name in seen or name == "LETTERS":  # those of an alphabet
            continue
        seen.add(name)
        for part in DATA_PLANE.sub("", name).lower().split("_"):
            word = part if part in RETIRED else part.removesuffix("s") if part.removesuffix("s") in RETIRED else None
            if word and not (word == "guest" and str(path).startswith(GUEST_FOLDER)):
                yield name, word


def fragments_in(text):
    """Yields (line, word) for each comment of C that does not say plainly what it is about."""
    for match in TOKEN.finditer(text):
        found = FRAGMENT.search(" ".join(match[0].split())) if COMMENT.fullmatch(match[0]) else None
        if found:
            yield text.count("\n", 0, match.start()) + 1, found[1] or found[2]


def is_checked(path):
    """Returns whether lines of the file have a greatest length: documents, Python and scripts, not data."""
    return path.suffix in (".md", ".proto", ".py", ".pyi") or source.read(path).startswith("#!")


def main():
    problems = []
    files = source.files(".c", ".h")
    for path in files:
        if str(path).startswith("tests/package/first_version"):
            continue
        text = source.read(path)
        problems += [f"{path}: {name}: say {RETIRED[word]}" for name, word in retired_in(path, text)]
        problems += [f"{path}:{line}: a comment with '{word}': write a sentence that names what it is about"
                     for line, word in fragments_in(text)]
        problems += [f"{path}: a section banner is split: {banner}" for banner in SPLIT_BANNER.findall(text)]
    for path in files + [path for path in source.files(".md", ".proto", ".py", ".pyi", "") if is_checked(path)]:
        text = source.read(path)
        if path.suffix == ".md":  # The output of programs stays as it is.
            text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
        problems += [f"{path}:{number}: {len(line)} characters; there may be {MAX_LINE}"
                     for number, line in enumerate(text.splitlines(), 1)
                     if len(line) > MAX_LINE and not line.startswith("|") and "http" not in line]
    source.finish(problems, len(files))


if __name__ == "__main__":
    main()
