# SPDX-License-Identifier: Apache-2.0
"""Builds libraries of this tree and of other commits alike, and programs of this tree with the library of either."""
import pathlib
import shutil
import subprocess
import tempfile

from processes import Failure

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if result.returncode:
        raise Failure(f"{' '.join(map(str, command))}\n{(result.stderr + result.stdout)[-4000:]}")


def resolve(commit):
    """The whole hash of a commit of this repository."""
    result = subprocess.run(["git", "-C", ROOT, "rev-parse", "--verify", "--quiet", commit + "^{commit}"],
                            capture_output=True, text=True, check=False)
    if result.returncode:
        raise Failure(f"{commit} is no commit of this repository; git log shows which there are")
    return result.stdout.strip()


def build_library(folder):
    """Builds the library of the sources in a folder. The code does not depend on the folder's name, so that equal
    sources become equal code, byte by byte. Returns its source and its build folder."""
    source, output = folder / "source", folder / "build"
    run("cmake", "-S", source, "-B", output, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DCMAKE_C_FLAGS=-ffile-prefix-map={folder}=.", "-DTENSORLANE_TESTS=OFF", "-DTENSORLANE_WERROR=OFF")
    run("cmake", "--build", output, "--target", "tensorlane", "--", "--quiet")
    return source, output


def build(commit, folder):
    """Builds the commit's library; returns its source and its build folder."""
    source = folder / "source"
    if not source.exists():
        unfinished = folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            run("git", "-C", ROOT, "archive", "--output", archive.name, commit)
            run("tar", "-xf", archive.name, "-C", unfinished)
        unfinished.rename(source)
    return build_library(folder)


def build_here(folder):
    """Builds this tree's library from a copy of its files as they are now; returns its source and its build folder."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True, check=True)
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)  # with its time, so that only what has changed is compiled again
    return build_library(folder)


def build_program(sources, source, build_folder, output, *options):
    """Compiles C files of this tree with the headers and the library of a tree, its own or another."""
    output.parent.mkdir(parents=True, exist_ok=True)
    library = build_folder / "lib"
    run("cc", "-O2", "-g", "-std=gnu11", "-D_GNU_SOURCE", *options, f"-I{source / 'include'}", f"-I{ROOT}", *sources,
        f"-L{library}", "-ltensorlane", "-lm", f"-Wl,-rpath,{library}", "-o", output)
    return output
