"""`megappo.train` whose engines are killed: killed_train.py KILLS CONFIG.yaml [key=value ...]

KILLS is a JSON list of {"rank", "when", "version"}. The scheduler of that rank's engine gets a
SIGKILL, once, at a random moment

- "generating": of the call that samples from this weight version;
- "syncing": of the push of this version, between two of its tensors;
- "asleep": right after the sleep that follows generation from this version.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator

from megappo.train import main


def install(kills: list[dict[str, object]], rank: int) -> None:
    """Puts an engine that dies as planned in the place where the trainer takes its own from."""
    from megappo.rollout.sglang_engine import SGLangEngine
    from megappo.trainer import build

    mine = [kill for kill in kills if kill["rank"] == rank]

    class KilledEngine(SGLangEngine):
        def generate(self, requests):
            # Its start draws a few tokens to test seeds; a restarted engine has no plan left.
            if self._is_time("generating", self.weight_version):
                threading.Timer(random.uniform(0.0, 0.01), self._kill).start()
            return super().generate(requests)

        def update_weights(self, named_tensors, *, expected_names, version):
            if self._is_time("syncing", version):
                named_tensors = self._dying(named_tensors, random.randrange(len(expected_names)))
            return super().update_weights(
                named_tensors, expected_names=expected_names, version=version
            )

        def sleep(self):
            released = super().sleep()
            if self._is_time("asleep", self.weight_version):
                self._kill()
            return released

        def _dying(self, named_tensors, count: int) -> Iterator[tuple[str, object]]:
            for i, pair in enumerate(named_tensors):
                if i == count:
                    self._kill()
                yield pair

        def _is_time(self, when: str, version: int) -> bool:
            kill = {"rank": rank, "when": when, "version": version}
            if kill not in mine:
                return False
            mine.remove(kill)
            return True

        def _kill(self) -> None:
            os.kill(self.pids[0], signal.SIGKILL)

    build.SGLangEngine = KilledEngine


if __name__ == "__main__":
    install(json.loads(sys.argv[1]), int(os.environ["RANK"]))
    code = main(sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
