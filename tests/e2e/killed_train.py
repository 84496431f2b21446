"""`megappo.train` whose engines are killed: killed_train.py KILLS CONFIG.yaml [key=value ...]

KILLS is a JSON list of {"rank", "when", "version"} and, for an engine of several processes, the
number of its "process". This process of that rank's engine gets a SIGKILL, once,

- "generating", "validating": while it owes the answers to a call on this weight version;
- "idle": right after that generation;
- "syncing": at a random moment of the push of this version, between two of its tensors;
- "asleep": right after the sleep that follows generation from this version.

`tools/engine_kills.py` kills at moments that are not known beforehand; here each kill hits what it
is meant for, so that a test can count what follows.
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
    from megappo.trainer import build_engine

    mine = [kill for kill in kills if kill["rank"] == rank]

    class KilledEngine(SGLangEngine):
        def generate(self, requests, **listening):
            greedy = requests and requests[0].sampling.temperature == 0
            # Its start draws a few tokens to test seeds, of version 0.
            if kill := self._due("validating" if greedy else "generating", self.weight_version):
                # Stopped, so that on a busy machine it is not done before it is killed.
                os.kill(self._pid(kill), signal.SIGSTOP)
                threading.Timer(random.uniform(0.0, 0.05), self._kill, [kill]).start()
            answers = super().generate(requests, **listening)
            if not greedy and (kill := self._due("idle", self.weight_version)):
                self._kill(kill)
            return answers

        def update_weights(self, named_tensors, *, expected_names, version):
            if kill := self._due("syncing", version):
                moment = random.randrange(len(expected_names))
                named_tensors = self._dying(named_tensors, kill, moment)
            return super().update_weights(
                named_tensors, expected_names=expected_names, version=version
            )

        def sleep(self):
            released = super().sleep()
            if kill := self._due("asleep", self.weight_version):
                self._kill(kill)
            return released

        def _dying(self, named_tensors, kill, moment: int) -> Iterator[tuple[str, object]]:
            for i, pair in enumerate(named_tensors):
                if i == moment:
                    self._kill(kill)
                yield pair

        def _due(self, when: str, version: int) -> dict[str, object] | None:
            for kill in mine:
                if (kill["when"], kill["version"]) == (when, version):
                    mine.remove(kill)
                    return kill
            return None

        def _kill(self, kill) -> None:
            os.kill(self._pid(kill), signal.SIGKILL)

        def _pid(self, kill) -> int:
            return self.pids[kill.get("process", 0)]

    build_engine.SGLangEngine = KilledEngine


if __name__ == "__main__":
    install(json.loads(sys.argv[1]), int(os.environ["RANK"]))
    code = main(sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
