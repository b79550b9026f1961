# SPDX-License-Identifier: Apache-2.0
"""What the tests of `tensorlane doctor` share: its report, line by line."""
import json
import subprocess

import cli_support


class DoctorCase(cli_support.Case):
    def doctor(self, *arguments, under=(), code=None):
        """Returns the lines of the report by what they are about."""
        command = [*under, cli_support.PROGRAM, "doctor", "--json", *map(str, arguments)]
        result = subprocess.run(command, env=cli_support.environment(), stdin=subprocess.DEVNULL, capture_output=True,
                                text=True, timeout=cli_support.PATIENCE, check=False)
        self.assertEqual(result.stderr, "")
        shown = json.loads(result.stdout)
        faults = [line for line in shown["lines"] if line["verdict"] == "fault"]
        self.assertEqual(len(faults), shown["faults"])
        self.assertEqual(result.returncode, 4 if faults else 0, result.stdout)
        if code is not None:
            self.assertEqual(result.returncode, code, result.stdout)
        for line in shown["lines"]:
            self.assertEqual(bool(line["cause"]), line["verdict"] != "ok", line)
            self.assertTrue(line["remedy"] or not line["cause"], line)
        return {line["what"]: line for line in shown["lines"]}
