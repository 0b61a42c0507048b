"""Transfers over shared links, and work on shared cores, against closed forms."""

from dataclasses import replace

import pytest
import toy_profiles as toys
from hypothesis import given, settings
from hypothesis import strategies as st

from harmony_lab.machine import HOST, HOST_MEMORY, Backend, Bridge, Device, Host, Link, Machine
from harmony_lab.program import Block, Op, OpKind, Program, Stream, TensorKind
from harmony_lab.runtime.links import EmulatedLinks
from harmony_lab.sharing import Flow
from harmony_lab.simulator.engine import run
from harmony_lab.trace import Trace

PROFILE = toys.profile(4, layer_s=1.0, update_s=3.0)
FORWARD_S, UPDATE_S = 1.0, 3.0  # of one layer and sample


def machine(
    devices: dict[str, str], rates: dict[tuple[str, str], float], *, cores: int = 64, **fields: object
) -> Machine:
    """Devices by name with the node that they hang from; links as (child, parent)."""
    return Machine(
        name="made up",
        devices=tuple(
            Device(name=name, memory_bytes=2**40, parent=parent, backend=Backend.CUDA)
            for name, parent in devices.items()
        ),
        host=Host(memory_bytes=2**40, num_cores=cores),
        links=tuple(Link(child=child, parent=parent, bytes_per_s=rate) for (child, parent), rate in rates.items()),
        **fields,
    )


class Ops:
    """Ops under construction, each with its own blocks of weights or activations."""

    def __init__(self, on: Machine) -> None:
        self.machine = on
        self.blocks: list[Block] = []
        self.ops: list[Op] = []

    def _block(self, device: int, num_bytes: int, kind: TensorKind) -> int:
        self.blocks.append(Block(kind, device, (0, 1), (0, 1), num_bytes))
        return len(self.blocks) - 1

    def _add(self, kind: OpKind, device: int, stream: Stream, after: tuple[int, ...], **blocks: object) -> int:
        self.ops.append(Op(kind, device, stream, (0, 1), (0, 1), after=after, **blocks))
        return len(self.ops) - 1

    def swap_in(self, device: int, num_bytes: int, *after: int) -> int:
        block = self._block(device, num_bytes, TensorKind.WEIGHT)
        return self._add(OpKind.SWAP_IN, device, Stream.SWAP_IN, after, writes=(block,))

    def swap_out(self, device: int, num_bytes: int, *after: int) -> int:
        blocks = [self._block(place, num_bytes, TensorKind.GRADIENT) for place in (device, HOST)]
        return self._add(
            OpKind.SWAP_OUT, device, Stream.SWAP_OUT, after, reads=tuple(blocks[:1]), writes=tuple(blocks[1:])
        )

    def receive(self, source: int, device: int, num_bytes: int, *after: int) -> int:
        blocks = [self._block(place, num_bytes, TensorKind.ACTIVATION) for place in (source, device)]
        return self._add(OpKind.RECV, device, Stream.PEER_IN, after, reads=tuple(blocks[:1]), writes=tuple(blocks[1:]))

    def all_reduce(self, devices: range, num_bytes: int) -> None:
        blocks = tuple(self._block(device, num_bytes, TensorKind.GRADIENT) for device in devices)
        for device in devices:
            self._add(OpKind.ALL_REDUCE, device, Stream.PEER_IN, (), reads=blocks)

    def forward(self, device: int, *after: int) -> int:
        return self._add(OpKind.FORWARD, device, Stream.COMPUTE, after)

    def update(self, *after: int) -> int:
        return self._add(OpKind.UPDATE, HOST, Stream.HOST, after)

    def run(self) -> Trace:
        program = Program(
            minibatch_size=1,
            num_layers=4,
            budgets=self.machine.budgets,
            blocks=tuple(self.blocks),
            ops=tuple(self.ops),
        )
        return run(program, PROFILE, self.machine)


def ends(ops: Ops) -> list[float]:
    return ops.run().end_s.tolist()


# -- one link ----------------------------------------------------------------------------------------------------------


def one_link(num_devices: int, rate: float) -> Machine:
    return toys.gpus(num_devices, memory_bytes=2**40, link=rate, peer_link=1e12)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=5))
def test_transfers_that_start_together_end_as_processor_sharing_says(sizes: list[int]) -> None:
    """The k-th smallest of n ends when each of those left has moved as much: the smaller ones whole, it n - k times."""
    ops = Ops(one_link(len(sizes), 1e6))
    for device, size in enumerate(sizes):
        ops.swap_in(device, size)
    expected = [sum(min(size, other) for other in sizes) / 1e6 for size in sizes]
    assert ends(ops) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(first=st.integers(1, 10**7), second=st.integers(1, 10**7))
def test_a_transfer_that_comes_later_takes_half_from_then_on(first: int, second: int) -> None:
    ops = Ops(one_link(2, 1e6))
    ops.swap_in(0, first)
    computing = ops.forward(1)
    ops.swap_in(1, second, computing)
    alone, one, two = FORWARD_S, first / 1e6, second / 1e6
    left = max(0.0, one - alone)  # seconds of the first when the second comes
    shared = 2 * min(left, two)
    expected = [one if left == 0 else alone + shared if left <= two else one + two, alone]
    expected.append(alone + two + min(left, two) if left else alone + two)
    assert ends(ops) == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_transfers_one_after_the_other_on_a_stream_do_not_share(count: int) -> None:
    ops = Ops(one_link(1, 1e6))
    for _ in range(count):
        ops.swap_in(0, 1_000_000)
    assert ends(ops) == pytest.approx([1.0 + i for i in range(count)])


def test_directions_are_independent() -> None:
    ops = Ops(one_link(2, 1e6))
    ops.swap_in(0, 1_000_000)
    ops.swap_out(0, 2_000_000)
    ops.swap_out(1, 2_000_000)
    assert ends(ops) == pytest.approx([1.0, 4.0, 4.0])


def test_blocks_of_one_op_travel_as_one_transfer() -> None:
    """An op that moves two blocks has no larger share of the link than one that moves one."""
    ops = Ops(one_link(2, 1e6))
    number = ops.swap_in(0, 1_000_000)
    more = Block(TensorKind.BUFFER, 0, (0, 1), (0, 0), 2_000_000)
    ops.blocks.append(more)
    ops.ops[number] = ops.ops[number]._replace(writes=(0, 1))
    ops.swap_in(1, 3_000_000)
    assert ends(ops) == pytest.approx([6.0, 6.0])


def test_latency_comes_on_top_for_every_link_of_the_way_and_holds_up_nobody_else() -> None:
    on = one_link(2, 1e6)
    slow = replace(on, links=tuple(replace(link, latency_s=0.25) for link in on.links))
    ops = Ops(slow)
    ops.swap_in(0, 1_000_000)
    ops.swap_in(0, 1_000_000)
    ops.swap_in(1, 2_000_000)
    # Half each until 2.0, when the first has moved its bytes; it ends at 2.5.  Until then the other moves half a
    # megabyte alone, then both have one half left to go together, until 3.5, and the second goes on alone.
    assert ends(ops) == pytest.approx([2.5, 4.5, 4.0])


# -- trees -------------------------------------------------------------------------------------------------------------


TREE = machine(
    {"a0": "left", "a1": "left", "b0": "right", "b1": "right"},
    {
        ("left", "host"): 4e6,
        ("right", "host"): 2e6,
        ("a0", "left"): 3e6,
        ("a1", "left"): 3e6,
        ("b0", "right"): 0.5e6,
        ("b1", "right"): 3e6,
    },
)


def test_devices_behind_switches_share_their_own_uplink_only() -> None:
    ops = Ops(TREE)
    for device in range(4):
        ops.swap_in(device, 6_000_000)
    # 4 MB/s for two is 2 each; b0 gets the 0.5 that its link carries, b1 the rest of 2.
    assert ends(ops) == pytest.approx([3.0, 3.0, 12.0, 4.0])


def test_alone_a_device_gets_what_the_narrowest_link_of_its_way_carries() -> None:
    for device, rate in enumerate((3e6, 3e6, 0.5e6, 2e6)):
        ops = Ops(TREE)
        ops.swap_out(device, 6_000_000)
        assert ends(ops) == pytest.approx([6e6 / rate])


def test_peers_behind_one_switch_leave_the_uplink_alone_and_others_cross_it() -> None:
    ops = Ops(TREE)
    ops.receive(0, 1, 3_000_000)
    ops.swap_in(0, 6_000_000)  # a0's link down, the uplink
    assert ends(ops) == pytest.approx([1.0, 2.0])
    ops = Ops(TREE)
    ops.receive(3, 0, 4_000_000)  # up through right, down through left
    ops.swap_out(3, 1_000_000)  # the same way up, 2 MB/s
    ops.swap_in(1, 6_000_000)  # of left's 4 MB/s what the first leaves: 3 at first, then half
    assert ends(ops) == pytest.approx([2.5, 1.0, 2.5])


def test_without_peer_access_a_copy_goes_up_to_the_host_and_down_again() -> None:
    alone, shared = replace(TREE, peer_transfers=False), Ops(replace(TREE, peer_transfers=False))
    ops = Ops(alone)
    ops.receive(0, 1, 6_000_000)
    assert ends(ops) == pytest.approx([2.0])  # nobody else: its own links bind
    shared.receive(0, 1, 6_000_000)
    shared.swap_in(0, 6_000_000)
    assert ends(shared) == pytest.approx([3.0, 3.0])  # half of the uplink each


def test_switches_behind_switches_share_every_link_of_their_way() -> None:
    on = machine(
        {"x": "low", "y": "low", "z": "high"},
        {("high", "host"): 9e6, ("low", "high"): 4e6, ("x", "low"): 1e9, ("y", "low"): 1e9, ("z", "high"): 1e9},
    )
    ops = Ops(on)
    ops.swap_in(0, 4_000_000)
    ops.swap_in(1, 8_000_000)
    ops.swap_in(2, 13_000_000)
    # low's 4 MB/s are 2 each, z has 5; from 2.0 s on y has all 4, z still 5.
    assert ends(ops) == pytest.approx([2.0, 3.0, 2.6])


def test_root_ports_are_links_of_their_own() -> None:
    on = machine({"x": "host", "y": "host"}, {("x", "host"): 2e6, ("y", "host"): 1e6})
    ops = Ops(on)
    ops.swap_in(0, 2_000_000)
    ops.swap_in(1, 2_000_000)
    ops.receive(1, 0, 1_000_000, 0)
    # While the receive runs (from 1.0, at y's 1 MB/s up), nobody else is on its way.
    assert ends(ops) == pytest.approx([1.0, 2.0, 2.0])


def test_a_fabric_carries_peer_transfers_at_each_devices_port_and_leaves_the_links_alone() -> None:
    on = replace(TREE, fabric_bytes_per_s=8e6)
    ops = Ops(on)
    ops.receive(0, 2, 8_000_000)
    ops.receive(0, 3, 16_000_000)  # the same port out
    ops.receive(1, 0, 8_000_000)
    ops.swap_in(0, 6_000_000)
    ops.swap_out(0, 6_000_000)
    assert ends(ops) == pytest.approx([2.0, 3.0, 1.0, 2.0, 2.0])


# -- bridges -----------------------------------------------------------------------------------------------------------


BRIDGED = replace(TREE, bridges=(Bridge(first="a0", second="b0", bytes_per_s=8e6),))


def test_a_bridges_directions_are_independent_and_leave_the_links_alone() -> None:
    ops = Ops(BRIDGED)
    ops.receive(0, 2, 8_000_000)
    ops.receive(2, 0, 16_000_000)
    ops.swap_in(0, 6_000_000)
    ops.swap_out(2, 1_000_000)
    assert ends(ops) == pytest.approx([1.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("peer_transfers", [True, False])
def test_pairs_without_a_bridge_go_over_the_tree_at_the_same_time(peer_transfers: bool) -> None:
    ops = Ops(replace(BRIDGED, peer_transfers=peer_transfers))
    ops.receive(0, 2, 8_000_000)
    ops.receive(1, 0, 6_000_000)  # behind one switch
    ops.swap_in(1, 2_000_000)  # left's uplink: half of it, while the other comes from the host
    assert ends(ops) == pytest.approx([1.0, 2.0, 2 / 3] if peer_transfers else [1.0, 7 / 3, 1.0])


# -- the host's memory -------------------------------------------------------------------------------------------------


def with_memory(on: Machine, bytes_per_s: float) -> Machine:
    return replace(on, host=replace(on.host, memory_bytes_per_s=bytes_per_s))


def own_links(num_devices: int, rate: float) -> Machine:
    names = [f"gpu{i}" for i in range(num_devices)]
    return machine(dict.fromkeys(names, "host"), {(name, "host"): rate for name in names})


@pytest.mark.parametrize("num_devices", [1, 2, 5, 8])
@pytest.mark.parametrize("memory", [1e6, 4.5e6, 1e9])
def test_devices_that_swap_in_at_once_get_what_their_links_or_the_hosts_memory_carry(
    num_devices: int, memory: float
) -> None:
    ops = Ops(with_memory(own_links(num_devices, 1e6), memory))
    for device in range(num_devices):
        ops.swap_in(device, 3_000_000)
    expected = num_devices * 3e6 / min(num_devices * 1e6, memory)
    assert ends(ops) == pytest.approx([expected] * num_devices)


def test_both_directions_share_the_hosts_memory() -> None:
    ops = Ops(with_memory(own_links(1, 3e6), 4e6))
    ops.swap_in(0, 3_000_000)
    ops.swap_out(0, 6_000_000)
    # 2 MB/s each until 1.5, then the link's 3 MB/s for the 3 MB that are left.
    assert ends(ops) == pytest.approx([1.5, 2.5])


def test_a_copy_through_the_host_is_written_to_its_memory_and_read_again() -> None:
    on = with_memory(replace(own_links(3, 4e6), peer_transfers=False), 6e6)
    ops = Ops(on)
    ops.receive(0, 1, 6_000_000)
    assert ends(ops) == pytest.approx([2.0])
    assert ops.run().link_bytes[HOST_MEMORY, TensorKind.ACTIVATION] == 12_000_000
    ops.swap_in(2, 3_000_000)
    # At 2 MB/s each they take 6 together; then 3 MB are left at 3.
    assert ends(ops) == pytest.approx([2.5, 1.5])


def test_peers_and_bridges_leave_the_hosts_memory_alone() -> None:
    on = with_memory(replace(BRIDGED, peer_transfers=True), 1e6)
    ops = Ops(on)
    ops.receive(0, 2, 8_000_000)
    ops.receive(0, 1, 3_000_000)
    ops.swap_in(3, 1_000_000)
    assert ends(ops) == pytest.approx([1.0, 1.0, 1.0])


PLACES = st.integers(HOST, 3)


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(PLACES, PLACES).filter(lambda pair: pair[0] != pair[1]),
        min_size=1,
        max_size=6,
        unique_by=lambda pair: pair if HOST in pair else pair[1],  # one transfer per stream
    ),
    sizes=st.lists(st.integers(10**5, 10**7), min_size=6, max_size=6),
    peer_transfers=st.booleans(),
)
def test_emulated_links_give_transfers_the_same_times(
    pairs: list[tuple[int, int]], sizes: list[int], peer_transfers: bool
) -> None:
    """In virtual time: all start at once, and what has ended is asked for, not waited for."""
    on = with_memory(replace(BRIDGED, peer_transfers=peer_transfers), 3.5e6)
    ops, links = Ops(on), EmulatedLinks(on)
    for number, ((source, to), size) in enumerate(zip(pairs, sizes, strict=False)):
        if to == HOST:
            ops.swap_out(source, size)
        elif source == HOST:
            ops.swap_in(to, size)
        else:
            ops.receive(source, to, size)
        route, _ = links._routes[source, to]
        links._resources.add(number, Flow(resources=route, remaining=float(size)))
    links._settle(1e9)
    assert [links._ended_s[number] for number in range(len(pairs))] == pytest.approx(ends(ops))


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5])
def test_reducing_takes_each_devices_link_twice_its_share_of_what_others_have(num_devices: int) -> None:
    """2 · (N - 1) / N of the bytes each way, as in a ring; all at the same time, off the uplink."""
    rate, num_bytes = 1e6, 64 * num_devices * 5000
    ops = Ops(toys.gpus(num_devices, link=1.0, peer_link=rate))
    ops.all_reduce(range(num_devices), num_bytes)
    expected = 2 * (num_devices - 1) / num_devices * num_bytes / rate
    assert ends(ops) == pytest.approx([expected] * num_devices)


# -- cores -------------------------------------------------------------------------------------------------------------


def emulated(num_devices: int, *, cores: int, threads: int, update_threads: int = 1) -> Machine:
    on = one_link(num_devices, 1e12)
    return replace(
        on,
        devices=tuple(replace(d, backend=Backend.EMULATED, compute_threads=threads) for d in on.devices),
        host=Host(memory_bytes=2**40, num_cores=cores, update_threads=update_threads),
    )


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 2), (3, 4)])
def test_emulated_devices_share_cores_evenly(num_devices: int, cores: int, threads: int) -> None:
    ops = Ops(emulated(num_devices, cores=cores, threads=threads))
    for device in range(num_devices):
        ops.forward(device)
    assert ends(ops) == pytest.approx([FORWARD_S * max(1.0, num_devices * threads / cores)] * num_devices)


def test_an_update_and_emulated_computing_slow_each_other_down_while_both_run() -> None:
    ops = Ops(emulated(1, cores=4, threads=4, update_threads=2))
    ops.forward(0)
    ops.update()
    # Together they want 6 of 4 cores, so each runs at 2/3: forward ends at 1.5, then the update has 2 s left.
    assert ends(ops) == pytest.approx([FORWARD_S * 1.5, 1.5 + UPDATE_S - 1.0])


def test_real_devices_compute_beside_updates() -> None:
    ops = Ops(replace(one_link(1, 1e12), host=Host(memory_bytes=2**40, num_cores=1)))
    ops.forward(0)
    ops.update()
    ops.update()
    assert ends(ops) == pytest.approx([FORWARD_S, UPDATE_S, 2 * UPDATE_S])


def test_updates_with_more_threads_than_cores_take_longer() -> None:
    on = replace(one_link(1, 1e12), host=Host(memory_bytes=2**40, num_cores=2, update_threads=6))
    ops = Ops(on)
    ops.update()
    assert ends(ops) == pytest.approx([3 * UPDATE_S])


# -- releasing ---------------------------------------------------------------------------------------------------------


def test_a_device_takes_its_time_to_release_weights_after_the_op_that_frees_them() -> None:
    on = one_link(2, 1e6)
    first, second = on.devices
    ops = Ops(replace(on, devices=(replace(first, release_s=0.5), second)))
    for device in range(2):
        brought = ops.swap_in(device, 1_000_000)
        number = ops.forward(device, brought)
        ops.ops[number] = ops.ops[number]._replace(reads=ops.ops[brought].writes, frees=ops.ops[brought].writes)
        ops.forward(device)
    trace = ops.run()
    assert trace.end_s.tolist() == pytest.approx([2.0, 3.5, 4.5, 2.0, 3.0, 4.0])
    assert trace.memory[0].times_s.tolist() == pytest.approx([0.0, 0.0, 3.5])  # freed when it ends


def test_releasing_other_blocks_takes_no_time() -> None:
    on = one_link(1, 1e6)
    ops = Ops(replace(on, devices=(replace(on.devices[0], release_s=0.5),)))
    number = ops.swap_out(0, 1_000_000)
    ops.ops[number] = ops.ops[number]._replace(frees=(0,))
    assert ends(ops) == pytest.approx([1.0])
