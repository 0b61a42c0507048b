"""How large a saved notebook is that has a dashboard, all its tabs opened, and a launched run with its panel."""

from collections.abc import Sequence
from typing import Any

import torch

from harmony_lab.bench.notebook import PATIENCE_S, recording, saved_bytes, widgets_state
from harmony_lab.lab import Lab
from harmony_lab.machine import Machine

__all__ = ["saved_bytes_with_run", "trained_lab"]

_WIDTH, _HEADS, _CONTEXT, _WORDS = 32, 2, 16, 64
_LEAST_BYTES = 2**20  # of a device, for models of few layers
_SHARE = 0.5  # of the weights, gradients and optimizer state, that the devices hold together
_DEVICES, _MINIBATCH = 4, 64  # as ``gpt2_xl_lab``, whose plans are of as many operations
_STEPS = 20


def trained_lab(num_layers: int) -> tuple[Lab, list[dict[str, torch.Tensor]]]:
    """A GPT-2 of so many layers, narrow enough to be trained here, on emulated devices; and batches for it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=_WIDTH, n_head=_HEADS, n_positions=_CONTEXT, vocab_size=_WORDS, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, _WORDS, (_MINIBATCH, _CONTEXT))
    batch = {"input_ids": ids, "labels": ids}
    state_bytes = 4 * sum(parameter.nbytes for parameter in model.parameters())  # with gradients and AdamW's moments
    machine = Machine.emulated(_DEVICES, memory=max(_LEAST_BYTES, round(_SHARE * state_bytes / _DEVICES)))
    lab = Lab(model, batch, torch.optim.AdamW(model.parameters()), minibatch_size=_MINIBATCH, machine=machine)
    return lab, [batch]


def saved_bytes_with_run(lab: Lab, batches: Sequence[Any], *, steps: int = _STEPS) -> int:
    """Of a notebook with this Lab's dashboard and a run of so many steps, widgets' state included."""
    from harmony_lab.notebook.dashboard import Dashboard
    from harmony_lab.notebook.live import RunPanel

    lab.prepare()
    others = set(widgets_state())
    with recording():
        dashboard = Dashboard(lab, namespace=dict)
        run = lab.launch(batches, steps)
        panel = RunPanel(run)
        run.wait()
        for title in dashboard.pictures.view.titles:
            dashboard.pictures.look_at(title)
            assert dashboard.settle(PATIENCE_S), f"{title} took too long"
        assert panel.settle(PATIENCE_S)
        dashboard.settle_effects(PATIENCE_S)
        found = saved_bytes([(dashboard.view, lab), (panel.view, run)], others)
        panel.close()
        dashboard.close()
    return found
