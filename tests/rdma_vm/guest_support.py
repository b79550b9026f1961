# SPDX-License-Identifier: Apache-2.0
"""What the tests that need RDMA devices share: running a script in the guest, and how it ended."""
import os
import pathlib
import subprocess
import tempfile
import unittest

RUN_GUEST = pathlib.Path(__file__).with_name("run_guest")
ROOT = RUN_GUEST.parents[2]
FAILED = 125
# A folder for what programs of the preset coverage note in guests (tests/coverage); "": they are of another preset.
COVERAGE = os.environ.get("TENSORLANE_COVERAGE", "")

# A shell function for the scripts: runs both ends of a perftest program in this guest, and prints the report of the
# second, or of both when one fails. Neither takes more than a minute.
PERFTEST = """
set -eu
listens() { [[ $(ss -ltnH "sport = :18515") ]]; }
# perftest SERVER_DEVICE ADDRESS DEVICE PROGRAM...
perftest() {
    local server_device=$1 address=$2 device=$3
    shift 3
    timeout 60 "$@" -x 1 -d "$server_device" > /tmp/server 2>&1 &
    for _ in {1..600}; do if listens; then break; fi; sleep 0.1; done
    if timeout 60 "$@" -x 1 -d "$device" "$address" > /tmp/client 2>&1 && wait $!; then
        cat /tmp/client
    else
        cat /tmp/server /tmp/client
        return 1
    fi
}
"""


class GuestTest(unittest.TestCase):
    def run_guest(self, script, *options, timeout=120):
        """Runs a script of bash in the guest; the result has returncode, stdout and stderr as text."""
        environment = dict(os.environ)
        if COVERAGE and "--results" not in options:
            options += ("--results", tempfile.mkdtemp(dir=COVERAGE))
            environment["GCOV_PREFIX"] = "/run/results/gcov"
        return subprocess.run([RUN_GUEST, "--timeout", str(timeout), *options, "--", "bash", "-c", script], cwd=ROOT,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
                              env=environment)

    def assert_status(self, status, result):
        self.assertEqual(status, result.returncode, f"{result.stdout}\n{result.stderr}")

    def assert_failed(self, why, result):
        """The guest itself failed: this is neither a failure of the command nor a reason to skip."""
        self.assert_status(FAILED, result)
        self.assertIn(why, result.stderr)
