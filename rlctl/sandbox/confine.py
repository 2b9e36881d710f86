"""Program that confines itself and then becomes another one.

`python -I -S confine.py CONFINEMENT STDIN STATUS COMMAND...` runs before each program of the sandbox `process`, so it
imports little. CONFINEMENT is JSON with the fields of
`Confinement` in process_sandbox.py. STDIN is the descriptor of the program's standard input, STATUS one for an error.
Each step is needed: an error ends this process before the program begins.
"""

import base64
import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

_PR_SET_KEEPCAPS = 8
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_SECCOMP_MODE_FILTER = 2
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
# System calls have these numbers on all architectures.
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
# Rights of struct landlock_ruleset_attr, by the first version that knows them.
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}
_TCP_RIGHTS = 0x3
_SCOPES = 0x3
_READ_RIGHTS = 0xD  # execute, read files, list folders
_FILE_ONLY_RIGHTS = 0xC007  # execute, write, read, truncate, ioctl
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none."""
    return max(0, int(_LIBRARY.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def main() -> None:
    """Confine this process, and become the command. Write the error that prevents it to STATUS."""
    status = int(sys.argv[3])
    # The program does not inherit it.
    os.set_inheritable(status, False)
    try:
        _confine_and_run(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])
    except OSError as error:
        os.write(status, f"{error.filename or ''} {error.strerror}".strip().encode())
        os._exit(1)


def _confine_and_run(confinement: dict[str, Any], stdin: int, command: list[str]) -> None:
    """Confine this process, and become the command."""
    os.dup2(stdin, 0)
    os.close(stdin)
    os.chdir(confinement["work"])
    if landlock_version():
        ruleset = _make_ruleset(confinement["readable"], confinement["writable"])
    if confinement["user"] is not None:
        _become_user(confinement["user"])
    _check(_LIBRARY.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    for name, value in confinement["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if landlock_version():
        _check(_LIBRARY.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "Landlock")
        os.close(ruleset)
    if confinement["filter"]:
        _filter_calls(base64.b64decode(confinement["filter"]))
    os.execvpe(command[0], command, confinement["variables"])


def _make_ruleset(readable: list[str], writable: list[str]) -> int:
    """Return a descriptor of Landlock's rules: folders to read, folders to write, no TCP, no signals to others."""
    version = landlock_version()
    all_rights = max(rights for first, rights in _FILE_RIGHTS.items() if first <= version)
    attributes = struct.pack("QQQ", all_rights, _TCP_RIGHTS if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    sizes = {1: 8, 2: 8, 3: 8, 4: 16, 5: 16}
    ruleset = int(_LIBRARY.syscall(_LANDLOCK_CREATE_RULESET, attributes, sizes.get(version, 24), 0))
    _check(ruleset, "Landlock")
    rights_of = dict.fromkeys(readable, _READ_RIGHTS) | dict.fromkeys(writable, all_rights)
    for path, rights in rights_of.items():
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= _FILE_ONLY_RIGHTS
        rule = struct.pack("=Qi", rights & all_rights, descriptor)
        _check(_LIBRARY.syscall(_LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"Landlock for {path}")
        os.close(descriptor)
    return ruleset


def _become_user(user: int) -> None:
    """Become another user. Keep one right of root: to read files of any mode, below the folders that Landlock allows.

    Without it, an interpreter in a home folder could not be read.
    """
    for capability in range(_LAST_CAPABILITY + 1):
        if capability != _CAP_DAC_READ_SEARCH:
            # Fails for numbers that this kernel does not have.
            _LIBRARY.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _check(_LIBRARY.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "capabilities")
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    mask = 1 << _CAP_DAC_READ_SEARCH if landlock_version() else 0
    _check(_LIBRARY.capset(header, struct.pack("IIIIII", mask, mask, mask, 0, 0, 0)), "capabilities")
    if mask:
        arguments = (_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0)
        _check(_LIBRARY.prctl(*arguments), "capabilities")


def _filter_calls(instructions: bytes) -> None:
    """Refuse system calls by a filter of BPF instructions of 8 bytes."""
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer))
    _check(_LIBRARY.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "filter of system calls")


def _check(status: int, step: str) -> None:
    if status < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), step)


if __name__ == "__main__":
    main()
