"""What training takes of the host's memory, told before it begins and counted while it runs."""

import copy
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

from harmony_lab.errors import HostMemoryError
from harmony_lab.lab import Lab
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Plan
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.runtime.host_memory import available_bytes
from harmony_lab.trainer import Trainer

WIDTH, BLOCKS, MINIBATCH = 64, 12, 16


def machine(**options: Any) -> Machine:
    return Machine.emulated(2, memory="8MiB", link="200MB/s", **options)


def wide() -> tuple[nn.Module, LayerSequence]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
    )
    return model, decompose(model, batch(), nn.MSELoss())


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(MINIBATCH, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


SINGLE = ",".join(f"{layer}:{layer + 1}" for layer in range(2 * BLOCKS))
PLANS = {
    "dp": f"dp minibatch=16 forward=4[0:12,12:23] backward=4[{SINGLE}] devices=0,1",
    "pp": f"pp minibatch=16 forward=4[0:12,12:23] backward=4[{SINGLE}] devices=0,1",
    "one pack": f"dp minibatch=16 forward=16[] backward=16[0:{2 * BLOCKS}] devices=0",
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"accumulate": 2}], ids=["plain", "clip", "several"])
def test_what_is_forecast_of_the_host_is_what_is_counted(plan: str, options: dict[str, Any]) -> None:
    """Counted: the arena, the optimizer's tensors, and the memory that host blocks lie in."""
    counted, found = host_bytes_of(plan, options)
    assert counted == pytest.approx(found, rel=0.01)


def host_bytes_of(plan: str, options: dict[str, Any]) -> tuple[int, int]:
    """Of one short training: what was counted, and what was forecast of the same."""
    model, layers = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    with Trainer(layers, optimizer, plan, machine(), **options) as trainer:
        count = options.get("accumulate", 1)
        expected = trainer.forecast(accumulate=count)
        for _ in range(2):
            trainer.accumulate([batch(seed) for seed in range(count)])
        counted = trainer.host_bytes
        allocated = trainer._runner._training.memory.memory.num_bytes
        states = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        after = trainer.forecast(accumulate=count)
    assert allocated[HOST] == expected.gradient_bytes + expected.stash_bytes
    assert expected.weight_bytes == pytest.approx(layers.parameter_bytes, rel=0.01)
    assert expected.optimizer_state_bytes == states
    assert after.present_bytes - expected.present_bytes == states
    found = expected.host_bytes - expected.update_bytes - expected.emulated_bytes
    return counted, found


def test_every_gradient_is_forecast_where_updates_wait_for_all() -> None:
    model, layers = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(layers, optimizer, f"{PLANS['pp']} prefetch=1", machine()) as trainer:
        in_time = trainer.forecast().gradient_bytes
    with Trainer(layers, optimizer, PLANS["pp"], machine(), max_grad_norm=1.0) as trainer:
        deferred = trainer.forecast()
    assert deferred.gradient_bytes == pytest.approx(layers.trainable_bytes, rel=0.01)
    assert in_time < 0.7 * deferred.gradient_bytes
    assert deferred.optimizer_state_bytes == 0


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_are_held_once_where_some_steps_leave_their_updates_and_others_do_not(count: int) -> None:
    model, layers = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    reference = copy.deepcopy(model)
    plain = torch.optim.AdamW(reference.parameters())
    with Trainer(layers, optimizer, f"{PLANS['pp']} update=next", machine(), max_grad_norm=1.0) as trainer:
        expected = trainer.forecast(accumulate=count)
        allowed = expected.host_bytes - expected.update_bytes - expected.emulated_bytes
        for step, leaves in enumerate((True, True, False, False, True, False)):
            minibatches = [batch(count * step + number) for number in range(count)]
            loss = trainer.accumulate(minibatches, leave_updates=leaves)
            assert trainer.host_bytes <= 1.01 * allowed
            plain.zero_grad()
            inputs, targets = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
            in_plain = nn.functional.mse_loss(reference(inputs), targets)
            in_plain.backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            plain.step()
            assert loss == pytest.approx(in_plain.item(), rel=1e-4)
    assert expected.gradient_bytes == pytest.approx(layers.trainable_bytes, rel=0.01)


def test_a_profile_made_without_an_optimizer_is_no_excuse_to_forget_its_state() -> None:
    model, layers = wide()
    costs = profile(layers, machine(), microbatch_sizes=(1, 4), trials=1)
    assert costs.optimizer_state_bytes == 0
    with Trainer(layers, torch.optim.Adam(model.parameters()), PLANS["dp"], machine(), profile=costs) as trainer:
        assert trainer.forecast().optimizer_state_bytes >= 2 * layers.parameter_bytes


def test_training_that_does_not_fit_the_host_is_refused_with_numbers_before_anything_is_touched() -> None:
    model, layers = wide()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(HostMemoryError, match=r"but 100 KiB are available\. Free memory") as error:
        Trainer(layers, optimizer, PLANS["dp"], machine(host_memory="100KiB"))
    assert error.value.needed_bytes > error.value.available_bytes == 100 * 1024
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_a_minibatch_larger_than_the_plan_is_refused_where_the_host_has_no_room_for_it() -> None:
    model, layers = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(layers, optimizer, PLANS["dp"], machine()) as trainer:
        enough = trainer.forecast().needed_bytes + 1024
    larger = tuple(part.repeat(50, 1) for part in batch())
    with Trainer(layers, optimizer, PLANS["dp"], machine(host_memory=enough)) as trainer:
        trainer.step(batch())
        with pytest.raises(HostMemoryError, match="activations kept"):
            trainer.step(larger)
        trainer.step(batch())


def test_adding_up_gradients_is_refused_where_only_their_sum_does_not_fit() -> None:
    model, layers = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(layers, optimizer, PLANS["dp"], machine()) as trainer:
        enough = trainer.forecast().needed_bytes + layers.trainable_bytes // 2
    with Trainer(layers, optimizer, PLANS["dp"], machine(host_memory=enough)) as trainer:
        trainer.step(batch())
        with pytest.raises(HostMemoryError, match="gradients that are added up"):
            trainer.accumulate([batch(), batch(1)])
        trainer.step(batch())
    with pytest.raises(HostMemoryError):
        Trainer(layers, optimizer, PLANS["dp"], machine(host_memory=enough), accumulate=2)


def test_verifying_is_refused_where_the_copies_have_no_room() -> None:
    model, layers = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    with Trainer(layers, optimizer, PLANS["dp"], machine()) as trainer:
        enough = trainer.forecast().needed_bytes + 1024
    before = copy.deepcopy(model.state_dict())
    with Trainer(layers, optimizer, PLANS["dp"], machine(host_memory=enough)) as trainer:
        with pytest.raises(HostMemoryError, match="two copies of the model") as error:
            trainer.verify([batch()], shortened=False)
        assert error.value.needed_bytes > error.value.available_bytes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_lab_forecasts_its_chosen_plan_and_refuses_to_launch_what_the_host_cannot_hold() -> None:
    model = models.gpt2(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    small = Machine.emulated(2, memory="64MiB", link="1e12", host_memory="300KiB")
    with Lab(model, models.gpt2_batch(4), optimizer, minibatch_size=4, machine=small) as lab:
        lab.measure()
        with pytest.raises(HostMemoryError, match="no plan fits"):
            lab.search()
        lab.choose(f"pp minibatch=4 forward=2[] backward=2[0:{len(lab.layers)}] devices=0,1")
        expected = lab.forecast()
        assert not expected.fits
        assert expected.device_budget_bytes == small.budgets
        assert "KiB available" in str(expected)
        assert "<th>host, optimizer state</th>" in expected._repr_html_()
        assert lab.forecast(accumulate=4).accumulated_bytes == lab.layers.trainable_bytes
        assert lab.forecast(max_grad_norm=1.0).gradient_bytes >= expected.gradient_bytes
        with pytest.raises(HostMemoryError):
            lab.launch([models.gpt2_batch(4)], 1)
        assert lab.run is None


# -- what the host has ----------------------------------------------------------------------------------------------


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_limit_of_a_control_group_or_of_one_above_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/outer/inner\n")
    group(tmp_path / "outer" / "inner", memory__max="max", memory__current=5000)
    group(
        tmp_path / "outer", memory__max=10_000, memory__current=7000, memory__stat="anon 1000\ninactive_file 500\nx 1"
    )
    assert available_bytes(tmp_path, membership) == 3500


def test_the_older_kind_of_control_group_counts_too(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("12:cpu,cpuacct:/a\n3:memory:/b\n")
    group(tmp_path / "memory" / "b", memory__limit_in_bytes=9000, memory__usage_in_bytes=8000)
    assert available_bytes(tmp_path, membership) == 1000


def test_without_a_limit_it_is_what_the_system_has(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/\n")
    group(tmp_path, memory__max="max", memory__current=5000)
    whole = available_bytes(tmp_path, tmp_path / "none")
    assert available_bytes(tmp_path, membership) == pytest.approx(whole, rel=0.2)
    assert whole > 10_000_000


def test_a_plan_keeps_its_text_in_a_forecast_of_another_size() -> None:
    """A forecast is for the plan's own minibatch; smaller ones take no more."""
    model, layers = wide()
    with Trainer(layers, torch.optim.SGD(model.parameters(), lr=0.1), PLANS["pp"], machine()) as trainer:
        whole = trainer.forecast().stash_bytes
        trainer.step(tuple(part[:5] for part in batch()))
        assert trainer.host_bytes < layers.parameter_bytes + whole + layers.trainable_bytes
        assert trainer.plan == Plan.parse(PLANS["pp"])
