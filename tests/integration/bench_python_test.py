#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The programs and the table of ./dev bench --python: every row that needs nothing of PyPI, once, whatever it takes.
The programs compare what they have received."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import python_support

BENCH = python_support.SOURCE / "tests" / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "python")]

import table  # noqa: E402
from rows import ROWS, Row, Variant  # noqa: E402

PEERS = ("nixl", "mooncake", "gloo")


class Run(unittest.TestCase):
    def run_bench(self, *options):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        command = [sys.executable, BENCH / "python" / "run", "--without-pypi", "--starts", "1", "--rounds", "1",
                   "--sample-sec", "0", "--divide", "8", "--quiet", "--build", python_support.BUILD,
                   "--folder", folder.name, *options]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return result.stdout, json.loads(pathlib.Path(folder.name, "python.json").read_text())["samples"]

    def test_all_rows(self):
        out, samples = self.run_bench()
        for row in ROWS:
            self.assertGreater(samples[row.ours.name][0], 0, row.title)
            if row.peer.program not in PEERS:
                self.assertIn(row.title, out)
        for name in PEERS:
            self.assertIn(f"skipped: {name}: --without-pypi", out)

    def test_rows_that_are_chosen(self):
        _, samples = self.run_bench("--only", "VGG16 into a module, local, thread")
        self.assertEqual(set(samples), {"local thread state 0", "c model thread into_model 0"})


class Table(unittest.TestCase):
    def line(self, kind, target, ours, theirs):
        row = Row("group", "title", Variant("ours", "pull", 8), "peer", Variant("theirs", "pull", 8), kind, target)
        head, *lines = table.lines([row], {row.ours.name: ours, row.peer.name: theirs})
        self.assertEqual(len(lines[0]), len(head))
        return lines[0][4:]

    def test_times_as_fast(self):
        self.assertEqual(self.line("faster", 1.5, [1e-6, 2e-6], [3e-6, 3e-6]), ["2.25", "1.88..2.62", ">= 1.5", "ok"])
        self.assertEqual(self.line("faster", 2.5, [1e-6, 2e-6], [3e-6, 3e-6])[2:], [">= 2.5", "below"])
        self.assertEqual(self.line("faster", None, [1e-6], [3e-6])[2:], ["-", ""])

    def test_part_of_the_whole(self):
        self.assertEqual(self.line("part", 0.3, [1e-3], [4e-3]), ["0.25", "0.25..0.25", "<= 0.3", "ok"])
        self.assertEqual(self.line("part", 0.2, [1e-3], [4e-3])[2:], ["<= 0.2", "below"])

    def test_time_that_is_added(self):
        self.assertEqual(self.line("more", 3.0, [5e-6], [3e-6]), ["2.00 us more", "2.00..2.00", "<= 3.0", "ok"])

    def test_side_that_is_missing(self):
        row = ROWS[0]
        self.assertEqual(list(table.lines([row], {row.ours.name: [1.0]})), [table.HEAD])


if __name__ == "__main__":
    unittest.main(verbosity=2)
