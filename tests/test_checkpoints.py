"""What is saved of a model and its optimizer while a Trainer is open, and after, is what plain PyTorch saves."""

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

from harmony_lab.costs import Profile
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import microbatches
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.runtime.runner import step_seed
from harmony_lab.trainer import Trainer

MACHINE = Machine.emulated(2, memory="64MiB", link="1e12")
STEPS = 3


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


_costs: list[Profile] = []


def costs(layers: LayerSequence) -> Profile:
    """Measured once."""
    if not _costs:
        _costs.append(profile(layers, MACHINE, microbatch_sizes=(1, 2), trials=1))
    return _costs[0]


class Setting:
    """GPT-2, trained a few steps by a Trainer that is still open, and in plain PyTorch."""

    def __init__(self) -> None:
        self.model, self.plain = models.gpt2(layers=2), models.gpt2(layers=2)
        self.layers = decompose(self.model, models.gpt2_batch(2))
        self.optimizer, self.plain_optimizer = (
            torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5) for model in (self.model, self.plain)
        )
        text = f"pp minibatch=4 forward=2[0:1,1:2] backward=2[0:2,2:{len(self.layers)}] devices=0,1"
        self.costs = costs(self.layers)
        self.trainer = Trainer(self.layers, self.optimizer, text, MACHINE, profile=self.costs)
        self.done = 0
        for _ in range(STEPS):
            self.step()

    def step(self) -> None:
        """Both ways."""
        batch = models.gpt2_batch(4, seed=self.done)
        self.trainer.step(batch)
        self.plain_optimizer.zero_grad(set_to_none=True)
        for start, stop in microbatches(0, 4, 2):
            part = {name: value[start:stop] for name, value in batch.items()}
            with reproducible_randomness(self.layers, step_seed(0, self.done), (start, stop)):
                (self.plain(**part, use_cache=False).loss / 2).backward()
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad(set_to_none=True)
        self.done += 1


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    """For tests that leave its Trainer open."""
    made = Setting()
    yield made
    made.trainer.close()


@pytest.fixture
def own() -> Iterator[Setting]:
    """For tests that close its Trainer."""
    made = Setting()
    yield made
    made.trainer.close()


def assert_same_state(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("closed", [False, True], ids=["while training", "after"])
def test_files_are_as_large_as_plain_pytorchs_and_hold_the_same(request: pytest.FixtureRequest, closed: bool) -> None:
    setting = request.getfixturevalue("own" if closed else "setting")
    if closed:
        setting.trainer.close()
    for ours, theirs in (
        (setting.model.state_dict(), setting.plain.state_dict()),
        (setting.optimizer.state_dict(), setting.plain_optimizer.state_dict()),
        (
            {"model": setting.model.state_dict(), "optimizer": setting.optimizer.state_dict()},
            {"model": setting.plain.state_dict(), "optimizer": setting.plain_optimizer.state_dict()},
        ),
    ):
        assert len(saved(ours)) <= len(saved(theirs))
        assert_same_state(loaded(saved(ours)), loaded(saved(theirs)))


def test_a_part_of_the_model_is_saved_without_the_rest_while_training(setting: Setting) -> None:
    names = [name for name in setting.model.state_dict() if "ln_" in name]
    ours, theirs = ({name: model.state_dict()[name] for name in names} for model in (setting.model, setting.plain))
    assert len(saved(ours)) <= len(saved(theirs)) < len(saved(setting.plain.state_dict())) / 4


def test_tied_weights_stay_one_parameter_in_the_model_in_the_file_and_after_loading(own: Setting) -> None:
    embedding, head = own.model.transformer.wte, own.model.lm_head  # type: ignore[union-attr]
    assert embedding.weight is head.weight
    state = loaded(saved(own.model.state_dict()))
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    own.trainer.close()
    assert embedding.weight is head.weight
    other = models.gpt2(layers=2)
    other.load_state_dict(state)
    assert other.lm_head.weight is other.transformer.wte.weight  # type: ignore[union-attr]


def test_optimizer_state_is_plain_pytorchs_in_order_and_kind(setting: Setting) -> None:
    ours, theirs = setting.optimizer.state_dict(), setting.plain_optimizer.state_dict()
    assert list(ours) == list(theirs)
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert {key: (value.dtype, value.shape) for key, value in state.items()} == {
            key: (value.dtype, value.shape) for key, value in ours["state"][number].items()
        }


def test_training_goes_on_from_what_plain_pytorch_saved(own: Setting) -> None:
    """Loaded into an open Trainer, and into a new one that counts steps on."""
    own.model.load_state_dict(loaded(saved(own.plain.state_dict())))
    own.optimizer.load_state_dict(loaded(saved(own.plain_optimizer.state_dict())))
    own.step()
    assert_same_state(own.model.state_dict(), own.plain.state_dict())
    own.trainer.close()
    model = models.gpt2(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    model.load_state_dict(loaded(saved(own.plain.state_dict())))
    optimizer.load_state_dict(loaded(saved(own.plain_optimizer.state_dict())))
    layers = decompose(model, models.gpt2_batch(2))
    own.trainer = Trainer(layers, optimizer, own.trainer.plan, MACHINE, profile=own.costs, first_step=own.done)
    own.step()
    assert_same_state(model.state_dict(), own.plain.state_dict())
    assert_same_state(optimizer.state_dict()["state"], own.plain_optimizer.state_dict()["state"])


def test_safetensors_of_an_open_model_are_plain_pytorchs(setting: Setting, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_model

    for name, model in (("ours", setting.model), ("theirs", setting.plain)):
        save_model(model, str(tmp_path / name))
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size
    assert_same_state(load_file(tmp_path / "ours"), load_file(tmp_path / "theirs"))


def test_a_model_can_be_copied_and_sent_while_a_trainer_is_open(setting: Setting) -> None:
    copied = copy.deepcopy(setting.model)
    before = {name: value.clone() for name, value in copied.state_dict().items()}
    setting.step()
    assert_same_state(copied.state_dict(), before)
    parameter: nn.Parameter = next(iter(copied.parameters()))
    assert parameter.untyped_storage().nbytes() == parameter.nbytes
