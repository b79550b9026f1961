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
# Something for each argument of the calls that are written in C.
VALUES = {
    "peer": "none:0", "peers": ["none:0"], "key": "k" * 600, "keys": ["key"], "tensor": b"", "step": 1, "into": None,
    "part": None, "parts": None,
    "timeout": 0, "group_timeout": 0, "checksum": True, "mapped": True, "min_count": 0,
    "name": "", "incarnation": 1, "message": "", "code": 0, "shape": (), "dtype": "F32", "shared": False, "to": None,
    "address": "nowhere", "copy": None, "stream": None, "max_version": None, "dl_device": None,
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

    def test_all_examples(self):
        """Those after the first one run one after the other, with what they name beside them."""
        codes = CODE.findall((SOURCE / "docs/python.md").read_text(encoding="utf-8"))[1:]
        self.assertGreater(len(codes), 4)
        out = run_script("\n".join(codes) + """
async def follow_until_a_value_comes():
    global print
    task = asyncio.ensure_future(follow(worker))
    print = lambda *_: task.cancel()
    await asyncio.wait([task])
    return task.cancelled()
for key in ("row/0", "row/1"):
    worker.publish(key, b"gradient", step=7)
came = asyncio.run(follow_until_a_value_comes())
del print
print("came", came)
for one in (worker, ps, trainer, rollout):
    one.close()
""", prologue="""
import asyncio, json, os, socket, tempfile
import numpy, tensorlane
def free():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"
cluster = {"cluster": {"ps": [free()], "worker": [free()]}, "log": {"level": "error"}}
folder = tempfile.TemporaryDirectory()
os.chdir(folder.name)
with open("cluster.json", "w") as file:
    json.dump(cluster, file)
ps = tensorlane.Worker(cluster, job="ps")
ps.publish("weights", numpy.ones((2, 3)), step=7)
ps.publish("table", numpy.ones((2048, 640), "f4"))
ps.publish("file", bytes(8192))
wide = numpy.empty((512, 128), "f4")
tensor = numpy.ones(3)
trainer, rollout = (tensorlane.Worker(address="127.0.0.1:0") for _ in range(2))
peer = rollout.add_peer(trainer.address)
model = {"layer": numpy.ones((2, 3))}
""")
        self.assertEqual(out.splitlines(), ["checkpoint/7 7 F64 (3,) 24", "48 48", "came True"])


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_property(node):
    return "property" in {ast.unparse(one) for one in node.decorator_list}


def parameters_of(node):
    """Returns (name, kind, default) of each parameter, without self."""
    arguments = ast.parse(ast.unparse(node)).body[0].args
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        one.annotation = None
    function = eval(f"lambda {ast.unparse(arguments)}: None")
    return known_parameters(inspect.signature(function))


def known_parameters(signature):
    return [(one.name, one.kind, one.default) for one in signature.parameters.values() if one.name != "self"]


def unexplained(node):
    """Yields what a public function lacks: types and a docstring."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    yield from (f"{node.name}: {one.arg}" for one in arguments if one.arg not in ("self", "cls") and not one.annotation)
    if node.returns is None:
        yield f"{node.name}: what it returns"
    if not ast.get_docstring(node) and not node.name.startswith("__"):
        yield f"{node.name}: docstring"


class Stubs(unittest.TestCase):
    def setUp(self):
        self.body = ast.parse(STUBS.read_text(encoding="utf-8")).body
        self.classes = {node.name: node for node in self.body if isinstance(node, ast.ClassDef)
                        and not node.name.startswith("_")}
        # (qualified name, node, what there is) of each function, method and property
        self.described = [(node.name, node, getattr(tensorlane, node.name)) for node in self.body
                          if isinstance(node, FUNCTIONS)]
        for name, of in self.classes.items():
            self.described += [(f"{name}.{node.name}", node, getattr(getattr(tensorlane, name), node.name, None))
                               for node in of.body if isinstance(node, FUNCTIONS) and node.name != "__buffer__"]

    def test_names(self):
        named, public = set(), []
        for node in self.body:
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                named.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.level == 1:
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.AnnAssign):
                named.add(node.target.id)
            elif isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
                public = ast.literal_eval(node.value)
        self.assertEqual(public, tensorlane.__all__)
        self.assertEqual({name for name in named if name != "_HasDlpack"}, set(public))

    def test_members(self):
        for name, stub in self.classes.items():
            there = getattr(tensorlane, name)
            fields = [node for node in stub.body if isinstance(node, ast.AnnAssign)]
            known = [node.target.id for node in fields]
            known += [node.name for node in stub.body if isinstance(node, FUNCTIONS)]
            public = {member for member in dir(there) if not member.startswith("_")}
            with self.subTest(name):
                if fields:
                    self.assertEqual(tuple(known), there._fields)
                    self.assertEqual({node.target.id: ast.literal_eval(node.value) for node in fields if node.value},
                                     there._field_defaults)
                    public -= set(dir(tuple)) - set(known)
                self.assertEqual({member for member in known if not member.startswith("_")}, public)

    def test_kinds(self):
        """What is awaitable is, and properties are no methods."""
        for name, node, there in self.described:
            with self.subTest(name):
                self.assertEqual(is_property(node), not callable(there))
                self.assertEqual(isinstance(node, ast.AsyncFunctionDef), inspect.iscoroutinefunction(there))

    def test_types_and_docstrings(self):
        lacking = [lack for _, node, _ in self.described for lack in unexplained(node)]
        self.assertEqual(lacking, [])
        self.assertEqual([name for name, of in self.classes.items() if not ast.get_docstring(of)], [])

    def test_docstrings_at_run_time(self):
        """help() shows what the stubs say, with the arguments that calls share and what a blocking form refers to."""
        for name, node, there in self.described:
            with self.subTest(name):
                self.assertIn((ast.get_docstring(node) or "").strip(), there.__doc__ or "")
        for name, of in self.classes.items():
            self.assertEqual(ast.get_docstring(of), getattr(tensorlane, name).__doc__, name)
        for function in (tensorlane.wrap, tensorlane.copy, tensorlane.empty):
            self.assertIn("Raises", function.__doc__)
        text = tensorlane.Worker.recv_wait.__doc__
        for wanted in ("As recv, blocking.", "timeout: seconds;", "into: None", "part: a Box"):
            self.assertIn(wanted, text)
        self.assertIn("begins", tensorlane.Box.start.__doc__)

    def test_parameters(self):
        """Functions have the parameters of the stubs; what is in C has its signature from there, and is called."""
        instances = {"Worker": tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0"),
                     "Tensor": tensorlane.empty((1,))}
        self.addCleanup(instances["Worker"].close)
        for name, node, there in self.described:
            if is_property(node) or node.name in ("__enter__", "__exit__", "__aenter__", "__aexit__"):
                continue
            with self.subTest(name):
                parameters = parameters_of(node)
                self.assertEqual(parameters, known_parameters(inspect.signature(there)))
                if not inspect.isfunction(there):
                    owner = name.rpartition(".")[0]
                    self.assert_called_by(getattr(instances[owner], node.name) if owner else there, parameters)

    def assert_called_by(self, call, parameters):
        """A function in C has these parameters and no others. No call of it comes further than to reading them."""
        values = {name: VALUES[name] for name, _, _ in parameters if name in VALUES}
        positional = [name for name, kind, _ in parameters if kind is not inspect.Parameter.KEYWORD_ONLY]
        if not values or parameters[0][1] is inspect.Parameter.POSITIONAL_ONLY:
            self.assertRaises(TypeError, call, *values.values(), 0)
            self.assertRaises(TypeError, call, **(values or {"nothing": 0}))
            return
        with self.assertRaisesRegex(TypeError, f"at most {len(values)} "):
            call(**values, nothing=0)
        *but_last, _ = values  # the last one has a default
        for count in range(len(positional)):
            with self.assertRaisesRegex(TypeError, "'nothing'"):
                call(*(values[name] for name in but_last[:count]), nothing=0,
                     **{name: values[name] for name in but_last[count:]})
        for name, _, default in parameters:
            others = {one: value for one, value in values.items() if one != name}
            with self.assertRaisesRegex(TypeError, f"'{'nothing' if default is not inspect._empty else name}'"):
                call(**others, nothing=0)
        if len(positional) < len(parameters):
            with self.assertRaisesRegex(TypeError, "positional"):
                call(*(values[name] for name in positional), 0)


class Modules(unittest.TestCase):
    def test_types_and_docstrings(self):
        """Modules that are imported by their names have types and docstrings where they are defined."""
        modules = sorted((SOURCE / "python/tensorlane").glob("[!_]*.py"))
        self.assertGreater(len(modules), 4)
        for path in modules:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            nodes = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, *FUNCTIONS))}
            assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)
                        and isinstance(node.targets[0], ast.Name)}
            public = ast.literal_eval(assigned.get("__all__", ast.parse(f"{list(nodes)}", mode="eval").body))
            lacking = [name for name in public if name not in nodes and name not in assigned]
            for node in (nodes[name] for name in public if name in nodes and not name.startswith("_")):
                if not ast.get_docstring(node):
                    lacking.append(f"{node.name}: docstring")
                for function in getattr(node, "body", []) if isinstance(node, ast.ClassDef) else [node]:
                    if isinstance(function, FUNCTIONS) and (function.name[0] != "_" or function.name[:2] == "__"):
                        lacking += [f"{node.name}.{lack}" for lack in unexplained(function)]
            with self.subTest(path.name):
                self.assertTrue(ast.get_docstring(tree))
                self.assertEqual(lacking, [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
