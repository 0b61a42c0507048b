"""Tables of layers, one at a time, as the baselines' compiled loops read them."""

from collections.abc import Sequence

import numpy as np

from harmony_lab.compiled import Ints
from harmony_lab.costs import Profile
from harmony_lab.plan import microbatches
from harmony_lab.planner import layerwise, paging, streaming
from harmony_lab.planner.pack import PackCosts
from harmony_lab.program import TENSOR_CODES, TensorKind

__all__ = ["LayerTables", "Microbatches"]

_STATE = (TensorKind.WEIGHT, TensorKind.BUFFER, TensorKind.GRADIENT, TensorKind.OPTIMIZER)
_OF_SAMPLES = (TensorKind.INPUT, TensorKind.ACTIVATION, TensorKind.ACTIVATION_GRADIENT, TensorKind.SAVED)


class Microbatches:
    """Microbatches of several shares of a minibatch: ``rows[share, j]`` is (first sample, stop, index into ``sizes``).

    Shares that have fewer than others begin with empty ones, so that all end together.
    """

    def __init__(self, shares: Sequence[tuple[int, int]], size: int) -> None:
        cut = [microbatches(*share, size) for share in shares]
        self.count = max(map(len, cut))
        self.sizes = sorted({last - first for of_share in cut for first, last in of_share})
        self.rows = np.zeros((len(shares), self.count, 3), dtype=np.int64)
        for share, of_share in enumerate(cut):
            for j, (first, last) in enumerate(of_share, start=self.count - len(of_share)):
                self.rows[share, j] = first, last, self.sizes.index(last - first)


class LayerTables:
    """What every layer needs, remembered by microbatch size."""

    def __init__(self, profile: Profile, costs: PackCosts) -> None:
        self.profile, self.costs = profile, costs
        self._by_size: dict[int, Ints] = {}
        layers = range(len(profile))
        self.state = np.array(
            [
                (
                    costs.weight_bytes(i, i + 1),
                    costs.buffer_bytes(i, i + 1),
                    costs.gradient_bytes(i, i + 1),
                    profile.layers[i].optimizer_state_bytes,
                )
                for i in layers
            ],
            dtype=np.int64,
        )
        self.updates_buffers = np.array([profile.updated_buffer_bytes(i, i + 1) > 0 for i in layers], dtype=np.int64)

    def cells(self, sizes: Sequence[int]) -> Ints:
        """By (size, boundary): the columns that ``streaming`` names."""
        return np.stack([self._cells_of(size) for size in sizes])

    def _cells_of(self, size: int) -> Ints:
        if size not in self._by_size:
            costs, count = self.costs, len(self.profile)
            table = np.zeros((count + 1, 7), dtype=np.int64)
            for i in range(count):
                table[i] = (
                    costs.batch_input_bytes(i, i + 1, size),
                    costs.boundary_bytes(i, size),
                    costs.boundary_gradient_bytes(i, size),
                    costs.saved_bytes(i, i + 1, size),
                    max(0, costs.forward_workspace(i, i + 1, size, (i + 1,))),
                    max(0, costs.recompute_workspace(i, i + 1, size)),
                    max(0, costs.backward_workspace(i, i + 1, size)),
                )
            table[count, streaming.VALUE_BYTES] = costs.boundary_bytes(count, size)
            self._by_size[size] = table
        return self._by_size[size]

    # -- for layerwise ------------------------------------------------------------------------------------------------

    def layerwise(
        self, parts: Microbatches, devices: Ints, *, recomputes: bool, ends_empty: bool, clips: bool, leaves: bool
    ) -> tuple[layerwise.Layerwise, Ints]:
        """Tables, and pages that are nowhere yet.  ``devices``: by (replica, layer)."""
        num_replicas, num_layers = devices.shape
        cells = self.cells(parts.sizes)
        owners, tied, state = self._shared(devices)
        of_layers = np.stack(
            [
                cells[:, :-1, streaming.FORWARD_WORKSPACE],
                cells[:, :-1, streaming.SAVING_WORKSPACE],
                cells[:, :-1, streaming.BACKWARD_WORKSPACE],
                cells[:, 1:, streaming.VALUE_BYTES],
                cells[:, :-1, streaming.VALUE_GRADIENT_BYTES],
            ],
            axis=2,
        )
        switches = [self.profile.first_trainable_layer, int(recomputes), int(ends_empty), int(clips), int(leaves)]
        kept = self._kept(cells, devices, shares_output=not recomputes and not ends_empty)
        pages = np.concatenate([_state_pages(state, devices), _sample_pages(kept, parts, devices)])
        workspace = [layer.largest_update_bytes if ends_empty else 0 for layer in self.profile.layers]
        if ends_empty:
            tied, received = _received(tied, pages)
            pages = np.concatenate([pages, received])
        made = layerwise.Layerwise(
            np.array([num_layers, num_replicas, parts.count, *switches]),
            parts.rows,
            of_layers,
            self.updates_buffers,
            owners,
            tied,
            np.array(workspace, dtype=np.int64),
        )
        return made, pages

    def _kept(self, cells: Ints, devices: Ints, *, shares_output: bool) -> Ints:
        """By (size, layer, slot): bytes of the pages of a microbatch.

        What a layer saves includes its output.  With ``shares_output``, where the next layer on the same device holds
        that too, it is there once, as the next layer's input.
        """
        kept = cells[:, :-1, :4].copy()
        if shares_output:
            here = np.flatnonzero(devices[0, 1:] == devices[0, :-1])
            shared = cells[:, here + 1, streaming.VALUE_BYTES]
            kept[:, here, streaming.SAVED_BYTES] = np.maximum(0, kept[:, here, streaming.SAVED_BYTES] - shared)
        return kept

    def _shared(self, devices: Ints) -> tuple[Ints, Ints, Ints]:
        """Owners by layer, pages of gradients to be added up over devices, bytes of state that each layer owns.

        Of layers on one device that share a parameter the first owns it.
        """
        state = self.state.copy()
        num_layers = len(state)
        owners: list[list[int]] = [[] for _ in range(num_layers)]
        tied: set[tuple[int, ...]] = set()
        for shared in self.profile.shared:
            if shared.is_buffer:
                continue
            firsts: dict[int, int] = {}
            for layer in sorted(shared.layers):
                owner = firsts.setdefault(int(devices[0, layer]), layer)
                if owner != layer:
                    owners[layer].append(owner)
                    state[layer, layerwise.WEIGHTS] -= shared.num_bytes
                    state[layer, layerwise.GRADIENTS] -= shared.gradient_bytes
            if len(firsts) > 1 and shared.gradient_bytes:
                tied.add(tuple(layerwise.GRADIENTS * (num_layers + 1) + layer for layer in firsts.values()))
        return _filled(owners, num_layers), _filled(sorted(tied), len(tied)), state

    # -- for streaming ------------------------------------------------------------------------------------------------

    def streaming(
        self, parts: Microbatches, *, through_peers: bool, stashes: bool, prefetches: bool, clips: bool
    ) -> streaming.Streaming:
        num_layers = len(self.profile)
        owners: list[list[int]] = [[] for _ in range(num_layers)]
        for shared in self.profile.shared:
            for layer in sorted(shared.layers)[1:] if shared.gradient_bytes else ():
                owners[layer].append(min(shared.layers))
        switches = (int(through_peers), int(stashes), int(prefetches), int(clips))
        options = np.array([num_layers, parts.count, self.profile.first_trainable_layer, *switches])
        layers = np.column_stack([self.state[:, :3], self.updates_buffers])
        return streaming.streaming(options, parts.rows, layers, self.cells(parts.sizes), _filled(owners, num_layers))


def _filled(rows: Sequence[Sequence[int]], num_rows: int) -> Ints:
    """Rows of different lengths as a table that -1 fills up."""
    table = np.full((num_rows, max(map(len, rows), default=0)), -1)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _received(tied: Ints, pages: Ints) -> tuple[Ints, Ints]:
    """Rows of ``tied`` with, after each page but the first, the page that it becomes on the first one's device; and
    those pages."""
    rows: list[list[int]] = []
    received: list[Ints] = []
    for first, *others in ([page for page in row if page >= 0] for row in tied.tolist()):
        rows.append([first])
        for other in others:
            rows[-1] += [other, len(pages) + len(received)]
            received.append(pages[other].copy())
            received[-1][paging.DEVICE] = pages[first, paging.DEVICE]
    return _filled(rows, len(rows)), np.array(received, dtype=np.int64).reshape(-1, paging.NUM_PAGE_COLUMNS)


def _state_pages(state: Ints, devices: Ints) -> Ints:
    """By (slot, replica, layer)."""
    num_replicas, num_layers = devices.shape
    pages = np.zeros((len(_STATE), num_replicas, num_layers + 1, paging.NUM_PAGE_COLUMNS), dtype=np.int64)
    pages[:, :, :-1, paging.NUM_BYTES] = state.T[:, None, :]
    return _labelled(pages, _STATE, devices)


def _sample_pages(kept: Ints, parts: Microbatches, devices: Ints) -> Ints:
    """By (slot, replica, layer, microbatch)."""
    num_replicas, num_layers = devices.shape
    shape = (len(_OF_SAMPLES), num_replicas, num_layers + 1, parts.count, paging.NUM_PAGE_COLUMNS)
    pages = np.zeros(shape, dtype=np.int64)
    size = parts.rows[:, :, layerwise.SIZE]
    pages[:, :, :-1, :, paging.NUM_BYTES] = kept[size].transpose(3, 0, 2, 1)
    pages[..., paging.FIRST] = parts.rows[:, None, :, layerwise.FIRST_SAMPLE]
    pages[..., paging.LAST] = parts.rows[:, None, :, layerwise.LAST_SAMPLE]
    return _labelled(pages, _OF_SAMPLES, devices)


def _labelled(pages: Ints, kinds: Sequence[TensorKind], devices: Ints) -> Ints:
    num_layers = devices.shape[1]
    at_boundary = (TensorKind.ACTIVATION, TensorKind.ACTIVATION_GRADIENT)
    # Seen layer first, whatever lies between: the axes from the last are broadcast.
    by_layer = np.moveaxis(pages, 2, -2)
    by_layer[..., paging.START] = np.arange(num_layers + 1)
    for slot, kind in enumerate(kinds):
        by_layer[slot, ..., paging.KIND] = TENSOR_CODES[kind]
        by_layer[slot, ..., paging.STOP] = np.arange(num_layers + 1) + (kind not in at_boundary)
    for replica in range(len(devices)):
        by_layer[:, replica, ..., :-1, paging.DEVICE] = devices[replica]
        if at_boundary[1] in kinds:  # gradients of a layer's inputs go to the device of the layer before
            slot = kinds.index(at_boundary[1])
            by_layer[slot, replica, ..., 1:-1, paging.DEVICE] = devices[replica, :-1]
    return pages.reshape(-1, paging.NUM_PAGE_COLUMNS)
