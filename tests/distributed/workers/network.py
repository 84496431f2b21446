"""`megappo doctor --network` on one rank; the named rank is stopped for most of the time.

    network.py CONFIG SLOW_RANK [arguments]

A child process stops and continues its parent by signals, as a machine that is busy with other work
does; -1 slows none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

PAUSER = """
import os, signal, sys, time
parent = int(sys.argv[1])
print("ready", flush=True)
while os.getppid() == parent:
    os.kill(parent, signal.SIGSTOP)
    time.sleep(0.05)
    os.kill(parent, signal.SIGCONT)
    time.sleep(0.001)
"""


def main() -> int:
    from megappo.cli import main as megappo
    from megappo.distributed import network

    measure_pairs = network._pairs

    def pairs_while_paused(context, elements):
        pauser = subprocess.Popen(
            [sys.executable, "-c", PAUSER, str(os.getpid())], stdout=subprocess.PIPE
        )
        pauser.stdout.readline()
        try:
            return measure_pairs(context, elements)
        finally:
            pauser.kill()
            pauser.wait()
            os.kill(os.getpid(), signal.SIGCONT)

    if int(os.environ["RANK"]) == int(sys.argv[2]):
        network._pairs = pairs_while_paused
    return megappo(["doctor", "--network", sys.argv[1], *sys.argv[3:]])


if __name__ == "__main__":
    sys.exit(main())
