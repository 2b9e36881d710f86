"""The filter of system calls has the kernel's numbers, and sandboxes refuse the calls that lead around a limit."""

import platform
import re
from pathlib import Path

import pytest

from rlctl.config.sandbox_schema import SandboxName
from rlctl.sandbox import seccomp
from tests.unit.sandbox.kinds import LOCAL_KINDS, run_source

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
CALLS = """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    return library.syscall(number, *arguments), os.strerror(ctypes.get_errno())
print(call(101, 0, 0, 0, 0))     # ptrace(PTRACE_TRACEME)
print(call(250, 0, -3, 0))       # keyctl(KEYCTL_GET_KEYRING_ID)
print(call(319, b"x", 0))        # memfd_create
print(call(29, 0, 4096, 0o1600)) # shmget
print(call(272, 0x10000000))     # unshare(CLONE_NEWUSER)
print(call(425, 1, 0))           # io_uring_setup
print(call(272 | 0x40000000, 0)) # the same table of x32
"""


def test_the_numbers_are_those_of_the_kernels_header() -> None:
    if not HEADER.exists():
        pytest.skip(f"{HEADER} is missing: apt-get install linux-libc-dev")
    known = {name: int(number) for name, number in re.findall(r"__NR_(\w+) (\d+)", HEADER.read_text())}
    numbers = seccomp._SHARED | seccomp._X86 | seccomp._X86_ATTRIBUTES
    # fchmodat2 is newer than some headers.
    assert {name: number for name, number in numbers.items() if known.get(name, number) != number} == {}


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_calls_around_a_limit_are_refused(kind: SandboxName) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the calls are those of x86-64")
    lines = run_source(kind, CALLS).stdout.decode().splitlines()
    assert lines == ["(-1, 'Operation not permitted')"] * 6 + ["(-1, 'Function not implemented')"]


def test_an_unknown_architecture_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert seccomp.make_filter(has_sockets=True, has_own_files=True) is None
