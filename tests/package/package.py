#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The library as its users find it: installed under some prefix, found by pkg-config or CMake, linked and run.

    package.py files|shared|static|cmake|readme|first_version

Installs into a temporary prefix. files: everything is there. shared, static and cmake build every program of examples/
that includes <tensorlane/...> against the installed library in that way and run it without arguments; it must exit with
0. readme: the program in README.md compiles without a warning. first_version: a program that was compiled with the
first headers of this SONAME works with the library.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

BUILD = pathlib.Path(os.environ["TENSORLANE_BUILD"])
SOURCE = pathlib.Path(os.environ["TENSORLANE_SOURCE"])
CC = os.environ.get("CC", "cc")

INSTALLED = [
    "bin/tensorlane", "include/tensorlane/tensorlane.h", "include/tensorlane/worker.h", "lib/libtensorlane.so",
    "lib/libtensorlane.so.1", "lib/libtensorlane.a", "lib/pkgconfig/tensorlane.pc",
    "lib/pkgconfig/tensorlane-static.pc", "lib/cmake/tensorlane/tensorlaneConfig.cmake",
    "lib/systemd/system/tensorlane@.service", "share/tensorlane/config/schema.json",
    "share/tensorlane/proto/tensorlane/v1/transfer.proto", "share/tensorlane/deploy/slurm.sh",
    "share/tensorlane/deploy/kubernetes/tensorlane.yaml", "share/tensorlane/examples/python/parameter_server.py",
    "share/doc/tensorlane/LICENSE", "share/doc/tensorlane/CHANGELOG.md", "share/doc/tensorlane/config.md",
    "share/doc/tensorlane/cli.md", "share/doc/tensorlane/troubleshooting.md",
]


def run(*command, **options):
    print("+", *command, flush=True)
    return subprocess.run([str(part) for part in command], check=True, text=True, **options)


def pkg_config(prefix, *arguments):
    environment = {**os.environ, "PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig"}
    return run("pkg-config", *arguments, env=environment, stdout=subprocess.PIPE).stdout.split()


def examples():
    found = sorted(path for path in (SOURCE / "examples").glob("*.c")
                   if "#include <tensorlane/" in path.read_text(encoding="utf-8"))
    if not found:
        sys.exit("there are no examples")
    return found


def needs_shared(program):
    listing = run("readelf", "-d", program, stdout=subprocess.PIPE).stdout
    return "[libtensorlane.so.1]" in listing


def check_program(program, prefix, is_shared):
    if needs_shared(program) != is_shared:
        sys.exit(f"{program}: linked {'statically' if is_shared else 'to the shared library'}")
    run(program, env={**os.environ, "LD_LIBRARY_PATH": f"{prefix}/lib"}, timeout=120, stdout=subprocess.DEVNULL)


def check_needs(program):
    """RDMA and CUDA are looked for at run time: a machine without them can start the program."""
    listing = run("readelf", "-d", program, stdout=subprocess.PIPE).stdout
    if "libibverbs" in listing or "libcuda" in listing:
        sys.exit(f"{program} does not start without what only some machines have:\n{listing}")


def check_files(prefix):
    missing = [name for name in INSTALLED if not (prefix / name).exists()]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}")
    unit = (prefix / "lib/systemd/system/tensorlane@.service").read_text(encoding="utf-8")
    if f"{prefix}/bin/tensorlane" not in unit or "@bindir@" in unit:
        sys.exit("the systemd unit does not start the installed program")
    run(prefix / "bin/tensorlane", "--version")
    check_needs(prefix / "bin/tensorlane")
    check_needs(prefix / "lib/libtensorlane.so")
    check_python(prefix)


def check_python(prefix):
    """Debian's Python imports the package from where it is installed, and that finds the library."""
    if not (BUILD / "lib/python/tensorlane/_tensorlane.abi3.so").exists():
        return  # it was not built: python3-dev is not installed
    packages = prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "dist-packages"
    script = "import tensorlane; print(tensorlane.__file__, tensorlane.empty((2, 3)).shape)"
    printed = run(sys.executable, "-B", "-c", script, env={**os.environ, "PYTHONPATH": str(packages)},
                  stdout=subprocess.PIPE).stdout
    if printed.split(maxsplit=1) != [str(packages / "tensorlane/__init__.py"), "(2, 3)\n"]:
        sys.exit(f"the Python package is not installed: {printed}")


def check_pkg_config(prefix, work, is_shared):
    module = "tensorlane" if is_shared else "tensorlane-static"
    flags = pkg_config(prefix, "--cflags", "--libs", module)
    assert len(pkg_config(prefix, "--cflags", module)) == 1, "only the folder of the headers"
    for example in examples():
        program = work / example.stem
        run(CC, "-O1", "-Wall", "-Werror", example, "-o", program, *flags, "-lm")
        check_program(program, prefix, is_shared)
    if not is_shared:
        # Also the usual way: a prefix without a shared library, and --static.
        for library in (prefix / "lib").glob("libtensorlane.so*"):
            library.unlink()
        program = work / "static"
        run(CC, examples()[0], "-o", program, *pkg_config(prefix, "--static", "--cflags", "--libs", "tensorlane"))
        check_program(program, prefix, False)


def check_cmake(prefix, work):
    lines = ["cmake_minimum_required(VERSION 3.25)", "project(user C)", "find_package(tensorlane 0.1 REQUIRED)"]
    for example in examples():
        for library in ("tensorlane", "tensorlane_static"):
            name = f"{example.stem}_{library}"
            lines += [f"add_executable({name} {example})", f"target_link_libraries({name} tensorlane::{library} m)"]
    (work / "CMakeLists.txt").write_text("\n".join(lines), encoding="utf-8")
    run("cmake", "-G", "Ninja", "-S", work, "-B", work / "build", f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_C_COMPILER={CC}", stdout=subprocess.DEVNULL)
    run("cmake", "--build", work / "build", stdout=subprocess.DEVNULL)
    for example in examples():
        check_program(work / "build" / f"{example.stem}_tensorlane", prefix, True)
        check_program(work / "build" / f"{example.stem}_tensorlane_static", prefix, False)


def check_readme(prefix, work):
    text = (SOURCE / "README.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```c\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if not programs:
        sys.exit("README.md has no program in C")
    for number, program in enumerate(programs):
        source = work / f"readme_{number}.c"
        source.write_text(program, encoding="utf-8")
        run(CC, "-Wall", "-Wextra", "-Werror", source, "-o", work / "readme",
            *pkg_config(prefix, "--cflags", "--libs", "tensorlane"))


def layout(program, environment):
    lines = run(program, "layout", env=environment, stdout=subprocess.PIPE).stdout.splitlines()
    return {name: numbers for name, *numbers in (line.split() for line in lines)}


def check_layout(first, now):
    """Structs with size_bytes may grow, except tl_completion; everything else keeps its place and size."""
    growing = {"tl_worker_options", "tl_recv_options", "tl_tensor_view", "tl_peer_info", "tl_worker_stats",
               "tl_log_options"}
    for name, numbers in first.items():
        if now[name] != numbers and not (name in growing and int(now[name][0]) > int(numbers[0])):
            sys.exit(f"{name} was {numbers} (offset and size) and is {now[name]}: compiled programs break")


def check_first_version(prefix, work):
    folder = SOURCE / "tests/package/first_version"
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{prefix}/lib"}
    link = pkg_config(prefix, "--libs", "tensorlane")
    for name, include in (("first", folder / "include"), ("now", prefix / "include")):
        run(CC, "-O1", "-Wall", "-Werror", "-I", include, folder / "program.c", "-o", work / name, *link)
    check_layout(layout(work / "first", environment), layout(work / "now", environment))
    check_program(work / "first", prefix, True)


def main():
    kind = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        prefix, work = pathlib.Path(folder, "prefix"), pathlib.Path(folder, "work")
        work.mkdir()
        run("cmake", "--install", BUILD, "--prefix", prefix, stdout=subprocess.DEVNULL)
        if kind == "files":
            check_files(prefix)
        elif kind == "cmake":
            check_cmake(prefix, work)
        elif kind == "readme":
            check_readme(prefix, work)
        elif kind == "first_version":
            check_first_version(prefix, work)
        else:
            check_pkg_config(prefix, work, kind == "shared")


if __name__ == "__main__":
    main()
