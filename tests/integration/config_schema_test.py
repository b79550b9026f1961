#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""config/schema.json and `tensorlane config check` agree on every file of the corpus.

config_schema_test.py [PROGRAM]

PROGRAM is a tensorlane, by default the one in $TENSORLANE. Both accept the files in good and refuse those in bad. Only
the program refuses files in bad_semantic, because a schema cannot express what is wrong with them. The examples in
config/examples and docs/config.md are good. A JSON text that a strict reader refuses counts as refused by the schema.
When the program refuses a file, its exit status is 1 to 127, and its message begins with file, line and column.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import jsonschema
except ImportError:
    print("python3-jsonschema is not installed")
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CORPUS = HERE / "config_corpus"
# For each folder: whether the schema accepts its files, and whether the program does.
VERDICTS = {"good": (True, True), "bad": (False, False), "bad_semantic": (True, False)}
LEAST = {"good": 15, "bad": 150, "bad_semantic": 15}


def unique(pairs):
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def read_strictly(path):
    """Returns the value of a JSON text as RFC 8259 defines it: UTF-8, no byte order mark, no NUL, unique keys, real
    characters."""
    text = path.read_bytes().decode("utf-8")
    value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def schema_accepts(validator, path):
    try:
        value = read_strictly(path)
    except (ValueError, RecursionError):
        return False
    return validator.is_valid(value)


def check_program(program, path, expected):
    """Returns what is wrong with how the program treats the file, or None."""
    result = subprocess.run([program, "config", "check", path], capture_output=True, timeout=180, check=False)
    words = result.stderr.decode("utf-8", "replace").strip()
    if result.returncode < 0 or result.returncode > 127:
        return f"the program ended with {result.returncode}: {words}"
    if (result.returncode == 0) != expected:
        return f"the program {'refuses' if expected else 'accepts'} it: {words}"
    if not expected and not re.search(re.escape(str(path)) + r":[1-9]\d*:[1-9]\d*: .+", words):
        return f"the message has no file, line and column: {words}"
    return None


def manual_examples(folder):
    """Writes the configurations of the manual to the folder, and returns the files."""
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    for number, block in enumerate(re.findall(r"^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE), 1):
        path = folder / f"manual_{number}.json"
        path.write_text(block, encoding="utf-8")
        yield path


def main():
    with tempfile.TemporaryDirectory() as folder:
        return run(pathlib.Path(folder))


def run(folder):
    program = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TENSORLANE", "")
    if not program:
        print("there is no tensorlane program")
        return 77
    schema = json.loads((ROOT / "config/schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    files = [(path, *VERDICTS[folder]) for folder in VERDICTS for path in sorted((CORPUS / folder).iterdir())]
    examples = sorted((ROOT / "config/examples").glob("*.json")) + list(manual_examples(folder))
    files += [(path, True, True) for path in examples]
    problems = []
    if len(examples) < 6:
        problems.append(f"only {len(examples)} examples")
    for name, least in LEAST.items():
        count = sum(path.parent.name == name for path, _, _ in files)
        if count < least:
            problems.append(f"{CORPUS / name}: only {count} files")
    for path, by_schema, by_program in files:
        if schema_accepts(validator, path) != by_schema:
            problems.append(f"{path}: the schema {'refuses' if by_schema else 'accepts'} it")
        problem = check_program(program, path, by_program)
        if problem:
            problems.append(f"{path}: {problem}")
    print("\n".join(problems) or f"{len(files)} files, one verdict")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
