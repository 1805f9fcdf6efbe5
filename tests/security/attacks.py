"""Attacks on a sandbox, and hacks of a grader: programs that a model could write.

Each attack is the body of a function `attack(world)`. It returns a true value where it got through and False (or an
exception, or no end at all within the limits) where it was held. `world` names things outside that the test has put
there: a secret file, a secret in the environment of the parent, a listening port, a process, and so on. Attacks whose
damage shows outside are judged there as well (see `test_sandbox.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

PRELUDE = """
import ctypes, errno, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
NR = {nr}
def syscall(name, *args):
    number = NR[name]
    result = libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
"""
"""Before every attack. `{nr}`: numbers of system calls."""

SYSCALLS = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "memfd_create": 319, "shmget": 29, "io_uring_setup": 425, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "mount": 165, "unshare": 272,
        "setns": 308, "pivot_root": 155, "init_module": 175, "pidfd_open": 434, "pidfd_send_signal": 424,
        "pidfd_getfd": 438, "clone": 56, "clone3": 435, "msgget": 68, "semget": 64, "mq_open": 240, "kexec_load": 246,
        "syslog": 103, "fsopen": 430, "open_tree": 428, "personality": 135, "tkill": 200, "rt_sigqueueinfo": 129,
        "seccomp": 317, "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300, "swapon": 167,
        "settimeofday": 164, "reboot": 169, "acct": 163, "quotactl": 179, "chroot": 161, "mknodat": 259,
        "setxattr": 188, "truncate": 76, "kcmp": 312, "process_madvise": 440, "landlock_create_ruleset": 444,
        "move_pages": 279, "ioperm": 173, "modify_ldt": 154,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "memfd_create": 279, "shmget": 194, "io_uring_setup": 425, "bpf": 280,
        "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219, "add_key": 217, "mount": 40, "unshare": 97,
        "setns": 268, "pivot_root": 41, "init_module": 105, "pidfd_open": 434, "pidfd_send_signal": 424,
        "pidfd_getfd": 438, "clone": 220, "clone3": 435, "msgget": 186, "semget": 190, "mq_open": 180,
        "kexec_load": 104, "syslog": 116, "fsopen": 430, "open_tree": 428, "personality": 92, "tkill": 130,
        "rt_sigqueueinfo": 138, "seccomp": 277, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "fanotify_init": 262, "swapon": 224, "settimeofday": 170, "reboot": 142, "acct": 89, "quotactl": 60,
        "chroot": 51, "mknodat": 33, "setxattr": 5, "truncate": 45, "kcmp": 272, "process_madvise": 440,
        "landlock_create_ruleset": 444, "move_pages": 239,
    },
}  # fmt: skip

FILES = {
    "read a secret file": "return world['secret'] in open(world['secret_file']).read()",
    "read /etc/passwd": "return 'root' in open('/etc/passwd').read()",
    "read /etc/shadow": "return ':' in open('/etc/shadow').read()",
    "list the home folder": """
        paths = [os.path.join(world['home'], name) for name in os.listdir(world['home'])]
        return any(not sys.prefix.startswith(path) for path in paths)""",
    "list /tmp": "return os.path.basename(world['folder']) in os.listdir('/tmp')",
    "write beside the grader": "open(world['folder'] + '/planted', 'w').write('x'); return True",
    "overwrite a file": "open(world['secret_file'], 'a').write('x'); return True",
    "truncate a file": "return syscall('truncate', world['victim_file'].encode(), 0) == 0",
    "remove a file": "os.unlink(world['victim_file']); return True",
    "rename a file": "os.rename(world['victim_file'], world['victim_file'] + '.bak'); return True",
    "open a file to others": "os.chmod(world['victim_file'], 0o777); return True",
    "change the time of a file": "os.utime(world['victim_file'], (0, 0)); return True",
    "give a file an attribute": "os.setxattr(world['victim_file'], 'user.x', b'1'); return True",
    "poison the standard library": "return open(os.__file__, 'a') is not None",
    "poison a pyc": """
        import importlib.util
        path = importlib.util.cache_from_source(os.__file__)
        open(path, 'r+b').write(b''); os.utime(path); return True""",
    "plant a sitecustomize": """
        path = os.path.dirname(os.__file__) + '/planted_by_podium.py'
        open(path, 'w').close(); os.unlink(path); return True""",
    "a symbolic link out": "os.symlink(world['secret_file'], '/tmp/link-x'); return open('/tmp/link-x').read()",
    "a hard link": "os.link(world['secret_file'], world['folder'] + '/hard'); return True",
    "out by /proc/1/root": "return open('/proc/1/root' + world['secret_file']).read()",
    "out by /proc/self/root": "return world['secret'] in open('/proc/self/root' + world['secret_file']).read()",
    "out by dots": "return open('/tmp/' + '../' * 20 + world['secret_file']).read()",
    "a file handle": """
        handle = struct.pack('Ii', 128, 0) + bytes(128); mount = bytes(8)
        return syscall('name_to_handle_at', -100, world['secret_file'].encode(), handle, mount, 0) == 0""",
    "a large file": """
        for folder in (world['folder'], '/tmp', '/dev/shm', '/var/tmp', '.'):
            try:
                with open(folder + '/large', 'wb') as file:
                    for _ in range(64): file.write(bytes(1 << 20)); file.flush()
                return True
            except (OSError, MemoryError): pass
        return False""",
}
SECRETS = {
    "the own environment": "return any(world['secret_name'] in each for each in os.environ)",
    "the environment of the parent": """
        return world['secret_name'].encode() in open('/proc/%d/environ' % os.getppid(), 'rb').read()""",
    "the environment of any process": """
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                if world['secret_name'].encode() in open('/proc/%s/environ' % pid, 'rb').read(): return True
            except OSError: pass
        return False""",
    "command lines": """
        return any('python' in open('/proc/%s/cmdline' % p).read() for p in os.listdir('/proc') if p.isdigit())""",
    "inherited descriptors": """
        for fd in range(3, 1024):
            try:
                os.lseek(fd, 0, 0)
                if world['secret'].encode() in os.read(fd, 4096): return True
            except OSError: pass
        return False""",
    "a descriptor of the parent": """
        fd = syscall('pidfd_open', os.getppid(), 0)
        return any(syscall('pidfd_getfd', fd, n, 0) > 0 for n in range(3, 20))""",
    "the descriptors of the harness": """
        folder = '/proc/%d/fd/' % os.getppid()
        return any(os.readlink(folder + name) for name in os.listdir(folder))""",
}
OTHERS = {
    "the target of a link": "return bool(os.readlink(world['link']))",
    "the target of a link of the system": """
        return any(os.readlink(path) for path in ('/lib64', '/lib', '/bin/sh') if os.path.islink(path))""",
    "a lock that others would wait for": """
        import fcntl
        with open(os.__file__) as file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True""",
    "the priority of the parent": "return os.getpriority(os.PRIO_PROCESS, os.getppid()) is not None",
    "the session of the parent": "return os.getsid(os.getppid()) is not None",
    "the group of the parent": "return os.getpgid(os.getppid()) is not None",
    "the processors of the parent": "return bool(os.sched_getaffinity(os.getppid()))",
    "fifty thousand timers": """
        made = ctypes.c_void_p()
        return sum(libc.timer_create(1, None, ctypes.byref(made)) == 0 for _ in range(50_000)) > 1000""",
}
NETWORK = {
    "TCP": "return socket.create_connection(('127.0.0.1', world['port']), 1) is not None",
    "UDP": """
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.sendto(b'x', ('127.0.0.1', world['port'])); return True""",
    "IPv6": "return socket.socket(socket.AF_INET6) is not None",
    "a raw socket": "return socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) is not None",
    "netlink": "return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) is not None",
    "a Unix socket by path": "s = socket.socket(socket.AF_UNIX); s.connect(world['unix_socket']); return True",
    "an abstract Unix socket": "s = socket.socket(socket.AF_UNIX); s.connect(world['abstract_socket']); return True",
    "a datagram from a pair to a path": """
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        a.sendto(b'x', world['datagram_socket']); return True""",
    "listen": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); return True",
}
PROCESSES = {
    "fork": """
        pid = os.fork()
        if pid == 0: os._exit(0)
        return True""",
    "vfork and run": "import subprocess; return subprocess.run(['/bin/true']).returncode == 0",
    "run a program in its place": "os.execv(sys.executable, [sys.executable, '-c', 'print(\"THROUGH\")'])",
    "clone as a system call": """
        pid = syscall('clone', 17, 0, 0, 0, 0)
        if pid == 0: os._exit(0)
        return True""",
    "clone3": """
        arguments = struct.pack('11Q', 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
        pid = syscall('clone3', arguments, 88)
        if pid == 0: os._exit(0)
        return True""",
    "signal the parent": "os.kill(os.getppid(), 0); return True",
    "kill the harness": "os.kill(os.getppid(), signal.SIGKILL); return True",
    "signal everybody": "os.kill(-1, signal.SIGCONT); return True",
    "signal the group": "os.kill(0, signal.SIGCONT); return True",
    "signal a process outside": "os.kill(world['pid'], signal.SIGUSR1); return True",
    "signal by pidfd": """
        fd = syscall('pidfd_open', world['pid'], 0); syscall('pidfd_send_signal', fd, 10, None, 0); return True""",
    "signal by queue": "return syscall('rt_sigqueueinfo', os.getppid(), 0, bytes(128)) == 0",
    "signal by a descriptor's owner": """
        import fcntl
        a, b = socket.socketpair()
        fcntl.fcntl(a, fcntl.F_SETOWN, os.getppid()); fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC); b.send(b'x')
        return fcntl.fcntl(a, fcntl.F_GETOWN) == os.getppid()""",
    "signal by ioctl": """
        import fcntl
        a, b = socket.socketpair(); fcntl.ioctl(a, 0x8901, struct.pack('i', os.getppid())); return True""",
    "trace the parent": "return syscall('ptrace', 16, os.getppid(), 0, 0) == 0",
    "read the memory of the parent": """
        return syscall('process_vm_readv', os.getppid(), bytes(16), 0, bytes(16), 0, 0) == 0""",
    "write the memory of the parent": "return open('/proc/%d/mem' % os.getppid(), 'r+b') is not None",
    "limits of the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3)); return True",
    "a daemon that survives": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3); open(world['folder'] + '/daemon', 'w').close()
            os._exit(0)
        return True""",
    "a daemon that holds the output": """
        if os.fork() == 0:
            time.sleep(30); os._exit(0)
        return True""",
    "a session of its own": "os.setsid(); return True",
    "a process group of its own": "os.setpgid(0, 0); return True",
    "priority": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19); return True",
    "a processor for itself": "os.sched_setaffinity(os.getppid(), {0}); return True",
    "real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); return True",
}
RESOURCES = {
    "a fork bomb": """
        made = 0
        for _ in range(200):
            if os.fork() == 0: time.sleep(3); os._exit(0)
            made += 1
        return made >= 100""",
    "a thread bomb": """
        made = []
        for _ in range(1000):
            t = threading.Thread(target=time.sleep, args=(2,), daemon=True); t.start(); made.append(t)
        return len(made) >= 1000""",
    "a gigabyte": "held = bytearray(1 << 30); held[::4096] = b'x' * len(held[::4096]); return True",
    "a gigabyte in pieces": """
        held = []
        for _ in range(64): held.append(b'x' * (16 << 20))
        return len(held) == 64""",
    "a gigabyte in four processes": """
        pids = []
        for _ in range(4):
            pid = os.fork()
            if pid == 0: held = b'x' * (300 << 20); os._exit(0)
            pids.append(pid)
        return all(os.waitpid(pid, 0)[1] == 0 for pid in pids)""",
    "a mapping": "import mmap; m = mmap.mmap(-1, 1 << 30); return len(m) == 1 << 30",
    "shared memory of System V": "return syscall('shmget', 0, 64 << 20, 0o1600) >= 0",
    "shared memory without a name": "fd = syscall('memfd_create', b'x', 0); os.truncate(fd, 64 << 20); return True",
    "shared memory with a name": """
        name = '/dev/shm/podium-attack'
        os.close(os.open(name, os.O_CREAT | os.O_RDWR)); os.unlink(name); return True""",
    "message queues": "return syscall('msgget', 0, 0o1600) >= 0",
    "semaphores": "return syscall('semget', 0, 1, 0o1600) >= 0",
    "POSIX message queues": """
        syscall('mq_open', b'podium-attack', os.O_CREAT | os.O_RDWR, 0o600, None); return True""",
    "a hoard of pipes": """
        import fcntl
        held = [os.pipe() for _ in range(400)]
        return len(held) == 400""",
    "large pipes": """
        import fcntl
        r, w = os.pipe(); return fcntl.fcntl(w, 1031, 1 << 20) >= 1 << 20""",
    "a hoard of files": "return len([open('/dev/null') for _ in range(500)]) == 500",
    "an endless loop": "while True: pass",
    "a long sleep": "time.sleep(60); return True",
    "a loop that ignores signals": """
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass""",
    "a loop in C": "9 ** 9 ** 9; return True",
    "a regular expression": "import re; return re.match('(a+)+$', 'a' * 64 + 'b') is None",
    "a flood of output": "\n        for _ in range(1 << 10): os.write(1, b'x' * (1 << 16))\n        return True",
    "a flood of errors": "\n        for _ in range(1 << 7): os.write(2, b'x' * (1 << 16))\n        return False",
    "closed output and a sleep": "\n        os.closerange(0, 64)\n        time.sleep(60)",
    "deep recursion": """
        sys.setrecursionlimit(1 << 30)
        def f(): return f()
        return f()""",
    "a core dump": """
        resource.setrlimit(resource.RLIMIT_CORE, (-1, -1)); return resource.getrlimit(resource.RLIMIT_CORE)[0] == -1""",
}
PRIVILEGES = {
    "a user namespace": "return syscall('unshare', 0x10000000) == 0",
    "a network namespace": "return syscall('unshare', 0x40000000) == 0",
    "a namespace by clone": """
        pid = syscall('clone', 0x10000000 | 17, 0, 0, 0, 0)
        if pid == 0: os._exit(0)
        return True""",
    "the namespace of another": "fd = os.open('/proc/1/ns/mnt', os.O_RDONLY); return syscall('setns', fd, 0) == 0",
    "mount": """
        target = world['folder'] if os.path.exists(world['folder']) else '/tmp'
        return syscall('mount', b'none', target.encode(), b'tmpfs', 0, 0) == 0""",
    "mount the new way": "return syscall('fsopen', b'tmpfs', 0) >= 0",
    "a tree of mounts": "return syscall('open_tree', -100, b'/', 1) >= 0",
    "pivot_root": "return syscall('pivot_root', b'/', b'/') == 0",
    "chroot": "os.chroot('/'); return True",
    "a device": "os.mknod(world['folder'] + '/disk', 0o60600, os.makedev(8, 0)); return True",
    "the raw disk": """
        import glob
        return any(os.open(disk, os.O_RDONLY) for disk in glob.glob('/dev/[svnx]d*') + glob.glob('/dev/nvme*'))""",
    "kvm": "return os.open('/dev/kvm', os.O_RDWR) >= 0",
    "kernel messages": "return syscall('syslog', 3, bytes(100), 100) >= 0 or os.open('/dev/kmsg', os.O_RDONLY) >= 0",
    "write to /proc/sys": """
        name = '/proc/sys/kernel/core_pattern'
        value = open(name).read(); open(name, 'w').write(value); return True""",
    "control groups": """
        import glob
        files = glob.glob('/sys/fs/cgroup/*/cgroup.procs') + glob.glob('/sys/fs/cgroup/cgroup.procs')
        return any(os.access(each, os.W_OK) and open(each, 'a') for each in files)""",
    "io_uring": "return syscall('io_uring_setup', 1, bytes(120)) >= 0",
    "bpf": "return syscall('bpf', 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(104), 120) >= 0",
    "perf events": "return syscall('perf_event_open', struct.pack('II', 1, 112) + bytes(104), 0, -1, -1, 0) >= 0",
    "userfaultfd": "return syscall('userfaultfd', 1) >= 0",
    "keys of the kernel": "return syscall('add_key', b'user', b'x', b'y', 1, -3) >= 0",
    "a key ring": "return syscall('keyctl', 0, -3, 1) >= 0",
    "type into a terminal": """
        import fcntl, termios
        for name in ('/dev/tty', '/dev/console', '/dev/pts/0'):
            try: fcntl.ioctl(os.open(name, os.O_RDWR), termios.TIOCSTI, b'x'); return True
            except OSError: pass
        return fcntl.ioctl(0, termios.TIOCSTI, b'x') == 0""",
    "become root": "os.setuid(0); return os.geteuid() == 0 and os.access('/etc/shadow', os.R_OK)",
    "capabilities": """
        data = bytes(24); libc.capget(struct.pack('Ii', 0x20080522, 0), data); return any(data)""",
    "raise a limit": """
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); return soft != -1""",
    "raise the processor time": "resource.setrlimit(resource.RLIMIT_CPU, (100, 100)); return True",
    "be looked into": "return libc.prctl(4, 1, 0, 0, 0) == 0",
    "a speculative store": "return libc.prctl(53, 0, 2, 0, 0) == 0",
    "another personality": "return syscall('personality', 0x0040000) >= 0",
    "a module of the kernel": "return syscall('init_module', b'', 0, b'') == 0",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time()); return True",
    "the name of the machine": "socket.sethostname(socket.gethostname()); return True",
    "a 32-bit system call": """
        import mmap
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')  # mov eax, 20 (getpid); int 0x80; ret
        function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
        return function() == os.getpid()""",
    "an x32 system call": """
        result = libc.syscall(ctypes.c_long(0x40000000 + 41), 2, 1, 0); return result >= 0""",
}
ATTACKS: dict[str, str] = {
    f"{kind}: {name}": body
    for kind, group in (
        ("files", FILES),
        ("secrets", SECRETS),
        ("others", OTHERS),
        ("network", NETWORK),
        ("processes", PROCESSES),
        ("resources", RESOURCES),
        ("privileges", PRIVILEGES),
    )
    for name, body in group.items()
}

ENDLESS = (
    *("resources: an endless loop", "resources: a long sleep", "resources: a loop that ignores signals"),
    *("resources: a loop in C", "resources: a regular expression", "resources: closed output and a sleep"),
)
"""Held by a time limit, so they take as long as it."""


def program(names: Sequence[str], machine: str) -> str:
    """The attacks as a program with functions `attack_0`, `attack_1` and so on."""
    source = PRELUDE.replace("{nr}", repr(SYSCALLS[machine]))
    for i, name in enumerate(names):
        lines = ATTACKS[name].strip("\n").split("\n")
        indented = "\n".join("    " + line.removeprefix("        ") for line in lines)
        source += f"\ndef attack_{i}(world):\n{indented}\n"
    return source
