"""The zoo: every model decomposes into layers that train as plain PyTorch does and need the bytes predicted."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from harmony_lab.bench.equality import plain_loss
from harmony_lab.bench.models import EXAMPLE_SAMPLES, ZOO, differences_of, peaks_of
from harmony_lab.bench.zoo import Specimen, ZooModel
from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.runtime.runner import step_seed
from harmony_lab.trainer import Trainer

SUPPORTED = [model for model in ZOO if model.refused is None]
REFUSED = [model for model in ZOO if model.refused is not None]
ROUNDING = 5e-5  # of float32, in gradients summed over microbatches; the same models in float64 differ by 1e-13


@dataclass
class Case:
    model: ZooModel
    specimen: Specimen
    layers: LayerSequence


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing their work among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    model: ZooModel = request.param
    specimen = model.make()
    return Case(model, specimen, decompose(specimen.model, model.batch(EXAMPLE_SAMPLES, 0), specimen.loss_fn))


every_supported = pytest.mark.parametrize("case", SUPPORTED, indirect=True, ids=lambda model: model.name)


@every_supported
class TestSupported:
    def test_layers_in_sequence_equal_the_model(self, case: Case) -> None:
        """Loss, every gradient and every buffer; minibatches of two sizes, and in uneven microbatches."""
        found = differences_of(case.model, case.specimen, case.layers)
        assert found.loss < 1e-6
        assert found.gradients < ROUNDING
        assert found.buffers < 1e-6
        assert bool(case.layers.couples_samples) == case.model.couples

    def test_predicted_peak_is_what_an_independent_tracker_measures(self, case: Case) -> None:
        predicted, measured, _ = peaks_of(case.model, case.layers)
        assert measured <= predicted <= 1.05 * measured

    def test_training_in_packs_equals_plain_pytorch(self, case: Case) -> None:
        """Two devices, two packs; forward and backward in microbatches of different sizes where they may be."""
        specimen, layers = case.specimen, case.layers
        plain = copy.deepcopy(specimen.model)
        start = copy.deepcopy(specimen.model.state_dict())
        ours = torch.optim.SGD([p for p in specimen.model.parameters() if p.requires_grad], lr=0.05)
        theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.05)
        plan = _plan(case)
        machine = Machine.emulated(2, memory="1GiB", link="1e12")
        costs = profile(layers, machine, ours, microbatch_sizes=(2, 3, 6), trials=1)
        with Trainer(layers, ours, plan, machine, profile=costs) as trainer:
            for step in range(2):
                batch = case.model.batch(plan.minibatch_size, 20 + step)
                loss = trainer.step(batch)
                theirs.zero_grad()
                with reproducible_randomness(layers, step_seed(0, step), samples=(0, plan.minibatch_size)):
                    expected = plain_loss(Specimen(plain, specimen.loss_fn), batch)
                expected.backward()
                theirs.step()
                assert loss == pytest.approx(expected.item(), rel=2e-5)
        for (name, a), (_, b) in zip(specimen.model.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        for (name, a), (_, b) in zip(specimen.model.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        specimen.model.load_state_dict(start)


def _plan(case: Case) -> Plan:
    count = len(case.layers)
    middle = count // 2
    microbatches = (6, 6) if case.model.couples or not all(_splits(case.layers, b) for b in (middle,)) else (2, 3)
    return Plan.parse(
        f"pp minibatch=6 forward={microbatches[0]}[0:{middle}] backward={microbatches[1]}[0:{middle},{middle}:{count}] "
        "devices=0,1"
    )


def _splits(layers: LayerSequence, boundary: int) -> bool:
    return all(spec.batch_dim is not None for spec in layers.boundaries[boundary])


META = ("Llama", "Mixtral", "T5", "Whisper", "Swin", "ResNet", "LSTM language model", "LoRA (peft)")


@pytest.mark.parametrize(
    "case", [model for model in SUPPORTED if model.name in META], indirect=True, ids=lambda model: model.name
)
def test_weights_on_the_meta_device_give_the_same_layers(case: Case) -> None:
    """Also the same bytes, so that a model larger than the host's memory can be planned."""
    with torch.device("meta"):
        specimen = case.model.make()
    assert all(parameter.is_meta for parameter in specimen.model.parameters())
    bare = decompose(specimen.model, case.model.batch(EXAMPLE_SAMPLES, 0), specimen.loss_fn)
    assert bare.fingerprint == case.layers.fingerprint
    machine = Machine.emulated(1, memory="1GiB")
    real, made_up = (
        profile(layers, machine, microbatch_sizes=[EXAMPLE_SAMPLES], trials=1, cache=False)
        for layers in (case.layers, bare)
    )
    assert [layer.costs[0][3:] for layer in made_up.layers] == [layer.costs[0][3:] for layer in real.layers]


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.name)
def test_what_cannot_be_split_is_refused_with_the_reason(model: ZooModel) -> None:
    specimen = model.make()
    with pytest.raises(DecomposeError, match=model.refused):
        decompose(specimen.model, model.batch(EXAMPLE_SAMPLES, 0), specimen.loss_fn)


def test_the_zoo_is_large() -> None:
    assert len(ZOO) == len({model.name for model in ZOO}) >= 28
    assert len(SUPPORTED) >= 26
