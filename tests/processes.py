"""Starts processes that train together."""

import fcntl
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

from sources import TESTS

# Processes that wait for each other do so without sleep: two groups at once take several times as long as in turns.
TURNS = pathlib.Path(tempfile.gettempdir()) / f"ms_optim tests of user {os.getuid()}.lock"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launched(count, folder, script, *arguments):
    """Run a script in so many processes; return how they ended and the ends of what they said."""
    binaries = pathlib.Path(sys.executable).parent
    command = [str(binaries / "msrun"), f"--worker_num={count}", f"--local_worker_num={count}", "--join=True"]
    command += [f"--master_port={free_port()}", f"--log_dir={folder}", str(TESTS / script)]
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with TURNS.open("w") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX)
        run = subprocess.run(
            [*command, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
    logs = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("worker_*.log")))
    return run.returncode, f"msrun ended with {run.returncode}: {run.stdout[-2000:]}{run.stderr[-2000:]}{logs}"
