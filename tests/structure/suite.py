#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Everything that ./dev test does after the packages are there.

    suite.py [STAGE...]      all stages up to vm, or those named, which are release asan tsan fuzz vm interop quick
                             grpc-current
    suite.py --quick         the stage quick alone: some minutes, and no virtual machine
    suite.py --interop       the stage interop alone, which needs PyPI
    suite.py --grpc current  the stage grpc-current alone, which needs PyPI the first time

release   builds, then every test: unit, integration, fuzz corpus, structure, package
asan      builds with AddressSanitizer and UndefinedBehaviorSanitizer, then unit, integration, fuzz corpus
tsan      builds with clang and ThreadSanitizer, then the tests labelled threads
fuzz      builds with libFuzzer and runs every target for 5 s
vm        builds as release does, then every test of tests/rdma_vm: programs run in a virtual machine with RDMA devices;
          none of these may be skipped
interop   builds as release does, then tests with current packages of PyPI (tests/interop), which are skipped without it
quick     as release, but the tests labelled thorough are left out, and named
grpc-current  as release, with the gRPC core of cmake/grpc_current

The last line is "N passed, N failed, N skipped" over all stages; the exit status is 0 when nothing failed. Before it
each test that failed is named once more, with the end of what it printed. For each skipped test the program prints what
was missing. A stage that cannot be built counts as one failed test.
"""
import collections
import concurrent.futures
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

import source

PROCESSORS = os.cpu_count() or 2
# Most tests wait most of the time; with sanitizers they compute more.
JOBS = min(16, 3 * PROCESSORS)
SANITIZED_JOBS = min(16, 2 * PROCESSORS)
FUZZ_SECONDS = 5
REPEATED_LINES = 12
VM_TEST_SECONDS = 600
# Python's unittest prints this for a skipped test of a file.
SKIPPED_INSIDE = re.compile(r"^(\w+) \([\w.]+\) \.\.\. skipped ['\"](.*)['\"]$", re.MULTILINE)

totals = collections.Counter()
failures = []


def report(outcome, name, detail=""):
    totals[outcome] += 1
    if outcome == "failed":
        failures.append((name, detail))
        print(f"FAILED {name}\n{detail.rstrip()}\n", flush=True)
    elif outcome == "skipped":
        print(f"skipped {name}: {(detail.strip().splitlines() or ['no reason given'])[-1]}", flush=True)


def build(preset, *targets):
    """Configures and builds everything or the targets; prints the compiler's output when that fails."""
    return build_with(preset, ["cmake", "--preset", preset, "--log-level=WARNING", "-DTENSORLANE_BENCH=OFF"],
                      ["cmake", "--build", "--preset", preset, "--target", *(targets or ["all"]), "--", "--quiet"])


def build_with(name, *commands):
    for command in commands:
        result = subprocess.run(command, cwd=source.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                errors="replace", check=False)
        if result.returncode:
            report("failed", f"{name}: build", result.stdout[-8000:])
            return False
    return True


def without_address_randomization():
    """ThreadSanitizer cannot start where the kernel randomizes addresses over more bits than it expects."""
    command = ["setarch", platform.machine(), "-R"]
    works = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    return command if works else []


def run_tests(preset, jobs, *selection, prefix=()):
    """Runs ctest and counts every test once. No test gets a second try."""
    folder = source.ROOT / "build" / preset
    with tempfile.TemporaryDirectory() as scratch:
        results = pathlib.Path(scratch, "results.xml")
        command = [*prefix, "ctest", "--test-dir", folder, "-j", jobs, "--output-junit", results,
                   "--test-output-size-failed", "20000", "--test-output-size-passed", "200000",
                   "--test-output-truncation", "middle", *selection]
        log = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace",
                             check=False)
        if not results.exists():
            report("failed", f"{preset}: ctest", log.stdout + log.stderr)
            return
        for case in xml.etree.ElementTree.parse(results).getroot().iter("testcase"):
            outcome = {"run": "passed", "notrun": "skipped"}.get(case.get("status"), "failed")
            detail = case.findtext("system-out") or ""
            skipped, failure = case.find("skipped"), case.find("failure")
            reason = "" if skipped is None else skipped.get("message") or ""
            if outcome == "skipped" and skipped is not None and "SKIP_RETURN_CODE" not in reason:
                outcome, detail = "failed", reason or detail
            if failure is not None:
                detail += f"\n({failure.get('message') or 'failed'} after {float(case.get('time') or 0):.0f} s)"
            report(outcome, f"{preset}: {case.get('name')}", detail)
            if outcome == "passed":
                for part, reason in SKIPPED_INSIDE.findall(detail):
                    report("skipped", f"{preset}: {case.get('name')}: {part}", reason)


def at_once(function, items):
    """Calls the function with each item, as many at a time as there are processors; returns the results in order."""
    with concurrent.futures.ThreadPoolExecutor(PROCESSORS) as pool:
        return zip(items, pool.map(function, items))


def run_fuzzers():
    known = {path.stem for path in source.files("_fuzz.c")}
    names = sorted(path.name for path in (source.ROOT / "build/fuzz/bin").glob("*_fuzz") if path.name in known)
    for name, result in at_once(lambda name: subprocess.run(
            [source.ROOT / "tests/fuzz/run", str(FUZZ_SECONDS), name], capture_output=True, text=True, errors="replace",
            check=False), names):
        report("failed" if result.returncode else "passed", f"fuzz: {name}", result.stdout + result.stderr)


def cases(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test.id()


def run_vm_tests():
    """Each case has guests of its own, which have all processors: workers that spin are slow with fewer."""
    folder = source.ROOT / "build/release"
    tests = str(source.ROOT / "tests/rdma_vm")
    environment = {**os.environ, "TENSORLANE": str(folder / "bin/tensorlane"), "TENSORLANE_BUILD": str(folder),
                   "TENSORLANE_SOURCE": str(source.ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": tests}
    sys.dont_write_bytecode = True
    for name in cases(unittest.defaultTestLoader.discover(tests, "*_test.py")):
        # The command timeout also ends what the test has started.
        command = ["timeout", "--kill-after=30", str(VM_TEST_SECONDS), "/usr/bin/python3", "-m", "unittest", "-v", name]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                errors="replace", env=environment, check=False)
        is_skipped = SKIPPED_INSIDE.search(result.stdout)
        report("failed" if result.returncode or is_skipped else "passed", f"vm: {name}", result.stdout)


def release():
    if build("release"):
        run_tests("release", JOBS)


def quick():
    """As release, without the tests labelled thorough, which the output names."""
    if build("release"):
        listed = subprocess.run(["ctest", "--test-dir", source.ROOT / "build/release", "-N", "-L", "^thorough$"],
                                stdout=subprocess.PIPE, text=True, check=True).stdout
        names = re.findall(r"Test +#\d+: (\S+)", listed)
        print(f"left to ./dev test: {', '.join(names)}, and the stages {', '.join(list(BY_DEFAULT)[1:])}", flush=True)
        run_tests("release", JOBS, "-LE", "^thorough$")


def asan():
    if build("asan"):
        run_tests("asan", SANITIZED_JOBS, "-L", "^(unit|integration|fuzz)$")


def tsan():
    if build("tsan", "thread_tests"):
        run_tests("tsan", SANITIZED_JOBS, "-L", "^threads$", prefix=without_address_randomization())


def fuzz():
    if build("fuzz", "fuzzers"):
        run_fuzzers()


def vm():
    if build("release"):
        run_vm_tests()


def interop():
    if not build("release"):
        return
    result = subprocess.run(["/usr/bin/python3", source.ROOT / "tests/interop/run.py"], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    lines = re.findall(r"^(passed|failed|skipped) (\S+) ?(.*)((?:\n    .*)*)", result.stdout, re.MULTILINE)
    for outcome, name, reason, output in lines:
        report(outcome, f"interop: {name}", output or reason)
    has_failed = any(outcome == "failed" for outcome, *_ in lines)
    if not lines or (result.returncode and not has_failed):
        report("failed", "interop", f"{result.stdout}\n(tests/interop/run.py ended with {result.returncode})")


def grpc_current():
    if build_with("grpc-current", ["./dev", "build", "--grpc", "current"]):
        run_tests("release-grpc-current", JOBS)


BY_DEFAULT = {"release": release, "asan": asan, "tsan": tsan, "fuzz": fuzz, "vm": vm}
STAGES = {**BY_DEFAULT, "interop": interop, "quick": quick, "grpc-current": grpc_current}
OPTIONS = {"--quick": "quick", "--interop": "interop", "--grpc current": "grpc-current"}


def main():
    words = " ".join(sys.argv[1:])
    names = [OPTIONS[words]] if words in OPTIONS else words.split() or list(BY_DEFAULT)
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        sys.exit(f"no such stage: {', '.join(unknown)}; there are {', '.join(STAGES)}, and {', '.join(OPTIONS)}")
    # Shells start what shall run in the background with these ignored, and tests, which send them, would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for name in names:
        before, start = totals.copy(), time.monotonic()
        print(f"== {name}", flush=True)
        STAGES[name]()
        counts = totals - before
        print(f"== {name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
              f" in {time.monotonic() - start:.0f} s", flush=True)
    for name, detail in failures:
        print("\n".join([f"FAILED {name}, which ended with", *detail.rstrip().splitlines()[-REPEATED_LINES:], ""]))
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    sys.exit(1 if totals["failed"] or not totals["passed"] else 0)


if __name__ == "__main__":
    main()
