"""Planning for emulated devices: forecasts and bounds count what running ops on them takes."""

from dataclasses import replace

import pytest
import toy_profiles as toys

from harmony_lab.costs import Profile
from harmony_lab.emulation import Emulation
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode
from harmony_lab.planner.candidates import Candidates
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.search import Switches, search
from harmony_lab.simulator.engine import makespan_s

PLAIN = toys.profile(6, layer_s=0.002)
TAKEN = Emulation(compute_s=0.01, transfer_s=0.001, waking_s=0.0005, copied_bytes_per_s=5e8, kernels_slowed=1.5)
EMULATED = replace(PLAIN, emulation=TAKEN)


def emulated(num_devices: int, *, num_cores: int = 32) -> Machine:
    machine = Machine.emulated(num_devices, memory=8_000_000, link=1e9)
    devices = tuple(replace(device, compute_threads=1) for device in machine.devices)
    return replace(machine, devices=devices, host=replace(machine.host, memory_bytes=2**36, num_cores=num_cores))


@pytest.mark.parametrize("num_cores", [2, 32])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("profile", [PLAIN, EMULATED], ids=["plain", "emulated"])
def test_forecasts_are_near_what_is_simulated(profile: Profile, mode: Mode, num_cores: int) -> None:
    """With few cores the devices wait for them."""
    machine = emulated(3, num_cores=num_cores)
    options = Candidates(PackCosts(profile), machine, 12, mode, prefetch=1, peers=True, budget_bytes=4_000_000)
    for four in options.best(8):
        simulated_s = makespan_s(lower(options.plan(four), profile, machine), profile, machine)
        assert four.seconds == pytest.approx(simulated_s, rel=0.05 if profile is PLAIN else 0.2)


def test_where_ops_take_most_of_the_time_the_best_plan_has_few() -> None:
    machine = emulated(2)
    free, found = (search(profile, machine, 8, shown=2) for profile in (PLAIN, EMULATED))
    num_ops = [len(lower(result.best, PLAIN, machine).ops) for result in (free, found)]
    assert num_ops[1] < num_ops[0] / 2
    assert found.gap < 0.6 < found.candidates[0].step_s / free.lower_bound_s - 1


def test_the_explanation_tells_what_emulation_takes() -> None:
    machine = emulated(2)
    found = search(EMULATED, machine, 8, shown=2, switches=Switches(staying=False))
    without_s = makespan_s(lower(found.best, PLAIN, machine), PLAIN, machine)
    share = 1 - without_s / found.candidates[0].step_s
    assert share > 0.4
    assert f"{share:.0%} of the step is what emulating devices takes" in found.explain()
    real = replace(EMULATED, emulation=None)
    assert "emulating" not in search(real, machine, 8, shown=2, switches=Switches(staying=False)).explain()
