#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The program and the table of ./dev bench --groups: every row over gRPC and local, once, whatever it takes. The
program compares the contents, the shapes, and the sums of the sizes."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BENCH = pathlib.Path(os.environ["TENSORLANE_SOURCE"]) / "tests" / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "groups")]

import table  # noqa: E402
from peers import PEER_ROWS  # noqa: E402
from processes import Failure  # noqa: E402
from rounds import Rounds  # noqa: E402
from rows import ADDRESS, MEASURES, PROGRESS, TRANSPORTS, VARIANTS, Row, measurable  # noqa: E402

PROGRAM = pathlib.Path(os.environ["TENSORLANE_BUILD"]) / "tests" / "bench" / "tl_groups"
# Only how long 100,000 keys take tells more than 2,000.
ROWS_HERE = [row for row in measurable() if row.set != "keys-100000"]


class Case(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def rounds(self, variants, rows, transports):
        rounds = Rounds(dict.fromkeys(variants, PROGRAM), transports, rows, ADDRESS, self.folder, 0)
        rounds.run_once()
        return rounds.samples


class Program(Case):
    def check(self, variants):
        wanted = [row for row in ROWS_HERE if set(row.variants) & set(variants)]
        samples = self.rounds(variants, wanted, TRANSPORTS)
        for transport in TRANSPORTS:
            for progress in PROGRESS:
                rows = samples[transport][progress]
                self.assertEqual(set(rows), {row.title for row in wanted})
                for row in wanted:
                    self.assertEqual(set(rows[row.title]), set(variants) & set(row.variants), row.title)
                    for taken in rows[row.title].values():
                        for measure in MEASURES:
                            self.assertEqual(len(taken[measure]), 1, row.title)
                            self.assertGreater(taken[measure][0], 0, f"{row.title}, {measure}")
        return samples

    def test_single(self):
        self.check(["single"])

    def test_groups(self):
        self.check(["group"])

    def test_unknown_workload(self):
        """What the program cannot do ends the measurement, with the program's reason."""
        row = Row("nothing", "fetch", "nothing published views")
        with self.assertRaisesRegex(Failure, "no workload of this set has this name"):
            self.rounds(["single"], [row], {"grpc": TRANSPORTS["grpc"]})

    def test_unknown_set(self):
        config = Rounds({}, {}, [], ADDRESS, self.folder, 0).write_config("unknown", TRANSPORTS["grpc"])
        result = subprocess.run([PROGRAM, "serve", config, "single", "nothing"], capture_output=True, text=True,
                                stdin=subprocess.DEVNULL, check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn("no workload is in a set of this name", result.stderr)


class Table(unittest.TestCase):
    def samples(self, before, group):
        """One row over both transports, with these seconds in two rounds."""
        def values(seconds):
            return {measure: list(seconds) for measure in MEASURES}
        return {transport: {"thread": {"ctr-small sent, library memory": {
            "before": values(before), "single": values(before), "group": values(group)}}} for transport in TRANSPORTS}

    def line(self, samples, *cells):
        return next(line for line in table.lines(samples, {}) if tuple(line[:len(cells)]) == cells)

    def test_ratio(self):
        samples = self.samples([9e-6, 9e-6], [3e-6, 4.5e-6])
        line = self.line(samples, "grpc", "thread", "ctr-small sent, library memory", MEASURES["seconds"])
        self.assertEqual(line[4:], ["9.00", "9.00", "3.75", "2.50", "2.25..2.75", ">= 2.00", "ok"])

    def test_other_system(self):
        row = next(row for row in PEER_ROWS if row.name == "grpc")
        samples = self.samples([9e-6], [3e-6])
        rows = samples[row.transport]["thread"]
        rows[row.title] = rows.pop("ctr-small sent, library memory")
        line = list(table.lines(samples, {f"{row.name} {row.title}": [60e-6]}))[-1]
        self.assertEqual(line[2], f"{row.title}, beside: {row.peer}")
        self.assertEqual((line[4], line[6], line[7]), ("60.00", "3.00", "20.00"))
        everything = {"ours": samples, "peers": {f"{row.name} {row.title}": [60e-6]}}
        short = list(table.short_lines(everything))
        self.assertEqual({len(line) for line in short}, {len(short[0])})
        self.assertEqual(short[-1][2:6], [line[2], "60.00", "3.00", "20.00"])

    def test_target_that_is_missed(self):
        line = self.line(self.samples([3e-6], [3e-6]), "grpc", "thread", "ctr-small sent, library memory",
                         MEASURES["cpu"])
        self.assertEqual(line[7:], ["1.00", "1.00..1.00", ">= 2.00", "below"])

    def test_local_beside_grpc(self):
        samples = self.samples([3e-6], [3e-6])
        samples["local"]["thread"]["ctr-small sent, library memory"]["group"]["seconds"] = [1.5e-6]
        lines = [line for line in table.lines(samples, {}) if line[2].endswith("beside gRPC")]
        self.assertEqual([line[7:] for line in lines],
                         [["1.00", "1.00..1.00", ">= 1.00", "ok"], ["2.00", "2.00..2.00", ">= 1.00", "ok"]])

    def test_nothing_to_compare_with(self):
        """A row that was not received in groups has no ratio."""
        samples = self.samples([3e-6], [3e-6])
        del samples["grpc"]["thread"]["ctr-small sent, library memory"]["group"]
        line = self.line(samples, "grpc", "thread", "ctr-small sent, library memory", MEASURES["seconds"])
        self.assertEqual(line[5:], [line[5], "-", "-", "-", "-", "-"])
        self.assertEqual(len(line), 4 + len(VARIANTS) + 4)


if __name__ == "__main__":
    unittest.main(verbosity=2)
