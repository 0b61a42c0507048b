"""Profile: what each layer costs, in seconds and bytes, as a function of the microbatch size."""

import json
from bisect import bisect_left
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmony_lab.emulation import Emulation
from harmony_lab.errors import OutOfRangeError
from harmony_lab.layer_costs import Cost, ForwardCost, LayerCost, SharedParameter
from harmony_lab.layers import TensorSpec
from harmony_lab.machine import check_schema
from harmony_lab.precision import Precision
from harmony_lab.units import format_bytes, format_seconds, format_spread

if TYPE_CHECKING:
    import pandas

__all__ = ["Cost", "ForwardCost", "LayerCost", "Profile", "SharedParameter"]

SCHEMA_VERSION = 2
_UNSTEADY = 0.5  # of ``spread``
_SIZES_LISTED = 8  # in the one-line form


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of every layer, what crosses every boundary, and what a minibatch is.

    ``boundaries``: as in ``LayerSequence``.  ``batch``: batch inputs.  ``couples_samples``: see ``LayerSequence``.
    ``device``: what was measured.  ``fingerprint``: the model's.  ``cached``: all costs were known from before, nothing
    was measured.

    ``emulation``: of emulated devices, what running them adds.

    ``forward_only_sizes``: larger microbatches of which only the forward without gradient is known, because the device
    holds no larger backward.  ``precision``: what layers compute in; parameters are then counted as devices get them,
    and ``master_bytes`` are those of the fp32 masters that the host holds beside them (0: there are no others).
    ``additive_memory``: peaks are of layers that keep all they allocate, so that those of a
    pack are the sums over its layers (``planner.pack``), not of layers that run one after the other.
    """

    model: str
    fingerprint: str
    device: str
    microbatch_sizes: tuple[int, ...]
    layers: tuple[LayerCost, ...]
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    batch: tuple[TensorSpec, ...]
    shared: tuple[SharedParameter, ...] = ()
    couples_samples: tuple[str, ...] = ()
    serial_buffers: tuple[str, ...] = ()  # updated buffers that data parallelism cannot merge
    update_threads: int = 1
    forward_only_sizes: tuple[int, ...] = ()
    additive_memory: bool = False
    precision: Precision = Precision.FP32
    master_bytes: int = 0
    emulation: Emulation | None = None
    cached: bool = field(default=False, compare=False)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def largest_microbatch(self) -> int:
        """Of forward and backward."""
        return self.microbatch_sizes[-1]

    @property
    def largest_forward_microbatch(self) -> int:
        """Of forward alone."""
        return (self.microbatch_sizes + self.forward_only_sizes)[-1]

    def cost(self, layer: int, microbatch_size: int) -> Cost:
        """The cost at any size between the smallest and largest measured: linear between neighbours.

        Raises ``OutOfRangeError`` beyond.
        """
        key = (self.layers[layer].kind, microbatch_size)
        cached = self._costs.get(key)
        if cached is None:
            low, high, share = self.between(microbatch_size)
            below, above = self.layers[layer].costs[low], self.layers[layer].costs[high]
            spreads = [cost.spread for cost in (below, above) if cost.spread is not None]
            numbers = [a + (b - a) * share for a, b in zip(below[:-1], above[:-1], strict=True)]
            cached = self._costs[key] = Cost(*numbers)._replace(spread=max(spreads, default=None))
        return cached

    def forward_cost(self, layer: int, microbatch_size: int) -> ForwardCost:
        """The cost of a forward without gradient, which may be known at larger sizes than that of a backward.

        Raises ``OutOfRangeError`` beyond.
        """
        if microbatch_size <= self.largest_microbatch or not self.forward_only_sizes:
            cost = self.cost(layer, microbatch_size)
            return ForwardCost(cost.forward_s, cost.forward_peak_bytes)
        low, high, share = self.between(microbatch_size, forward_only=True)
        last = self.layers[layer].costs[-1]
        costs = (ForwardCost(last.forward_s, last.forward_peak_bytes), *self.layers[layer].forward_costs)
        return ForwardCost(*(a + (b - a) * share for a, b in zip(costs[low], costs[high], strict=True)))

    def between(self, microbatch_size: int, *, forward_only: bool = False) -> tuple[int, int, float]:
        """Where a size lies among those measured: indices of its neighbours, and the share of the way between them.

        Indices into ``microbatch_sizes``; with ``forward_only`` into its last one and the ``forward_only_sizes`` after.
        Raises ``OutOfRangeError`` beyond.
        """
        sizes = self.microbatch_sizes if not forward_only else (self.largest_microbatch, *self.forward_only_sizes)
        if not sizes[0] <= microbatch_size <= sizes[-1]:
            only = f" (forward alone up to {self.largest_forward_microbatch})" if self.forward_only_sizes else ""
            raise OutOfRangeError(
                f"this profile covers microbatches of {self.microbatch_sizes[0]} to {self.largest_microbatch} samples"
                f"{only}, {microbatch_size} was asked for; profile again with microbatch_sizes that reach "
                f"{microbatch_size}"
            )
        high = bisect_left(sizes, microbatch_size)
        if sizes[high] == microbatch_size:
            return high, high, 0.0
        return high - 1, high, (microbatch_size - sizes[high - 1]) / (sizes[high] - sizes[high - 1])

    @cached_property
    def _costs(self) -> dict[tuple[int, int], Cost]:
        return {}

    # -- bytes of packs -------------------------------------------------------------------------------------------

    @cached_property
    def _prefix(self) -> dict[str, list[int]]:
        names = ("parameter_bytes", "gradient_bytes", "buffer_bytes", "updated_buffer_bytes", "optimizer_state_bytes")
        prefix = {}
        for name in names:
            sums = [0]
            for layer in self.layers:
                sums.append(sums[-1] + getattr(layer, name))
            prefix[name] = sums
        return prefix

    def _span(self, name: str, start: int, stop: int) -> int:
        sums = self._prefix[name]
        return sums[stop] - sums[start]

    def _repeated(self, start: int, stop: int, *, buffers: bool) -> list[tuple[SharedParameter, int]]:
        found = []
        for shared in self.shared:
            if shared.is_buffer is buffers:
                count = sum(start <= layer < stop for layer in shared.layers)
                if count > 1:
                    found.append((shared, count - 1))
        return found

    def weight_bytes(self, start: int, stop: int) -> int:
        """Parameters of layers [start, stop), each once."""
        repeated = self._repeated(start, stop, buffers=False)
        return self._span("parameter_bytes", start, stop) - sum(s.num_bytes * extra for s, extra in repeated)

    def gradient_bytes(self, start: int, stop: int) -> int:
        """Gradients of the trainable parameters of layers [start, stop), each once."""
        repeated = self._repeated(start, stop, buffers=False)
        return self._span("gradient_bytes", start, stop) - sum(s.gradient_bytes * extra for s, extra in repeated)

    def buffer_bytes(self, start: int, stop: int) -> int:
        repeated = self._repeated(start, stop, buffers=True)
        return self._span("buffer_bytes", start, stop) - sum(s.num_bytes * extra for s, extra in repeated)

    def updated_buffer_bytes(self, start: int, stop: int) -> int:
        return self._span("updated_buffer_bytes", start, stop)

    def optimizer_bytes(self, start: int, stop: int) -> int:
        """The optimizer's state for what layers [start, stop) update."""
        return self._span("optimizer_state_bytes", start, stop)

    def boundary_bytes(self, boundary: int, num_samples: int) -> int:
        """Values crossing into layer ``boundary`` for that many samples."""
        return sum(spec.num_bytes(num_samples) for spec in self.boundaries[boundary])

    def boundary_gradient_bytes(self, boundary: int, num_samples: int) -> int:
        """Gradients of those values: only the ones that need a gradient have one."""
        return sum(spec.num_bytes(num_samples) for spec in self.boundaries[boundary] if spec.requires_grad)

    def batch_input_bytes(self, start: int, stop: int, num_samples: int) -> int:
        """Batch inputs that layers [start, stop) read."""
        names = self.batch_inputs_of(start, stop)
        return sum(spec.num_bytes(num_samples) for spec in self.batch if spec.name in names)

    def batch_inputs_of(self, start: int, stop: int) -> tuple[str, ...]:
        """Names of the batch inputs that layers [start, stop) read, each once."""
        return tuple(dict.fromkeys(name for layer in self.layers[start:stop] for name in layer.batch_inputs))

    def splits_at(self, boundary: int) -> bool:
        """Whether that boundary's values can be cut along the batch (all have a batch dimension)."""
        return all(spec.batch_dim is not None for spec in self.boundaries[boundary])

    @cached_property
    def first_trainable_layer(self) -> int:
        """Backward stops here: layers before it have nothing to train."""
        return next((i for i, layer in enumerate(self.layers) if layer.gradient_bytes), len(self.layers))

    # -- totals ---------------------------------------------------------------------------------------------------

    @cached_property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state: the training state without activations."""
        count = len(self.layers)
        return self.host_weight_bytes + self.gradient_bytes(0, count) + self.optimizer_state_bytes

    @property
    def host_weight_bytes(self) -> int:
        """Of the host: the parameters, and where devices get them in another type, both."""
        return self.weight_bytes(0, len(self.layers)) + self.master_bytes

    @property
    def optimizer_state_bytes(self) -> int:
        return self._span("optimizer_state_bytes", 0, len(self.layers))

    def activation_bytes(self, num_samples: int) -> int:
        """What plain PyTorch keeps for backward with that many samples at once, without recompute."""
        size = min(num_samples, self.largest_microbatch)
        once = sum(self.cost(i, size).saved_bytes for i in range(len(self.layers)))
        return round(once * num_samples / size)

    # -- on disk and on screen ------------------------------------------------------------------------------------

    def to_frame(self) -> "pandas.DataFrame":
        """A row per layer and microbatch size: names, bytes and seconds."""
        import pandas

        return pandas.DataFrame(
            {
                "layer": index,
                "name": layer.name,
                "kind": layer.kind,
                "microbatch_size": size,
                "parameter_bytes": layer.parameter_bytes,
                "optimizer_state_bytes": layer.optimizer_state_bytes,
                "input_bytes": self.boundary_bytes(index, size),
                "update_s": layer.update_s,
                "update_spread": layer.update_spread,
                **cost._asdict(),
            }
            for index, layer in enumerate(self.layers)
            for size, cost in zip(self.microbatch_sizes, layer.costs, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; costs are stored once per kind.  ``from_json`` reads it back."""
        by_kind = {layer.kind: layer for layer in self.layers}
        return {
            "schema": "harmony_lab.profile",
            "version": SCHEMA_VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "device": self.device,
            "microbatch_sizes": list(self.microbatch_sizes),
            "forward_only_sizes": list(self.forward_only_sizes),
            "additive_memory": self.additive_memory,
            "costs_by_kind": {str(kind): [list(c) for c in layer.costs] for kind, layer in by_kind.items()},
            "forward_costs_by_kind": {
                str(kind): [list(c) for c in layer.forward_costs] for kind, layer in by_kind.items()
            },
            "layers": [_record(layer, without=("costs", "forward_costs")) for layer in self.layers],
            "boundaries": [[_record(spec) for spec in boundary] for boundary in self.boundaries],
            "batch": [_record(spec) for spec in self.batch],
            "shared": [_record(shared) for shared in self.shared],
            "couples_samples": list(self.couples_samples),
            "serial_buffers": list(self.serial_buffers),
            "update_threads": self.update_threads,
            "precision": str(self.precision),
            "master_bytes": self.master_bytes,
            "emulation": None if self.emulation is None else list(self.emulation),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Profile":
        """Raises ``HarmonyError`` for another kind of file or a newer schema version."""
        check_schema(data, "harmony_lab.profile", SCHEMA_VERSION)
        costs = {int(k): tuple(Cost(*row) for row in rows) for k, rows in data["costs_by_kind"].items()}
        forward = data.get("forward_costs_by_kind", {})  # version 1 knew none
        forward_costs = {int(k): tuple(ForwardCost(*row) for row in rows) for k, rows in forward.items()}
        return cls(
            model=data["model"],
            fingerprint=data["fingerprint"],
            device=data["device"],
            microbatch_sizes=tuple(data["microbatch_sizes"]),
            layers=tuple(
                LayerCost(
                    **{**row, "batch_inputs": tuple(row["batch_inputs"])},
                    costs=costs[row["kind"]],
                    forward_costs=forward_costs.get(row["kind"], ()),
                )
                for row in data["layers"]
            ),
            boundaries=tuple(tuple(_spec(row) for row in boundary) for boundary in data["boundaries"]),
            batch=tuple(_spec(row) for row in data["batch"]),
            shared=tuple(SharedParameter(**{**row, "layers": tuple(row["layers"])}) for row in data["shared"]),
            couples_samples=tuple(data["couples_samples"]),
            serial_buffers=tuple(data["serial_buffers"]),
            update_threads=data["update_threads"],
            forward_only_sizes=tuple(data.get("forward_only_sizes", ())),
            additive_memory=data.get("additive_memory", False),
            precision=Precision.of(data.get("precision", Precision.FP32)),
            master_bytes=data.get("master_bytes", 0),
            emulation=Emulation(*data["emulation"]) if data.get("emulation") else None,
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        return cls.from_json(json.loads(Path(path).read_text()))

    def __str__(self) -> str:
        some = self.microbatch_sizes
        sizes = ", ".join(map(str, some)) if len(some) <= _SIZES_LISTED else f"{some[0]} to {some[-1]}"
        updated = any(layer.update_s for layer in self.layers)
        state = "weights, gradients and optimizer state" if updated else "weights and gradients, without an optimizer"
        return (
            f"profile of {self.model} on {self.device}: {len(self)} layers, {format_bytes(self.state_bytes)} of "
            f"{state}; microbatches of {sizes}"
            f"{'' if self.precision is Precision.FP32 else f'; in {self.precision}'}"
            + ("; from earlier measurements (cached)" if self.cached else "")
        )

    @property
    def unsteady(self) -> str:
        """What to do where repeated runs were far apart, in a sentence; empty where they were not."""
        spreads = [[*(cost.spread for cost in layer.costs), layer.update_spread] for layer in self.layers]
        count = sum(max(known for known in (0.0, *found) if known is not None) > _UNSTEADY for found in spreads)
        what = f"{count} of {len(self)} layers were measured while something else used this machine (±"
        cure = f" over {_UNSTEADY:.0%}): measure again when it is quiet, with measure(cache=False)"
        return what + cure if count else ""

    def __repr__(self) -> str:
        return f"<Profile{str(self).removeprefix('profile')}>"

    def _repr_html_(self) -> str:
        size = self.microbatch_sizes[-1]
        rows = []
        for index, layer in enumerate(self.layers):
            cost = layer.costs[-1]
            cells = (
                escape(layer.name),
                format_bytes(layer.parameter_bytes),
                format_seconds(cost.forward_s),
                format_seconds(cost.backward_s),
                format_spread(cost.spread),
                format_bytes(cost.saved_bytes),
                format_seconds(layer.update_s),
                format_spread(layer.update_spread),
            )
            rows.append(f"<tr><td>{index}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        return (
            f"<p>{escape(str(self))}; below: microbatches of {size}. {self.unsteady}</p>"
            "<table><thead><tr><th>layer</th><th>name</th><th>parameters</th><th>forward</th><th>backward</th><th>±</th>"
            "<th>saved activations</th>"
            f"<th>update on the host</th><th>±</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        )


def _record(record: Any, without: Container[str] = ()) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__ if name not in without}


def _spec(row: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(**{**row, "shape": tuple(row["shape"])})
