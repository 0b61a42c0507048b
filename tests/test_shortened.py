"""Models with layers that repeat left out, to verify what the host has no room for copies of."""

import copy
from collections.abc import Iterable

import models
import pytest
import torch
from torch import Tensor, nn

from harmony_lab.copies import copied_layers
from harmony_lab.costs import Profile
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.shortened import kept_layers, shortened, shortened_plan
from harmony_lab.trainer import Trainer

MACHINE = Machine.emulated(2, memory="64MiB", link=1e12)
PLANS = {
    "dp": "dp minibatch=4 forward=1[0:3,3:6] backward=1[0:3,3:6,6:8] devices=0,1",
    "pp": "pp minibatch=4 forward=2[0:3,3:6] backward=2[0:3,3:6,6:8] devices=0,1 mirrored=on resident=0:3,3:6 "
    "kept=0:3 stash=3 optimizer=3:6",
    "bf16": "pp minibatch=4 forward=2[0:7] backward=1[0:4,4:7,7:8] devices=1,0 precision=bf16",
}
Setting = tuple[nn.Module, LayerSequence, torch.optim.Optimizer, dict[str, Profile]]


@pytest.fixture(scope="module")
def setting() -> Setting:
    """GPT-2, with dropout and one parameter for embedding and head."""
    model = models.gpt2(layers=6, dropout=0.1)
    layers = decompose(model, models.gpt2_batch(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    costs = {
        precision: profile(layers, MACHINE, optimizer, precision=precision, microbatch_sizes=(1, 2), trials=1)
        for precision in ("fp32", "bf16")
    }
    return model, layers, optimizer, costs


def test_a_shortened_model_computes_what_a_model_with_fewer_layers_does(setting: Setting) -> None:
    _, layers, optimizer, _ = setting
    kept = kept_layers(layers)
    assert kept == (0, 6, 7)
    short = copied_layers(shortened(layers, kept, nn.Module()), optimizer)
    smaller = models.gpt2(layers=1, dropout=0.0)
    whole = layers.model.state_dict()
    smaller.load_state_dict({name: whole[name.replace("h.0.", "h.5.")] for name in smaller.state_dict()})
    without_dropout = decompose(models.gpt2(layers=6, dropout=0.0), models.gpt2_batch(2))
    plain = copied_layers(
        shortened(LayerSequence(**{**vars(without_dropout), "tensors": layers.tensors}), kept, nn.Module()), optimizer
    )
    batch = models.gpt2_batch(2)
    tensors, _ = layers.flatten_batch(batch)
    expected = smaller(**batch, use_cache=False).loss.item()
    assert plain.loss(tensors, (0, 2), 0).item() == pytest.approx(expected, rel=1e-6)
    assert short.loss(tensors, (0, 2), 0).item() != pytest.approx(expected, rel=1e-6), "it has dropout"


@pytest.mark.parametrize("plan", PLANS)
def test_a_shortened_model_is_verified_and_nothing_of_the_whole_changes(setting: Setting, plan: str) -> None:
    model, layers, optimizer, costs = setting
    chosen = Plan.parse(PLANS[plan])
    limit = None if chosen.device_updates else 0.5
    with Trainer(layers, optimizer, chosen, MACHINE, profile=costs[chosen.precision], max_grad_norm=limit) as trainer:
        trainer.step(models.gpt2_batch(4))
        before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        certificate = trainer.verify([models.gpt2_batch(4, seed=1), models.gpt2_batch(3, seed=2)], shortened=True)
        assert certificate.passed, certificate
        assert (certificate.num_layers, certificate.shortened_from) == (3, 8)
        assert "shortened to 3 of its 8 layers" in str(certificate)
        assert certificate["parameters"].largest == 0.0
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


class Momentum(torch.optim.Optimizer):
    """Keeps what it knows of parameters beside its state."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.moments: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                moment = self.moments.setdefault(parameter, torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
                parameter.sub_(moment, alpha=0.1)


def test_the_optimizer_of_a_shortened_copy_shares_nothing_with_the_users(setting: Setting) -> None:
    model, layers, adamw, _ = setting
    short = shortened(layers, kept_layers(layers), nn.Module())
    own = Momentum(model.parameters())
    for optimizer in (own, adamw):
        copied = copied_layers(short, optimizer)
        copies = [tensor for name, tensor in copied.layers.tensors.items() if name in short.state]
        assert {id(tensor) for tensor in copied.optimizer.param_groups[0]["params"]} == set(map(id, copies))
        settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        assert {name: copied.optimizer.param_groups[0][name] for name in settings} == settings
        before = [tensor.clone() for tensor in copies]
        for tensor in copies:
            tensor.grad = torch.ones_like(tensor)
        copied.optimizer.step()
        assert not any(map(torch.equal, copies, before))
        assert set(copied.optimizer.state) <= set(copies)
    assert not own.moments


def test_copies_that_have_no_room_are_shortened(setting: Setting) -> None:
    _, layers, optimizer, costs = setting
    with Trainer(layers, optimizer, PLANS["dp"], MACHINE, profile=costs["fp32"]) as trainer:
        enough = trainer.forecast().needed_bytes + 1024
        whole = trainer.verify([models.gpt2_batch(4)])
        assert whole.shortened_from is None
    small = Machine.emulated(2, memory="64MiB", link=1e12, host_memory=enough)
    with Trainer(layers, optimizer, PLANS["dp"], small, profile=costs["fp32"]) as trainer:
        certificate = trainer.verify([models.gpt2_batch(4)])
    assert certificate.passed, certificate
    assert certificate.shortened_from == 8
    assert certificate.to_json()["num_layers"] == 3


def test_a_shortened_plan_keeps_what_still_can_stay() -> None:
    plan = Plan.parse(PLANS["pp"])
    assert str(shortened_plan(plan, (0, 6, 7))).startswith("pp minibatch=4 forward=2[0:1] backward=2[0:1,1:3]")
    assert shortened_plan(plan, range(8)) == plan
    resident = shortened_plan(plan, (0, 1, 4, 7))
    assert resident.resident_packs == ((0, 2), (2, 3))
    assert resident.device_updates == ((2, 3),)
