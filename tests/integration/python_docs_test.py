#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What is said of the Python package is so: the examples run, and the stubs name what there is and how it is called."""
import ast
import inspect
import re
import unittest

import python_support
from python_support import SOURCE, run_script, tensorlane

STUBS = SOURCE / "python/tensorlane/__init__.pyi"
# What the package has besides, and what only type checkers know.
BESIDES = {"TensorLike", "Peer", "Key", "Part", "_HasDlpack"}
# Something for each argument of the calls that are written in C.
VALUES = {
    "peer": "none:0", "peers": ["none:0"], "key": "k" * 600, "keys": ["key"], "tensor": b"", "step": 1, "into": None,
    "part": None, "parts": None,
    "timeout": 0, "group_timeout": 0, "checksum": True, "mapped": True, "min_count": 0, "address": "nowhere",
    "name": "", "incarnation": 1, "message": "", "code": 0,
}
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Examples(unittest.TestCase):
    def test_first_example(self):
        text = (SOURCE / "docs/python.md").read_text(encoding="utf-8")
        example = CODE.findall(text)[0]
        self.assertLessEqual(len(example.splitlines()), 10)
        printed = run_script(example, prologue="")
        self.assertIn(f"It prints `{printed.strip()}`.", text)

    def test_readme(self):
        """With a cluster in place of the file, and a parameter server."""
        example, = [code for code in CODE.findall((SOURCE / "README.md").read_text(encoding="utf-8"))
                    if "tensorlane.Worker" in code]
        printed = run_script(example.replace('"cluster.json"', "cluster"), prologue="""
import socket, tensorlane
def free():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"
cluster = {"cluster": {"ps": [free()], "worker": [free()]}, "log": {"level": "error"}}
ps = tensorlane.Worker(cluster, job="ps")
ps.publish("weights", bytes([1, 2, 3]), step=8)
""")
        self.assertRegex(printed, r"^[\w-]+ .* 6\n$")

    def test_all_code_is_python(self):
        codes = CODE.findall((SOURCE / "docs/python.md").read_text(encoding="utf-8"))
        self.assertGreater(len(codes), 4)
        for code in codes:
            ast.parse(code)


def arguments_of(function):
    """Returns the names of the arguments, those that must be named apart."""
    every = function.args.posonlyargs + function.args.args
    return ([one.arg for one in every if one.arg != "self"], [one.arg for one in function.args.kwonlyargs])


class Stubs(unittest.TestCase):
    def setUp(self):
        self.body = ast.parse(STUBS.read_text(encoding="utf-8")).body
        self.classes = {node.name: node for node in self.body if isinstance(node, ast.ClassDef)}

    def test_names(self):
        named = set()
        for node in self.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                named.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.level == 1:
                named |= {alias.asname for alias in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                named.add((node.targets[0] if isinstance(node, ast.Assign) else node.target).id)
        self.assertEqual(named - BESIDES, set(tensorlane.__all__))

    def test_members(self):
        for name in ("Tensor", "Worker", "Subscription", "BlockingSubscription", "PeerInfo", "Health", "ListedTensor",
                     "Box"):
            of = getattr(tensorlane, name)
            known = {node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else node.target.id
                     for node in self.classes[name].body if not isinstance(node, ast.Expr)}
            public = {member for member in dir(of) if not member.startswith("_")} - set(dir(tuple))
            with self.subTest(name):
                self.assertEqual({member for member in known if not member.startswith("_")} - {"count"},
                                 public - {"count"})
                for member in known - {"__buffer__"}:
                    self.assertTrue(hasattr(of, member), member)

    def test_docstrings(self):
        for name in ("Tensor", "Worker", "Subscription", "PeerInfo"):
            self.assertTrue(ast.get_docstring(self.classes[name]), name)
        undocumented = {node.name for of in self.classes.values() for node in of.body
                        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not ast.get_docstring(node)}
        self.assertEqual({name for name in undocumented if not name.startswith("__")}, set())

    def test_docstrings_at_run_time(self):
        """help() shows what the stubs say, with the arguments that calls share and what a blocking form refers to."""
        for name, of in self.classes.items():
            for node in of.body:
                if name.startswith("_") or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                text = ast.get_docstring(node)
                if text:
                    with self.subTest(f"{name}.{node.name}"):
                        self.assertIn(text.strip(), getattr(getattr(tensorlane, name), node.name).__doc__)
            if not name.startswith("_"):
                self.assertEqual(ast.get_docstring(of), getattr(tensorlane, name).__doc__, name)
        for function in (tensorlane.wrap, tensorlane.copy, tensorlane.empty):
            self.assertIn("Raises", function.__doc__)
        text = tensorlane.Worker.recv_wait.__doc__
        for wanted in ("As recv, blocking.", "timeout: seconds;", "into: None", "part: a Box"):
            self.assertIn(wanted, text)
        self.assertIn("begins", tensorlane.Box.start.__doc__)

    def test_arguments(self):
        """Functions have the arguments of the stubs; those in C accept them all by name, unless they take one alone."""
        for node in self.classes["Worker"].body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("__"):
                continue
            function = getattr(tensorlane.Worker, node.name)
            named, must_be_named = arguments_of(node)
            with self.subTest(node.name):
                if "property" in {ast.unparse(one) for one in node.decorator_list}:
                    continue
                found = list(inspect.signature(function).parameters.values())[1:]
                self.assertEqual(named, [one.name for one in found if one.kind is not one.KEYWORD_ONLY])
                self.assertEqual(must_be_named, [one.name for one in found if one.kind is one.KEYWORD_ONLY])
                if not inspect.isfunction(function) and not node.args.posonlyargs and named:
                    self.assert_accepts(function, named + must_be_named)

    def assert_accepts(self, function, names):
        """What is asked is refused, after all names were understood."""
        with tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0") as worker, \
                self.assertRaises(tensorlane.Error):
            function(worker, **{name: VALUES[name] for name in names})


if __name__ == "__main__":
    unittest.main(verbosity=2)
