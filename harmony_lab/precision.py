"""Precision: the number types that training computes and moves in.

``fp32``
    Everything as the model is.
``bf16``
    Mixed precision with fp32 master weights.  The user's fp32 parameters stay the masters: the optimizer updates them,
    ``state_dict()`` gives them.  Beside them the host keeps a copy of each in bf16, its shadow, made anew from the
    masters in every step; devices get the shadows, so weights cross the links in half the bytes.  Layers compute under
    ``torch.autocast(dtype=torch.bfloat16)``: matrix products, convolutions and attention in bf16; what autocast's lists
    for the kind of device say, losses among it, in fp32; anything else in the type that it is given.  Weights of other
    ops than those (embeddings, norms) are read as fp32 again, with the shadow's values.  Values and their gradients
    cross boundaries in the type that so results.  Gradients of weights are added up over microbatches, devices and
    minibatches in fp32, and leave the device in fp32.  Buffers, such as running statistics, stay what they are, as do
    parameters of other types than fp32.

In plain PyTorch that is ``torch.autocast`` over a model whose weights were rounded to bf16, with the optimizer over the
unrounded ones.  Without shadows (``in_precision(..., shadows=False)``) it is ``torch.autocast`` over the model as it
is: devices get the masters, whole, and may update them, which is what baselines that update on devices are given.

fp16 is not offered: its gradients underflow without a loss scale, which has to be found while training, and a step
whose gradients overflow is skipped, after packs would have been updated.  bf16 has fp32's range and needs neither.
"""

from enum import StrEnum

from harmony_lab.errors import HarmonyError

__all__ = ["Precision"]


class Precision(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"

    @classmethod
    def of(cls, given: "Precision | str") -> "Precision":
        """Raises ``HarmonyError`` for what is none."""
        if given in set(cls):
            return cls(given)
        reason = ": fp16 needs loss scaling, bf16 has fp32's range and does not" if "16" in str(given) else ""
        raise HarmonyError(f"precision must be fp32 or bf16, got {given!r}{reason}")
