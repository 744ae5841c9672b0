"""What is promised for Windows: a client of a daemon elsewhere can be imported there."""

import subprocess
import sys

PROGRAM = """
import os, socket, sys, time

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
for name in {names}:
    sys.modules.pop(name, None)
for module, gone in ((os, {of_os}), (time, {of_time}), (socket, ("AF_UNIX",))):
    for name in gone:
        if hasattr(module, name):
            delattr(module, name)
from covenant import Client, Worker, connect
print(Client.__name__, Worker.__name__, connect.__name__)
"""
MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "uvloop")
OF_OS = "fork geteuid getuid uname killpg statvfs fdatasync O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK".split()
OF_TIME = "CLOCK_BOOTTIME CLOCK_MONOTONIC clock_gettime_ns".split()


def test_client_worker_and_connect_are_imported_without_what_unix_alone_has() -> None:
    program = PROGRAM.format(names=MODULES, of_os=tuple(OF_OS), of_time=tuple(OF_TIME))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["Client", "Worker", "connect"], "")
