#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""docstrings.py STUBS HEADER: makes the docstrings of the package out of its stubs, which are the only source.

For each class, function, method, property and field NAME the header has a macro DOC_NAME (a dot in the name becomes an
underscore), and DOCSTRINGS lists all with their names. What help() shows is complete: where the stubs refer to
the awaitable form its text follows, and so does what the text of the module says of the arguments that calls share.
"""
import ast
import json
import re
import sys
import textwrap

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKING = re.compile(r"As (\w+), blocking\.")
SHARED = re.compile(r"^- (.*?)(?=^- |\n\n|\Z)", re.MULTILINE | re.DOTALL)
WIDTH = 112
# Longer literals are not portable; the compiler joins adjacent ones.
LITERAL_CHARACTERS = 2000


def signature(function):
    """Returns the line that inspect.signature understands, with which the docstring of a function in C begins."""
    arguments = ast.parse(ast.unparse(function)).body[0].args
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        one.annotation = None
    text = re.sub(r"^self\b", "$self", ast.unparse(arguments))
    return f"{function.name}({text})\n--\n\n"


def shared_words(stubs):
    """Returns what the text of the module says of arguments that calls share, by name."""
    words = {}
    for entry in SHARED.findall(ast.get_docstring(stubs)):
        names = re.findall(r"(?:^|; )(\w+): ", entry)
        for name in names:
            words[name] = textwrap.fill(" ".join(entry.split()), WIDTH)
    return words


def complete(function, methods, words):
    """Returns the docstring of a function with all that it refers to."""
    text = ast.get_docstring(function) or ""
    blocking = BLOCKING.match(text)
    if blocking:
        text = f"{text}\n\n{ast.get_docstring(methods[blocking[1]])}"
    arguments = [one.arg for one in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]
    unexplained = dict.fromkeys(words[name] for name in arguments
                                if name in words and not re.search(rf"(?m)(^|[.,] ){name}(, \w+)*: ", text))
    return "\n\n".join([text, "\n".join(unexplained)])


def members(owner, body, words):
    """Yields (name, text, line with the signature) for everything in a class or in the module."""
    methods = {node.name: node for node in body if isinstance(node, FUNCTIONS)}
    for node, following in zip(body, [*body[1:], None]):
        if isinstance(node, FUNCTIONS) and any(ast.unparse(one) == "property" for one in node.decorator_list):
            yield f"{owner}{node.name}", ast.get_docstring(node) or "", ""
        elif isinstance(node, FUNCTIONS):
            yield f"{owner}{node.name}", complete(node, methods, words), signature(node)
        elif isinstance(node, ast.ClassDef) and ast.get_docstring(node):
            yield node.name, ast.get_docstring(node), ""
            yield from members(f"{node.name}.", node.body, words)
        elif owner and isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            yield f"{owner}{node.target.id}", " ".join(ast.literal_eval(following.value).split()), ""


def literal(text):
    """Returns a literal of C. JSON escapes as C does, but for what is not ASCII, of which there is none."""
    pieces = [text[i:i + LITERAL_CHARACTERS] for i in range(0, len(text), LITERAL_CHARACTERS)] or [""]
    return " ".join(json.dumps(piece) for piece in pieces)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        stubs = ast.parse(file.read())
    found = [(name, text.strip(), line) for name, text, line in members("", stubs.body, shared_words(stubs))
             if text.strip()]
    with open(sys.argv[2], "w", encoding="ascii") as header:
        for name, text, line in found:
            header.write(f"#define DOC_{name.replace('.', '_')} {literal(line + text)}\n")
        header.write("#define DOCSTRINGS " + ", ".join(f"{{{literal(name)}, {literal(text)}}}"
                                                       for name, text, _ in found) + "\n")


main()
