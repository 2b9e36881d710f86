"""Two hundred hostile programs for a sandbox. Each bounds itself, in case that nothing else does.

A program prints ESCAPED if it reached something outside. Effects that it cannot see itself are looked for by the test.
"""

# ruff: noqa: E501  (each program is one line)

from dataclasses import dataclass

ESCAPED = "ESCAPED"
# Name of a file that no program may make or change on this machine: {folder} has it.
CANARY = "canary"


@dataclass(frozen=True)
class HostileProgram:
    """A program, with {folder}, {pid}, {tcp} and {udp} of this machine in it."""

    name: str
    source: str


def _attempt(*lines: str) -> str:
    """Return a program that tries each line, and says that it escaped after one that raises no error."""
    body = "\n".join(
        f"try:\n    {line}\n    print({ESCAPED!r}, {line!r})\nexcept Exception as error:\n    print(error)"
        for line in lines
    )
    return f"import os, socket, signal, ctypes, sys, time\nlibrary = ctypes.CDLL(None, use_errno=True)\n{body}\n"


def _check(expression: str, before: str = "") -> str:
    """Return a program that says that it escaped if an expression is true."""
    head = "import os, socket, signal, ctypes, sys, time, stat\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
    return f"{head}try:\n    {before or 'pass'}\n    if {expression}: print({ESCAPED!r})\nexcept Exception as error:\n    print(error)\n"


def _forks() -> dict[str, str]:
    """Return bombs of at most 300 processes."""
    loop = "import os, time\nfor number in range(300):\n    try:\n        {body}\n    except OSError: break\n"
    child = "if os.fork() == 0: {act}"
    acts = {
        "that sleep": "time.sleep(20); os._exit(0)",
        "that compute": "[None for _ in iter(int, 1)]",
        "in new sessions": "os.setsid(); time.sleep(20); os._exit(0)",
        "that ignore signals": "import signal; [signal.signal(n, 1) for n in (1, 2, 15)]; time.sleep(20); os._exit(0)",
        "that hold memory": "x = bytearray(2 << 20); time.sleep(20); os._exit(0)",
        "that write files": "open(str(os.getpid()), 'w').write('x' * 1000); time.sleep(20); os._exit(0)",
        "that become sh": "os.execv('/bin/sh', ['sh', '-c', 'sleep 20'])",
        "that close all": "os.closerange(0, 64); time.sleep(20); os._exit(0)",
        "with double forks": "os.fork() and os._exit(0); os.setsid(); time.sleep(20); os._exit(0)",
        "that stop": "os.kill(os.getpid(), 19)",
    }
    programs = {f"forks {name}": loop.format(body=child.format(act=act)) for name, act in acts.items()}
    programs |= {f"forks {name}, and waits": source + "time.sleep(20)\n" for name, source in list(programs.items())[:6]}
    return programs


def _threads() -> dict[str, str]:
    source = "import threading, time\nfor number in range(300):\n    try: threading.Thread(target={act}, daemon=True).start()\n    except RuntimeError: break\n"
    return {
        "threads that sleep": source.format(act="time.sleep, args=(20,)"),
        "threads that compute": source.format(act="lambda: [None for _ in iter(int, 1)]") + "time.sleep(20)\n",
    }


def _memory() -> dict[str, str]:
    """Return allocations that ask for 8 GB, and would touch at most 600 MB where nothing holds them."""
    big = 8 << 30
    programs = {
        "bytearray of 8 GB": f"x = bytearray({big})",
        "list of 8 GB": f"x = [None] * {big // 8}",
        "text of 8 GB": f"x = 'x' * {big}",
        "number of 8 GB": f"x = 1 << {big * 8}",
        "mapping of 8 GB": f"import mmap; x = mmap.mmap(-1, {big}); x[0] = 1",
        "shared mapping of 8 GB": f"import mmap; x = mmap.mmap(-1, {big}, mmap.MAP_SHARED); x[{big - 1}] = 1",
        "malloc of 8 GB": f"import ctypes; x = ctypes.create_string_buffer({big})",
        "600 MB in pieces": "x = [bytearray(1 << 20) for _ in range(600)]; import time; time.sleep(20)",
        "stack": "import sys, threading; threading.stack_size(1 << 30); sys.setrecursionlimit(10**9)\ndef f(): f()\nt = threading.Thread(target=f); t.start(); t.join()",
        "recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "memfd of 600 MB": "import os\nfd = os.memfd_create('x')\nfor _ in range(600): os.write(fd, bytes(1 << 20))\nimport time; time.sleep(20)",
        "eight memfds": "import os, time\nfds = [os.memfd_create('x') for _ in range(8)]\nfor fd in fds:\n    for _ in range(70): os.write(fd, bytes(1 << 20))\ntime.sleep(20)",
        "files in /dev/shm": "import time\nfor n in range(60): open(f'/dev/shm/{n}', 'wb').write(bytes(10 << 20))\ntime.sleep(20)",
        "System V memory": "import ctypes\nl = ctypes.CDLL(None)\nids = [l.shmget(0, 10 << 20, 0o1666) for _ in range(60)]\nprint(ids)\nassert ids[0] == -1 or print('ESCAPED')",
        "pipes": "import os, fcntl, time\nkept = []\nfor _ in range(400):\n    r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20); os.write(w, bytes(1 << 20)); kept += [r, w]\ntime.sleep(20)",
        "socket pairs": "import socket, time\nkept = [socket.socketpair() for _ in range(400)]\ntime.sleep(20)",
        "locked memory": "import ctypes, mmap\nx = mmap.mmap(-1, 64 << 20)\nl = ctypes.CDLL(None)\nb = (ctypes.c_char * (64 << 20)).from_buffer(x)\nassert l.mlock(b, 64 << 20) or print('ESCAPED')",
        "message queues": "import ctypes\nl = ctypes.CDLL(None)\nassert l.msgget(0, 0o1666) == -1 or print('ESCAPED')",
        "regular expression": "import re; re.match('(a*)*b', 'a' * 40)",
        "decimal": "10 ** 10 ** 9",
    }
    for count, mib in ((8, 70), (30, 20), (60, 10), (200, 3)):
        programs[f"{mib} MB in {count} processes"] = (
            f"import os, time\nfor _ in range({count}):\n    try:\n        if os.fork() == 0:\n"
            f"            x = bytearray({mib} << 20); x[::4096] = b'x' * len(x[::4096]); time.sleep(20); os._exit(0)\n"
            "    except OSError: break\ntime.sleep(20)\n"
        )
    return programs


def _time() -> dict[str, str]:
    endless = {
        "loop": "while True: pass",
        "loop in C": "sum(iter(int, 1))",
        "loop of calls": "import os\nwhile True: os.getppid()",
        "loop of sleeps": "import time\nwhile True: time.sleep(0.001)",
        "sleep": "import time; time.sleep(1000)",
        "wait for input": "import sys; sys.stdin.read(); open('/dev/full')\nimport signal; signal.pause()",
        "ignored signals": "import signal\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        "handler of SIGXCPU": "import signal; signal.signal(24, lambda *a: None)\nwhile True: pass",
        "stopped itself": "import os; os.kill(os.getpid(), 19)",
        "lock": "import threading; l = threading.Lock(); l.acquire(); l.acquire()",
        "pipe to itself": "import os; r, w = os.pipe(); os.read(r, 1)",
        "flood of clocks": "import time\nwhile True: time.clock_gettime_ns(0)",
        "flood of randomness": "import os\nwhile True: os.urandom(1 << 20)",
        "flood of random numbers": "import random\nwhile True: random.random()",
        "flood of signals": "import os, signal\nsignal.signal(10, lambda *a: None)\nwhile True: os.kill(os.getpid(), 10)",
        "timer of signals": "import signal\nsignal.signal(14, lambda *a: None); signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)\nwhile True: pass",
        "computing child": "import os\nif os.fork() == 0:\n    while True: pass\nos.wait()",
        "children one after another": "import os\nwhile True:\n    if os.fork() == 0: os._exit(0)\n    os.wait()",
        "real-time priority": "import os\ntry: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)); print('ESCAPED')\nexcept OSError: pass\nwhile True: pass",
        "higher priority": "import os\ntry: os.nice(-10); print('ESCAPED')\nexcept OSError: pass\nwhile True: pass",
    }
    return {f"endless {name}": source for name, source in endless.items()}


def _outputs() -> dict[str, str]:
    return {
        "output in lines": "while True: print('x' * 1000)",
        "output in one line": "import sys\nwhile True: sys.stdout.write('x' * 100000)",
        "errors": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        "output of two processes": "import os\nos.fork()\nwhile True: print('x' * 1000)",
        "output by a descriptor": "import os\nwhile True: os.write(1, b'x' * 65536)",
        "output of nothing": "import os\nwhile True: os.write(1, b'')",
        "colours of a terminal": "print('\\x1b[2J\\x1b]0;title\\x07' * 100)",
        "ioctl of a terminal": _check("False", "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); print('ESCAPED')"),
        "bytes that are no text": "import os; os.write(1, bytes(range(256)) * 100)",
        "closed output": "import os; os.close(1); os.close(2)",
    }


def _files() -> dict[str, str]:
    programs = {
        "file of 10 GB": "f = open('f', 'wb')\nfor _ in range(10_000): f.write(bytes(1 << 20))",
        "sparse file of 10 GB": "f = open('f', 'wb'); f.truncate(10 << 30)",
        "file of 10 GB by fallocate": "import os; os.posix_fallocate(os.open('f', 65), 0, 10 << 30)",
        "many files": "for n in range(60): open(str(n), 'wb').write(bytes(2 << 20))\nimport time; time.sleep(20)",
        "empty files": "for n in range(30_000): open(str(n), 'w').close()",
        "files in the private tmp": "import tempfile, time\nfor n in range(60): open(f'{tempfile.gettempdir()}/{n}', 'wb').write(bytes(2 << 20))\ntime.sleep(20)",
        "deep folders": "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')",
        "folders without rights": "import os\nos.mkdir('d'); open('d/f', 'w'); os.chmod('d', 0)",
        "long names": "for n in range(100): open('x' * 250 + str(n), 'w').close()",
        "names with newlines": "open('a\\n\\x1b[2J', 'w').close()",
        "held deleted file": "import os, time\nf = open('f', 'wb'); os.unlink('f')\nfor _ in range(40): f.write(bytes(1 << 20))",
    }
    targets = ("/etc/passwd", "/etc/shadow", "/root", "/home", "/var/log", "/proc/1/environ", "/work", "/")
    for target in targets:
        programs[f"link to {target}"] = f"import os; os.symlink({target!r}, 'out')"
    programs["link to the canary"] = "import os; os.symlink('{folder}/canary', 'out')"
    programs["pipe in place of a file"] = "import os; os.mkfifo('out')"
    programs["socket in place of a file"] = "import socket; socket.socket(socket.AF_UNIX).bind('out')"
    programs["folder in place of a file"] = "import os; os.makedirs('out/x')"
    programs["hard link to a file of the system"] = _attempt("os.link('/etc/ld.so.cache', 'out')")
    return programs


def _writes() -> dict[str, str]:
    """Return attempts to write or read outside the working folder."""
    programs = {
        f"write {path}": _attempt(f"open({path!r}, 'a').close()")
        for path in (
            "{folder}/canary", "{folder}/new", "/etc/passwd", "/etc/hosts", "/usr/bin/env", "/usr/new", "/bin/new",
            "/lib/new", "/root/new", "/var/tmp/new", "/boot/new", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
            "/proc/{pid}/oom_score_adj", "/proc/{pid}/mem", "/sys/kernel/new", "/dev/kmsg", "/dev/mem", "/dev/new",
        )
    }  # fmt: skip
    programs |= {
        f"read {path}": _check(f"open({path!r}, 'rb').read()")
        for path in (
            "{folder}/canary", "/etc/shadow", "/root/.bashrc", "/proc/{pid}/environ", "/proc/{pid}/cmdline",
            "/proc/{pid}/maps", "/proc/kcore", "/dev/mem", "/dev/kmsg", "/proc/{pid}/fd/0",
        )
    }  # fmt: skip
    programs |= {
        "remove the canary": _attempt("os.unlink('{folder}/canary')"),
        "rename the canary": _attempt("os.rename('{folder}/canary', '{folder}/other')"),
        "truncate the canary": _attempt("os.truncate('{folder}/canary', 0)"),
        "list the folder": _attempt("os.listdir('{folder}')"),
        "climb out": _attempt("open('../../../../../../../../{folder}/canary').read()"),
        "change the root": _attempt("os.chroot('/')"),
        "climb by a root": _attempt(
            "open('/proc/{pid}/root{folder}/canary').read()", "open('/proc/{pid}/cwd/canary').read()"
        ),
        "inherited descriptors": "import os\nfor fd in range(3, 256):\n    try: os.fstat(fd)\n    except OSError: continue\n    print('ESCAPED', fd)",
    }
    return programs


def _devices() -> dict[str, str]:
    kinds = {"memory": (1, 1), "kernel log": (1, 11), "first disk": (8, 0), "virtual disk": (254, 0), "loop": (7, 0)}
    programs = {
        f"device of {name}": _attempt(
            f"os.mknod('dev', 0o60666 if {major} > 1 else 0o20666, os.makedev({major}, {minor}))"
        )
        for name, (major, minor) in kinds.items()
    }
    programs["mount of proc"] = _check("library.mount(b'proc', b'/tmp', b'proc', 0, None) == 0")
    programs["mount of a tmpfs"] = _check("library.mount(b'x', b'.', b'tmpfs', 0, None) == 0")
    programs["bind mount"] = _check("library.mount(b'/', b'.', None, 4096, None) == 0")
    programs["remount for writing"] = _check("library.mount(None, b'/usr', None, 32 | 4096, None) == 0")
    programs["unmount"] = _check("library.umount2(b'/tmp', 2) == 0")
    programs["swap"] = _check("library.swapon(b'/dev/zero', 0) == 0")
    return programs


def _processes() -> dict[str, str]:
    programs = {
        f"signal {number} to the parent": _attempt(f"os.kill({{pid}}, {number})") for number in (0, 1, 2, 9, 15, 19)
    }
    programs |= {
        "signal to all": _check("False", "signal.signal(15, signal.SIG_IGN); os.kill(-1, 15)"),
        "signal to its parent": _check("False", "os.kill(os.getppid(), 9); time.sleep(0.2)"),
        "signal to its group": _check("False", "os.killpg(0, 9)"),
        "pidfd of the parent": _attempt("os.pidfd_open({pid}) if os.path.exists('/proc/{pid}/stat') else 1/0"),
        "attach to the parent": _check("library.ptrace(16, {pid}, 0, 0) == 0"),
        "trace itself": _check("library.ptrace(0, 0, 0, 0) == 0"),
        "memory of the parent": _check("library.syscall(310, {pid}, 0, 0, 0, 0, 0) == 0"),
        "descriptor of the parent": _check("library.syscall(438, {pid}, 0, 0) >= 0"),
        "priority of the parent": _attempt("os.setpriority(os.PRIO_PROCESS, {pid}, 19)"),
        "limits of the parent": _attempt("__import__('resource').prlimit({pid}, 7, (3, 3))"),
        "processes of others": _check("any('{pid}' == name for name in os.listdir('/proc'))"),
        "orphan that outlives": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(20)\n    os._exit(0)",
        "orphan without output": "import os, time\nif os.fork() == 0:\n    os.closerange(0, 64); os.setsid(); time.sleep(20)",
        "sleeping children": "import subprocess\nfor _ in range(5): subprocess.Popen(['sleep', '20'])",
        "daemon of a shell": "import os; os.system('nohup sleep 20 >/dev/null 2>&1 &')",
        "subreaper": _check(
            "False", "library.prctl(36, 1, 0, 0, 0); os.fork() or (os.fork() or time.sleep(20), os._exit(0))"
        ),
        "death signal off": "import ctypes, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(20)",
        "abstract socket of a service": _check(
            "library and socket.socket(socket.AF_UNIX).connect('\\0{unix}') is None"
        ),
    }
    return programs


def _network() -> dict[str, str]:
    return {
        "TCP to this machine": _attempt("socket.create_connection(('127.0.0.1', {tcp}), 2)"),
        "TCP by IPv6": _attempt("socket.create_connection(('::1', {tcp}), 2)"),
        "UDP to this machine": _check("False", "socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {udp}))"),
        "UDP outside": _attempt("s = socket.socket(2, 2); s.connect(('8.8.8.8', 53)); s.send(b'x')"),
        "name lookup": _attempt("socket.getaddrinfo('example.com', 80)"),
        "metadata service": _attempt("socket.create_connection(('169.254.169.254', 80), 2)"),
        "raw socket": _attempt("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
        "packet socket": _attempt("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
        "socket of virtual machines": _attempt("socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).connect((2, 1))"),
        "docker's socket": _attempt("socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')"),
        "interfaces up": _check("library.syscall(16, 3, 0x8914, 0) == 0"),
        "curl": _check("os.system('curl -s -m 2 http://127.0.0.1:{tcp}/ >/dev/null 2>&1') == 0"),
    }


def _kernel() -> dict[str, str]:
    calls = {
        "key into the session": "library.syscall(248, b'user', b'k', b'v', 1, -3) > 0",
        "keyring of the session": "library.syscall(250, 0, -3, 0) > 0",
        "keyring of the user": "library.syscall(250, 0, -4, 1) > 0",
        "request of a key": "library.syscall(249, b'user', b'k', None, -3) > 0",
        "namespace of users": "library.unshare(0x10000000) == 0",
        "namespace of mounts": "library.unshare(0x20000) == 0",
        "namespace of the network": "library.unshare(0x40000000) == 0",
        "clone with a namespace": "library.syscall(56, 0x10000011, 0, 0, 0, 0) > 0",
        "programs of BPF": "library.syscall(321, 0, 0, 0) >= 0",
        "counters of performance": "library.syscall(298, b'\\0' * 128, 0, -1, -1, 0) >= 0",
        "io_uring": "library.syscall(425, 4, b'\\0' * 120) >= 0",
        "userfaultfd": "library.syscall(323, 0) >= 0",
        "handles of files": "library.syscall(304, -100, b'\\0' * 16, 0) >= 0",
        "modules": "library.syscall(313, 0, b'', 0) == 0",
        "kernel to boot": "library.syscall(246, 0, 0, 0, 0) == 0",
        "log of the kernel": "library.syscall(103, 3, ctypes.create_string_buffer(64), 64) > 0",
        "restart": "library.syscall(169, 0, 0, 0, None) == 0",
        "name of the machine": "library.sethostname(b'x', 1) == 0",
        "clock": "library.settimeofday(b'\\0' * 16, None) == 0",
        "quotas": "library.syscall(179, 0x80000700, b'/dev/sda', 0, None) == 0",
        "personality": "library.syscall(135, 0x0040000) >= 0",
        "root by setuid": "library.setuid(0) == 0",
        "groups of root": "library.setgroups(1, (ctypes.c_uint32 * 1)(0)) == 0",
        "capabilities": "library.prctl(47, 2, 21, 0, 0) == 0",
        "new rights": "library.prctl(38, 0, 0, 0, 0) == 0",
    }
    programs = {name: _check(expression) for name, expression in calls.items()}
    programs["set-uid programs"] = _check("os.system('su -c true root </dev/null 2>/dev/null') == 0 and os.getuid()")
    programs["own set-uid program"] = _check(
        "os.stat('s').st_uid == 0 and os.getuid()", "open('s', 'w').close(); os.chmod('s', 0o4755)"
    )
    programs["higher limits"] = _attempt("import resource; resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))")
    programs["higher limit of memory"] = _attempt("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    programs["crash"] = "import ctypes; ctypes.string_at(0)"
    programs["abort with a core"] = "import os; os.abort()"
    programs["illegal instruction"] = "import os; os.kill(os.getpid(), 4)"
    return programs


def _collect() -> list[HostileProgram]:
    parts = (_forks, _threads, _memory, _time, _outputs, _files, _writes, _devices, _processes, _network, _kernel)
    programs = dict[str, str]()
    for part in parts:
        programs |= part()
    return [HostileProgram(name, source) for name, source in programs.items()]


HOSTILE_PROGRAMS = _collect()
