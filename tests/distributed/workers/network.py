"""`megappo doctor --network` on one rank; the named rank is stopped for most of the time.

    network.py CONFIG SLOW_RANK [arguments]

A child process stops and continues its parent by signals, as a machine that is busy with other work
does; -1 slows none.
"""

from __future__ import annotations

import os
import subprocess
import sys

# It ends when its standard input does, and never between a stop and a continue.
PAUSER = """
import os, select, signal, sys, time
parent = int(sys.argv[1])
print("ready", flush=True)
while not select.select([0], [], [], 0)[0]:
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
            [sys.executable, "-c", PAUSER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        pauser.stdout.readline()
        try:
            return measure_pairs(context, elements)
        finally:
            pauser.stdin.close()
            pauser.wait()

    if int(os.environ["RANK"]) == int(sys.argv[2]):
        network._pairs = pairs_while_paused
    return megappo(["doctor", "--network", sys.argv[1], *sys.argv[3:]])


if __name__ == "__main__":
    sys.exit(main())
