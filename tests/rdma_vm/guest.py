# SPDX-License-Identifier: Apache-2.0
"""One guest: a QEMU process that we start, and a folder that both sides write.

The folder of the run is the guest's /run/results. In it each guest has a folder with its name. This side writes what
the guest needs there (main, command, visible), and the guest writes:

    booted          once the devices are there and the command begins
    stdout, stderr  the output of the command, while it runs
    status          the command's exit status, after all its output
    console         the output of the kernel

The happy path: start(), watch() again and again until it returns the exit status, end(). A guest that does not boot in
time, takes too long, or ends without a valid status raises a Failure with the last lines of its console. Only the
process that was started here is ever stopped or killed; the kernel kills it when this process ends.
"""
import os
import pathlib
import re
import shlex
import signal
import subprocess
import time

import kernel as kernels

HERE = pathlib.Path(__file__).resolve().parent
CONSOLE_LINES = 100  # A panic prints about 40.
SWITCH_OFF_SEC = 20
# What a command finds elsewhere in the guest, or not at all.
NOT_PASSED = {"TMPDIR", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "SSH_AUTH_SOCK"}


class Failure(Exception):
    """The guest failed; the text has the end of its console."""


# Features that the emulated processor does not have; accelerator() says what they would cost.
WITHOUT = "-erms,-xsave,-avx,-avx2,-la57,-smap,-smep,-umip,-pku"


def accelerator():
    """QEMU's options and the kernel's. It is not enough that /dev/kvm opens: on some machines it boots no kernel."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
        has_extensions = re.search(r"^flags\s*:.*\b(vmx|svm)\b", info.read(), re.MULTILINE)
    if has_extensions and os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ["-accel", "kvm", "-cpu", "host"], ""
    # All emulated processors count the same ticks. The kernel does not assume so by default, and other clocks are slow.
    # Where the processor says that it copies strings fast (erms), kernel and libc copy with `rep movsb`, which is
    # emulated byte by byte: a third of the rate. Wider registers (avx) cost each switch of threads more than copies
    # gain, and the protection of the kernel from its users' memory, and a fifth level of page tables, cost each call.
    return ["-accel", "tcg,thread=multi", "-cpu", f"max,{WITHOUT}"], " tsc=reliable clocksource=tsc"


class Output:
    """Passes on what the guest appends to a file; whole lines only when they get a prefix."""

    def __init__(self, path, target, prefix=b""):
        self.path = path
        self.target = target
        self.prefix = prefix
        self.offset = 0
        self.held = b""

    def pass_on(self, to_the_end=False):
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        self.offset += len(data)
        if self.prefix:
            *lines, self.held = (self.held + data).split(b"\n")
            if to_the_end and self.held:
                lines.append(self.held)
            data = b"".join(self.prefix + line + b"\n" for line in lines)
        if data:
            self.target.write(data)
            self.target.flush()


class Guest:
    """The name is guest0 or guest1; network holds QEMU's options for the wire between two guests."""

    def __init__(self, name, folder, settings, network=()):
        self.name = name
        self.results = folder
        self.folder = folder / name
        self.settings = settings
        self.network = list(network)
        self.outputs = []
        self.process = None
        self.started_at = self.booted_at = None
        self.was_killed = False

    def prepare(self, command, visible):
        """Writes what the guest reads: its command runs in the same folder and environment as here."""
        self.folder.mkdir()
        path = os.environ.get("PATH", "").split(":")
        path += [folder for folder in ("/usr/sbin", "/usr/bin", "/sbin", "/bin") if folder not in path]
        environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED}
        environment.update(PATH=":".join(path), RESULTS="/run/results")
        words = ["env", "-i", *(f"{name}={value}" for name, value in environment.items()), *command]
        self.write("command", f"cd {shlex.quote(os.getcwd())} || exit 125\nexec {shlex.join(words)}\n")
        self.write("main", f". {shlex.quote(str(HERE / 'guest_main'))}\n")
        self.write("visible", "".join(f"{folder}\n" for folder in visible))

    def write(self, name, text):
        (self.folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")

    def qemu(self):
        """Returns the command line; its paths are relative to the folder of the run."""
        settings = self.settings
        accelerating, clock = accelerator()
        append = f"console=ttyS0 quiet loglevel=4 panic=-1 nowatchdog mitigations=off{clock} guest={self.name}" \
                 f" topology={settings.topology}"
        return ["qemu-system-x86_64", "-name", f"tensorlane-{self.name}", "-nodefaults", "-no-user-config",
                "-display", "none", "-no-reboot", "-M", "pc", *accelerating, "-smp", str(settings.cpus),
                "-m", str(settings.memory), "-kernel", settings.kernel, "-initrd", settings.initramfs,
                "-append", append, "-chardev", f"file,id=console,path={self.name}/console,append=on",
                "-serial", "chardev:console",
                "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
                "-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
                "-fsdev", "local,id=results,path=.,security_model=none,multidevs=remap",
                "-device", "virtio-9p-pci,fsdev=results,mount_tag=results", *self.network]

    def start(self):
        for name in ("booted", "status"):
            (self.folder / name).unlink(missing_ok=True)
        command = ["setpriv", "--pdeathsig", "KILL", *(str(word) for word in self.qemu())]
        try:
            with open(self.folder / "qemu", "ab") as log:
                self.process = subprocess.Popen(command, cwd=self.results, stdin=subprocess.DEVNULL, stdout=log,
                                                stderr=log, start_new_session=True)
        except OSError as error:
            raise kernels.Unavailable(f"{command[0]}: {error.strerror}") from error
        self.started_at, self.booted_at, self.was_killed = time.monotonic(), None, False

    def read(self, name):
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def fail(self, what):
        lines = [line.rstrip() for name in ("qemu", "console") for line in self.read(name).splitlines()]
        raise Failure("\n".join([f"{self.name} {what}; the end of its console:"]
                                + [f"    {line}" for line in lines[-CONSOLE_LINES:] or ["(nothing)"]]))

    def status(self):
        """Returns the exit status of the command, or None while there is none."""
        text = self.read("status").strip()
        if text and not re.fullmatch(r"\d{1,3}", text):
            self.fail(f"says '{text}' for an exit status")
        return int(text) if text else None

    def watch(self):
        """Passes on the command's output; returns the exit status once there is one. Raises Failure when the guest has
        failed."""
        has_ended = self.process.poll() is not None  # The status is read first, so that the last output is not missed.
        if self.booted_at is None and (self.folder / "booted").exists():
            self.booted_at = time.monotonic()
        status = self.status()
        for output in self.outputs:
            output.pass_on(to_the_end=status is not None)
        if status is not None or self.was_killed:
            return status
        if has_ended:
            self.fail("ended without the exit status of its command")
        now, settings = time.monotonic(), self.settings
        if self.booted_at is None and now - self.started_at > settings.boot_timeout:
            self.fail(f"has not booted within {settings.boot_timeout:g} s")
        if self.booted_at is not None and now - self.booted_at > settings.timeout:
            self.fail(f"has run its command for more than {settings.timeout:g} s")
        return None

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        """Ends the guest at once, like a host that loses its power."""
        self.was_killed = True
        if self.process:
            self.process.kill()
            self.process.wait()

    def end(self):
        """After its status a guest switches itself off."""
        if self.process and (self.folder / "status").exists():
            try:
                self.process.wait(SWITCH_OFF_SEC)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
