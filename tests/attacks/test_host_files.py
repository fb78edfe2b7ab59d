"""Reading and writing what belongs to the host."""

from tests.attacks.arena import Arena, Attack, changed_the_host, check, said_it_got_through, said_secret

READS = {
    "opens_it": "print(open('<FILE>').read())",
    "opens_it_by_descriptor": "import os; print(os.read(os.open('<FILE>', os.O_RDONLY), 100))",
    "opens_it_below_a_folders_descriptor": (
        "import os; d = os.open('<FOLDER>', os.O_RDONLY); print(os.read(os.open('secret.py', os.O_RDONLY, dir_fd=d), 100))"
    ),
    "opens_it_by_path_only_and_then_really": (
        "import os; d = os.open('<FILE>', os.O_PATH); print(open(f'/proc/self/fd/{d}').read())"
    ),
    "links_to_it": "import os; os.symlink('<FILE>', 'link'); print(open('link').read())",
    "links_to_its_folder": "import os; os.symlink('<FOLDER>', 'way'); print(open('way/secret.py').read())",
    "goes_up_from_its_own_folder": "print(open('../' * 20 + '<FILE>'[1:]).read())",
    "goes_through_its_own_root": "print(open('/proc/self/root<FILE>').read())",
    "goes_through_its_inits_root": "import os; print(open(f'/proc/{os.getppid()}/root<FILE>').read())",
    "goes_through_its_inits_folder": "import os; print(open(f'/proc/{os.getppid()}/cwd/../../..<FILE>').read())",
    "goes_through_the_orchestrators_root": "print(open('/proc/<ORCHESTRATOR>/root<FILE>').read())",
    "changes_its_folder": "import os; os.chdir('<FOLDER>'); print(open('secret.py').read())",
    "lists_the_folder": "import os; print(os.listdir('<FOLDER>'))",
    "scans_the_folder": "import os; print([entry.name for entry in os.scandir('<FOLDER>')])",
    "globs": "import glob; print(glob.glob('<FOLDER>/*'))",
    "maps_it": "import mmap; f = open('<FILE>'); print(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[:])",
    "copies_it": "import shutil; shutil.copy('<FILE>', 'mine'); print(open('mine').read())",
    "sends_it_to_a_file": (
        "import os; a = os.open('<FILE>', os.O_RDONLY); b = os.open('sent', os.O_RDWR | os.O_CREAT)\n"
        "os.sendfile(b, a, 0, 100); print(open('sent').read())"
    ),
    "imports_it": "import sys; sys.path.insert(0, '<FOLDER>'); import secret; print(secret.SECRET)",
    "runs_it": "import runpy; print(runpy.run_path('<FILE>')['SECRET'])",
    "has_a_traceback_show_it": "import linecache; print(linecache.getline('<FILE>', 1))",
    "reads_it_in_c": (
        "import ctypes; c = ctypes.CDLL(None); b = ctypes.create_string_buffer(100); f = c.open(b'<FILE>', 0)\n"
        "c.read(f, b, 99); print(b.value)"
    ),
    "reads_a_neighbours_environment": "print(open('/proc/<NEIGHBOUR>/environ').read())",
    "reads_every_processs_environment": (
        "import glob\nfor path in glob.glob('/proc/*/environ'):\n    try: print(*(e for e in open(path).read().split(chr(0)) if 'CANARY' in e))\n"
        "    except OSError: pass"
    ),
    "tries_every_descriptor": (
        "import os\nfor n in (0, *range(5, 200)):\n    try: print(os.pread(n, 1 << 16, 0))\n    except OSError: pass"
    ),
}
NOT_SHOWN = {"tries_every_descriptor", "goes_up_from_its_own_folder"}
PROGRAMS = {
    "starts_cat": "import subprocess; print(subprocess.run(['cat', '<FILE>'], capture_output=True).stdout)",
    "starts_a_shell": "import os; print(os.popen('cat < <FILE>').read())",
    "starts_find": "import subprocess; print(subprocess.run(['find', '<FOLDER>'], capture_output=True).stdout)",
}
PARTS_OF_THE_SYSTEM = {
    "users": "/etc/passwd",
    "passwords": "/etc/shadow",
    "the_machines_id": "/etc/machine-id",
    "the_kernels_command_line": "/proc/cmdline",
    "the_kernels_log": "/dev/kmsg",
    "the_machines_memory": "/proc/meminfo",
    "services_of_the_system": "/run",
    "logs": "/var/log",
    "devices": "/sys/class",
    "the_orchestrators_maps": "/proc/<ORCHESTRATOR>/maps",
    "the_orchestrators_command_line": "/proc/<ORCHESTRATOR>/cmdline",
}
METADATA = {
    "stats": "import os; os.stat('<FILE>'); print('<GOT>')",
    "asks_for_access": "import os; assert os.access('<FILE>', os.F_OK); print('<GOT>')",
}
ATTRIBUTES = {
    "lists_attributes": "import os; os.listxattr('<FILE>'); print('<GOT>')",
    "lists_attributes_of_a_link": "import os; os.listxattr('<FILE>', follow_symlinks=False); print('<GOT>')",
    "reads_an_attribute": "import os; print(os.getxattr('<FILE>', 'user.note'))",
    "reads_an_attribute_of_a_link": "import os; print(os.getxattr('<FILE>', 'user.note', follow_symlinks=False))",
}
WRITES = {
    "overwrites": "open('<FILE>', 'w').write('gone')",
    "appends": "open('<FILE>', 'a').write('more')",
    "truncates": "import os; os.truncate('<FILE>', 0)",
    "opens_it_to_truncate": "import os; os.open('<FILE>', os.O_WRONLY | os.O_TRUNC)",
    "removes": "import os; os.unlink('<FILE>')",
    "renames": "import os; os.rename('<FILE>', '<FOLDER>/other')",
    "replaces": "import os; open('new', 'w').close(); os.symlink('/', '<FOLDER>/s'); os.replace('new', '<FILE>')",
    "changes_its_mode": "import os; os.chmod('<FILE>', 0o600)",
    "changes_its_mode_by_descriptor": "import os; os.fchmod(os.open('<FILE>', os.O_RDONLY), 0o600)",
    "changes_its_times": "import os; os.utime('<FILE>')",
    "links_hard": "import os; os.link('<FILE>', '<FOLDER>/hard')",
    "makes_a_folder": "import os; os.mkdir('<FOLDER>/new')",
    "makes_a_link": "import os; os.symlink('/', '<FOLDER>/new')",
    "makes_a_pipe": "import os; os.mkfifo('<FOLDER>/new')",
    "makes_a_file": "open('<FOLDER>/new', 'x')",
    "makes_a_file_through_its_root": "open('/proc/self/root<FOLDER>/new', 'x')",
    "makes_a_file_through_inits_root": "import os; open(f'/proc/{os.getppid()}/root<FOLDER>/new', 'x')",
    "makes_a_database": "import sqlite3; sqlite3.connect('<FOLDER>/new').execute('create table t (x)')",
    "makes_a_temporary_file": "import tempfile; tempfile.mkstemp(dir='<FOLDER>')",
    "moves": "import shutil; shutil.move('<FILE>', '<FOLDER>/moved')",
    "maps_it_to_write": "import mmap; f = open('<FILE>', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0:1] = b'X'; m.flush()",
    "writes_in_c": "import ctypes; c = ctypes.CDLL(None); c.write(c.open(b'<FILE>', 1), b'gone', 4)",
}
WRITES_BY_PROGRAMS = {
    "starts_a_shell_to_write": "import os; os.system('echo gone > <FILE>')",
    "starts_touch": "import subprocess; subprocess.run(['touch', '<FOLDER>/new'])",
}
SYSTEM_WRITES = {
    "the_interpreter": "import os; open(os.__file__, 'a'); print('<GOT>')",
    "a_system_folder": "open('/usr/rlm-broker-canary', 'x'); print('<GOT>')",
    "our_own_package": "import sandbox_worker.repl.repl as r; open(r.__file__, 'a'); print('<GOT>')",
    "a_device": "open('/dev/zero', 'r+b', buffering=0); print('<GOT>')",
    "the_kernels_settings": "open('/proc/sys/kernel/hostname', 'w'); print('<GOT>')",
    "a_control_group": "open('/sys/fs/cgroup/cgroup.procs', 'w'); print('<GOT>')",
    "links_to_the_interpreter": "import os; os.link(os.__file__, 'mine'); open('mine', 'a'); print('<GOT>')",
}

OPENS = "import os\np = '<PATH>'\nprint('<GOT>', (os.listdir(p) if os.path.isdir(p) else os.open(p, os.O_RDONLY)))"

ATTACKS = [
    *(Attack(f"reads: {n}", code, said_secret, shown=n not in NOT_SHOWN) for n, code in READS.items()),
    *(Attack(f"reads: {n}", code, said_secret) for n, code in PROGRAMS.items()),
    *(
        Attack(f"opens: {n}", OPENS.replace("<PATH>", path), said_it_got_through, shown=n == "users")
        for n, path in PARTS_OF_THE_SYSTEM.items()
    ),
    *(Attack(f"metadata: {n}", code, said_it_got_through, levels=("strict",)) for n, code in METADATA.items()),
    *(
        Attack(f"attributes: {n}", code, said_it_got_through if "lists" in n else said_secret, shown="lists" in n)
        for n, code in ATTRIBUTES.items()
    ),
    *(Attack(f"writes: {n}", code, changed_the_host) for n, code in WRITES.items()),
    *(Attack(f"writes: {n}", code, changed_the_host) for n, code in WRITES_BY_PROGRAMS.items()),
    *(Attack(f"system: {n}", code, said_it_got_through, shown=False) for n, code in SYSTEM_WRITES.items()),
]


def test_host_files_are_out_of_reach(arena: Arena) -> None:
    check(arena, ATTACKS)
