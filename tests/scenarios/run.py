#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the scenarios of workers over one transport; which those are is in table.py.

    run.py grpc|tls|local|verbs|gdr [NAME...]
                               all, or those whose names (Exchange.test_strings) contain one of the names
    run.py --table                           shows the table

verbs and gdr need the guest with two devices (tests/rdma_vm/run_guest --topology veth). In a build with
AddressSanitizer its runtime is loaded into this program first, and only the workers that are processes of their own are
checked for leaks: Python has leaks of its own.
"""
import os
import re
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
BUILD = os.environ.get("TENSORLANE_BUILD") or os.path.join(os.path.dirname(__file__), "../../build/release")
KEPT = "SCENARIOS_KEPT_ASAN_OPTIONS"
SKIPPED = 77


def load_sanitizer():
    """The library can only be loaded where the sanitizers' runtimes came first."""
    if KEPT in os.environ:
        os.environ["ASAN_OPTIONS"] = os.environ.pop(KEPT)
        del os.environ["LD_PRELOAD"]
        return
    needed = subprocess.run(["ldd", f"{BUILD}/lib/libtensorlane.so"], stdout=subprocess.PIPE, text=True, check=True)
    runtimes = re.findall(r"=> (\S*lib(?:[at]|ub)san\S*)", needed.stdout)
    if any("libtsan" in runtime for runtime in runtimes):
        print("Python cannot be run with ThreadSanitizer")
        sys.exit(SKIPPED)
    if runtimes:
        options = os.environ.get("ASAN_OPTIONS", "")
        # A small quarantine: scenarios look at how much memory there is after freeing.
        ours = f"{options}:detect_leaks=0:quarantine_size_mb=2:thread_local_quarantine_size_kb=64"
        os.environ.update({KEPT: options, "ASAN_OPTIONS": ours, "LD_PRELOAD": ":".join(runtimes)})
        os.execv(sys.executable, [sys.executable, *sys.argv])


def cases(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def main():
    load_sanitizer()
    import devices
    import table
    import transports
    if sys.argv[1:] == ["--table"]:
        for row in table.TABLE:
            for name in transports.BY_NAME:
                print(f"{row.scenario.__name__:20} {name:6} {getattr(row, transports.BY_NAME[name].column) or 'runs'}")
            print(f"{row.scenario.__name__:20} {'gpus':6} {row.gpus or 'runs'}")
        return 0
    if len(sys.argv) < 2 or sys.argv[1] not in transports.BY_NAME:
        print(__doc__, file=sys.stderr)
        return 2
    devices.load(BUILD)
    names = sys.argv[2:]
    suite = unittest.TestSuite()
    for scenario in table.over(transports.BY_NAME[sys.argv[1]]):
        found = unittest.defaultTestLoader.loadTestsFromTestCase(scenario)
        suite.addTests(test for test in cases(found)
                       if not names or any(name in f"{scenario.__name__}.{test._testMethodName}" for name in names))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    return 0 if result.wasSuccessful() and result.testsRun and not result.skipped else 1


if __name__ == "__main__":
    sys.exit(main())
