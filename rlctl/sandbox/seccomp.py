"""A filter of system calls for programs in a sandbox, as bytes of the kernel's BPF.

Namespaces and Landlock leave some ways out of a limit: memory that belongs to no process, keyrings, new namespaces.
Each refused call gives an error, so that a program goes on as on an older kernel.
"""

import errno
import platform
import struct
from dataclasses import dataclass

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_SET = 0x45
_JUMP_IF_GREATER_OR_EQUAL = 0x35
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_KILL = 0x80000000
# Offsets in struct seccomp_data.
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
# CLONE_NEW*: flags of clone that make namespaces.
_NEW_NAMESPACES = 0x7E020000
# Calls of another table of x86-64 (x32) have this bit.
_X32 = 0x40000000


@dataclass(frozen=True)
class _Machine:
    """Numbers of system calls of one processor architecture."""

    audit_id: int
    clone: int
    clone3: int
    socket: int
    refused: dict[str, int]
    # Calls that change a file's mode, owner, times or attributes.
    attributes: dict[str, int]


# Calls that are new enough to have one number on all architectures.
_SHARED = {
    "pidfd_getfd": 438, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
_X86 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "add_key": 248, "request_key": 249, "keyctl": 250,
    "mount": 165, "umount2": 166, "pivot_root": 155, "unshare": 272, "setns": 308, "bpf": 321, "perf_event_open": 298,
    "userfaultfd": 323, "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64, "open_by_handle_at": 304,
    "kexec_load": 246, "init_module": 175, "finit_module": 313, "swapon": 167, "quotactl": 179, "acct": 163,
    "syslog": 103, "mq_open": 240, "personality": 135,
}  # fmt: skip
_ARM = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "add_key": 217, "request_key": 218, "keyctl": 219,
    "mount": 40, "umount2": 39, "pivot_root": 41, "unshare": 97, "setns": 268, "bpf": 280, "perf_event_open": 241,
    "userfaultfd": 282, "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190, "open_by_handle_at": 265,
    "kexec_load": 104, "init_module": 105, "finit_module": 273, "swapon": 224, "quotactl": 60, "acct": 89,
    "syslog": 116, "mq_open": 180, "personality": 92,
}  # fmt: skip
_X86_ATTRIBUTES = {
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94,
    "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188,
    "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
}  # fmt: skip
_ARM_ATTRIBUTES = {
    "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchownat": 54, "fchown": 55, "utimensat": 88, "setxattr": 5,
    "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
}  # fmt: skip
_MACHINES = {
    "x86_64": _Machine(
        audit_id=0xC000003E, clone=56, clone3=435, socket=41, refused=_SHARED | _X86, attributes=_X86_ATTRIBUTES
    ),
    "aarch64": _Machine(
        audit_id=0xC00000B7, clone=220, clone3=435, socket=198, refused=_SHARED | _ARM, attributes=_ARM_ATTRIBUTES
    ),
}


def make_filter(has_sockets: bool, has_own_files: bool) -> bytes | None:
    """Return the filter for this machine's architecture; None if its numbers are not known.

    has_sockets: allow sockets that have an address; without a namespace of the network they reach the machine's.
    has_own_files: allow changes of a file's mode, owner and times. Else they seem to work and do nothing, because
    Landlock does not limit them to a folder.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return None
    lines = [
        _encode_instruction(_LOAD, _ARCHITECTURE),
        _encode_instruction(_JUMP_IF_EQUAL, machine.audit_id, skip_if_true=1),
        _encode_instruction(_RETURN, _KILL),
        _encode_instruction(_LOAD, _NUMBER),
        _encode_instruction(_JUMP_IF_GREATER_OR_EQUAL, _X32, skip_if_false=1),
        _encode_instruction(_RETURN, _ERROR | errno.ENOSYS),
    ]
    for number in sorted(set(machine.refused.values())):
        lines += _refuse_call(number, errno.EPERM)
    # C libraries fall back to `clone`, whose flags a filter can read.
    lines += _refuse_call(machine.clone3, errno.ENOSYS)
    if not has_sockets:
        lines += _refuse_call(machine.socket, errno.EACCES)
    if not has_own_files:
        for number in sorted(machine.attributes.values()):
            # Error 0: the call returns success.
            lines += _refuse_call(number, 0)
    lines += [
        _encode_instruction(_JUMP_IF_EQUAL, machine.clone, skip_if_false=3),
        _encode_instruction(_LOAD, _FIRST_ARGUMENT),
        _encode_instruction(_JUMP_IF_SET, _NEW_NAMESPACES, skip_if_false=1),
        _encode_instruction(_RETURN, _ERROR | errno.EPERM),
        _encode_instruction(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _refuse_call(number: int, error: int) -> list[bytes]:
    return [_encode_instruction(_JUMP_IF_EQUAL, number, skip_if_false=1), _encode_instruction(_RETURN, _ERROR | error)]


def _encode_instruction(code: int, operand: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    """Return one instruction (struct sock_filter). The two numbers say how many instructions a jump skips."""
    return struct.pack("<HBBI", code, skip_if_true, skip_if_false, operand)
