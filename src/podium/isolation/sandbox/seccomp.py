"""The system calls a sandboxed program may make, as a BPF program for seccomp. Both back ends load the same one.

An allow-list: what is not in the tables fails with EPERM, and code of a foreign architecture (x32 as well) is killed.
Some calls are allowed for some arguments only: threads but no processes, signals to oneself alone, descriptors without
an owner to be signalled, sockets as a connected pair alone. `inside.py` loads it.
"""

from __future__ import annotations

import functools
import platform
import struct
from collections.abc import Iterable, Mapping
from itertools import pairwise

Instruction = tuple[int, int, int, int]  # `struct sock_filter`: code, jump if true, jump if false, operand

OWN_PID = 0x7FFFFFF1  # stands for the pid of the process that loads the program, which puts its own in

_PLAIN = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
open 2 -, openat 257 56, close 3 57, close_range 436 436, lseek 8 62, stat 4 -, fstat 5 80,
lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, getdents 78 -,
getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, dup 32 23,
dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72,
epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
eventfd 284 -, eventfd2 290 19, sendfile 40 71, copy_file_range 326 285, fsync 74 82, fdatasync 75 83,
ftruncate 77 46, umask 95 166, fadvise64 221 223, statfs 137 43, fstatfs 138 44, mkdir 83 -,
mkdirat 258 34, unlink 87 -, unlinkat 263 35, rmdir 84 -, rename 82 -, renameat 264 38, renameat2 316 276,
mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227,
mincore 27 232, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -, setitimer 38 103,
getitimer 36 102, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114,
gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, timer_create 222 107, timer_settime 223 110,
timer_gettime 224 108, timer_delete 226 111, timer_getoverrun 225 109, timerfd_create 283 85,
timerfd_settime 286 86, timerfd_gettime 287 87, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174,
geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158,
getpgrp 111 -, uname 63 160, sysinfo 99 179, getcpu 309 168, getrlimit 97 163,
getrandom 318 278, sched_yield 24 124, sched_getparam 143 121,
sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
futex 202 98, set_robust_list 273 99, set_tid_address 218 96,
rseq 334 293, membarrier 324 283, arch_prctl 158 -, restart_syscall 219 128, exit 60 93, exit_group 231 94,
wait4 61 260, waitid 247 95, recvfrom 45 207, shutdown 48 210
"""
"""Allowed with any arguments: name, number on x86_64, number on aarch64 (- where it has no such call)."""

_CHECKED = """
sendto 44 206, clone 56 220, clone3 435 435, vfork 58 -, fork 57 -, execve 59 221, execveat 322 281,
kill 62 129, tgkill 234 131, prctl 157 167, prlimit64 302 261, ioctl 16 29, fcntl 72 25, socketpair 53 199,
capset 126 91, setrlimit 160 164, readlink 89 -, readlinkat 267 78, flock 73 32,
sched_getaffinity 204 123, getpriority 140 141, getsid 124 156, getpgid 121 155
"""
"""Allowed for some arguments, or for the harness alone."""

ARCHITECTURES: Mapping[str, tuple[int, int]] = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}
"""Per `platform.machine()`: the kernel's number of it, and its column in the tables."""

_LOAD = 0x20
_EQUAL = 0x15
_GREATER = 0x25
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_AND = 0x54
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_EPERM = 0x00050001
_ENOSYS = 0x00050000 | 38
_X32 = 0x40000000

_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
_SAFE_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; not those that type into a terminal or set an owner."""
_SAFE_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
"""Duplicates, flags and locks; not F_SETOWN, which has the kernel send signals, nor F_SETPIPE_SZ."""
_PR_NAMES = (15, 16)

Check = list[Instruction]


def program(machine: str | None = None, *, harness: bool = False) -> list[Instruction]:
    """The filter of a program under test; of the `harness`, which also forks, kills its children and loads filters.

    Filters add up, so a program is bound by both. Raises `ValueError` for a machine without tables.

    >>> len(program("x86_64")) < 400
    True
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(f"no table of system calls for {machine}; there are tables for {', '.join(ARCHITECTURES)}")
    arch, _ = ARCHITECTURES[machine]
    x32 = [(_AT_LEAST, 0, 1, _X32), _return(_KILL)] if machine == "x86_64" else []
    checks = _HARNESS if harness else _PROGRAM
    checked = numbers(machine, _CHECKED)
    rules: Check = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), _return(_KILL), (_LOAD, 0, 0, 0), *x32]
    for name, check in checks.items():
        if name in checked:  # calls of another number jump over the check
            rules += [(_EQUAL, 0, len(check), checked[name]), *check]
    for low, high in _ranges(numbers(machine, _PLAIN).values()):
        inside = [(_EQUAL, 0, 1, low)] if low == high else [(_AT_LEAST, 0, 2, low), (_GREATER, 1, 0, high)]
        rules += [*inside, _return(_ALLOW)]
    return [*rules, _return(_EPERM)]


def packed(instructions: Iterable[Instruction]) -> bytes:
    """As an array of `struct sock_filter`, which is what `bwrap --seccomp` reads; without `OWN_PID`.

    >>> packed([(0x06, 0, 0, 0x7FFF0000)])
    b'\\x06\\x00\\x00\\x00\\x00\\x00\\xff\\x7f'
    """
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


@functools.cache
def numbers(machine: str, table: str = _PLAIN + "," + _CHECKED) -> dict[str, int]:
    """The system calls of a table by name.

    >>> numbers("x86_64")["read"], numbers("aarch64")["read"]
    (0, 63)
    """
    column = ARCHITECTURES[machine][1]
    rows = [entry.split() for entry in table.replace("\n", " ").split(",") if entry.strip()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _return(what: int) -> Instruction:
    return (_RETURN, 0, 0, what)


def _argument(index: int, *, upper: bool = False) -> Instruction:
    """Half of an argument. The lower one is all that the kernel reads where these checks look."""
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * upper)


def _one_of(index: int, values: Iterable[int], mask: int = 0xFFFFFFFF) -> Check:
    checks = [step for value in values for step in ((_EQUAL, 0, 1, value), _return(_ALLOW))]
    return [_argument(index), (_AND, 0, 0, mask), *checks, _return(_EPERM)]


def _null(index: int) -> Check:
    halves = [step for upper in (False, True) for step in (_argument(index, upper=upper), (_EQUAL, 1, 0, 0))]
    (first, no_first), (second, no_second) = halves[:2], halves[2:]
    return [first, no_first, _return(_EPERM), second, no_second, _return(_EPERM), _return(_ALLOW)]


def _ranges(values: Iterable[int]) -> list[tuple[int, int]]:
    """
    >>> _ranges([3, 1, 2, 9])
    [(1, 3), (9, 9)]
    """
    ordered = sorted(values)
    gaps = [(a, b) for a, b in pairwise(ordered) if b > a + 1]
    starts = [ordered[0], *(b for _, b in gaps)]
    return list(zip(starts, [*(a for a, _ in gaps), ordered[-1]], strict=True))


_ANY: Check = [_return(_ALLOW)]
_NO_NAMESPACES: Check = [_argument(0), (_ANY_BIT, 0, 1, _CLONE_NAMESPACES), _return(_EPERM)]
_BOTH: Mapping[str, Check] = {
    "clone3": [_return(_ENOSYS)],  # its flags are in memory, where no filter sees them; libc falls back on `clone`
    "fcntl": _one_of(1, _SAFE_FCNTLS),
    "ioctl": _one_of(1, _SAFE_IOCTLS),
    # AF_UNIX and SOCK_STREAM: datagrams could be sent to the sockets of others.
    "socketpair": [_argument(0), (_EQUAL, 1, 0, 1), _return(_EPERM), *_one_of(1, [1], mask=0xF)],
    "sendto": _null(4),  # without an address, so to the other end of the pair
}
_PROGRAM: Mapping[str, Check] = {
    **_BOTH,
    "clone": [*_NO_NAMESPACES, _argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _return(_ALLOW), _return(_EPERM)],
    "kill": _one_of(0, [OWN_PID]),
    "tgkill": _one_of(0, [OWN_PID]),
    "prctl": _one_of(0, _PR_NAMES),
    "prlimit64": _one_of(0, [0]),
    "setrlimit": _ANY,
    **dict.fromkeys(("sched_getaffinity", "getsid", "getpgid"), _one_of(0, [0])),  # its own alone
    "getpriority": _one_of(1, [0]),
}
_FREE_FOR_THE_HARNESS = """
fork vfork execve kill tgkill prctl prlimit64 setrlimit capset readlink readlinkat flock sched_getaffinity getpriority
getsid getpgid
"""
_HARNESS: Mapping[str, Check] = {
    **_BOTH,
    "clone": [*_NO_NAMESPACES, _return(_ALLOW)],
    **dict.fromkeys(_FREE_FOR_THE_HARNESS.split(), _ANY),
}
