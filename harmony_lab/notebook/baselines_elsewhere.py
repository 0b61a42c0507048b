"""Baselines of a large model, worked out in a process of its own: knobs need not share Python's lock with that."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.machine import Machine

__all__ = ["BaselinesElsewhere", "Told", "is_large"]

_LARGE = 2_000  # layers × samples × devices: below, baselines take less than a process needs to start


class Told(NamedTuple):
    """What the table of candidates tells of a baseline; ``text``: how it trains, or why there is none."""

    name: str
    text: str
    step_s: float | None = None
    peak_bytes: tuple[int, ...] = ()
    swap_bytes: int = 0
    bubble_fraction: float = 0.0


def is_large(profile: Profile, machine: Machine, minibatch_size: int) -> bool:
    """Whether it pays to start a process for the baselines."""
    return len(profile) * minibatch_size * machine.num_devices > _LARGE


class BaselinesElsewhere:
    """A process that is told of one model and answers with one baseline after the other.

    It ends by itself when nobody reads any more; ``stop`` ends it at once, from any thread.
    """

    def __init__(self, profile: Profile, machine: Machine, minibatch_size: int, names: Sequence[str]) -> None:
        """Raises ``OSError`` where no process can be started."""
        self._question = {
            "profile": profile.to_json(),
            "machine": machine.to_json(),
            "minibatch_size": minibatch_size,
            "names": list(names),
        }
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is for the kernel
            text=True,
        )

    def answers(self) -> Iterator[Told]:
        """Baselines in the order of ``names``; fewer where the process has ended early."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with process, contextlib.suppress(BrokenPipeError, json.JSONDecodeError):  # it was stopped
            process.stdin.write(json.dumps(self._question))
            process.stdin.close()
            for line in process.stdout:
                fields: dict[str, Any] = json.loads(line)
                yield Told(**fields | {"peak_bytes": tuple(fields["peak_bytes"])})

    def stop(self) -> None:
        self._process.kill()


def _answer() -> None:
    from harmony_lab.planner.baselines import baselines
    from harmony_lab.simulator.engine import run

    question = json.load(sys.stdin)
    profile, machine = Profile.from_json(question["profile"]), Machine.from_json(question["machine"])
    for name in question["names"]:
        (found,) = baselines(profile, machine, question["minibatch_size"], names=[name])
        if found.program is None:
            told = Told(name, f"{name} is not possible here: {found.reason}")
        else:
            trace = run(found.program, profile, machine)
            idle = trace.bubble_fraction
            told = Told(name, str(found), trace.makespan_s, found.peak_bytes, trace.swap_bytes, idle)
        print(json.dumps(told._asdict()), flush=True)


if __name__ == "__main__":
    _answer()
