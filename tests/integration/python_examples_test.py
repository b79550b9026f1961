#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The examples in Python run and do what they are for."""
import subprocess
import sys
import unittest

import python_support


class Examples(unittest.TestCase):
    def run_example(self, name):
        environment = {**python_support.os.environ, "PYTHONPATH": str(python_support.PACKAGES)}
        result = subprocess.run([sys.executable, python_support.SOURCE / "examples/python" / name], capture_output=True,
                                text=True, env=environment, timeout=python_support.PATIENCE, check=False)
        self.assertEqual((result.returncode, result.stderr), (0, ""), result.stdout)
        return result.stdout.splitlines()

    def test_rl_weight_sync(self):
        expected = [f"step {step}: 4 rollout workers have weights of {{{step}.0}}" for step in range(1, 11)]
        expected.insert(4, "rollout worker 0 was killed and started again")
        self.assertEqual(self.run_example("rl_weight_sync.py"), expected)

    def test_parameter_server(self):
        self.assertEqual(sorted(self.run_example("parameter_server.py")),
                         [f"worker {task}: y = 3.0 x + 1.0" for task in range(2)])


if __name__ == "__main__":
    unittest.main(verbosity=2)
