#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""How large structs may be: none has more than 40 fields. A struct that only the files of one folder see has at most 15
fields when many files include its header."""
import re

import source

MAX_FIELDS = 40
MAX_SHARED_FIELDS = 15
MAX_INCLUDERS = 8

TOKEN = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
STRUCT = re.compile(r"^struct (\w+)\s*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def count_fields(body):
    """The fields of a struct, and of those that are defined in it."""
    body = TOKEN.sub("", body)
    while "(" in body:
        body = re.sub(r"\([^()]*\)", "", body)
    body = re.sub(r"\benum \w*\s*\{[^{}]*\}", "", body)
    return sum(part.count(",") + 1 for part in re.split(r"[;{}]", body) if part.strip())


def large_structs(texts):
    """Structs with too many fields: yields (path, name, fields, the most there may be)."""
    includers = {}
    for path, text in texts.items():
        for name in set(INCLUDE.findall(text)):
            includers[name] = includers.get(name, 0) + (not str(path).startswith("tests/"))
    for path, text in texts.items():
        is_shared = path.stem.endswith("internal") and includers.get(str(path), 0) > MAX_INCLUDERS
        limit = MAX_SHARED_FIELDS if is_shared else MAX_FIELDS
        for match in STRUCT.finditer(text):
            count = count_fields(match[2])
            if count > limit:
                yield path, match[1], count, limit


def main():
    files = source.files(".c", ".h")
    texts = {path: source.read(path) for path in files}
    source.finish([f"{path}: struct {name} has {count} fields; there may be {limit}"
                   for path, name, count, limit in large_structs(texts)], len(files))


if __name__ == "__main__":
    main()
