"""Fair sharing: the compiled rates against exact arithmetic and against what makes an allocation max-min fair."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harmony_lab.sharing import Flow, SharedResources, fair_rates

INFINITE = float("inf")
CAPACITY = {"a": 1.0, "b": 10.0, "c": 3.0, "d": 1000.0}
FLOWS = st.lists(
    st.builds(
        lambda resources, cap, weight: Flow(tuple(sorted(resources)), 1.0, cap=cap, weight=weight),
        resources=st.sets(st.sampled_from(sorted(CAPACITY)), min_size=1),
        cap=st.one_of(st.just(INFINITE), st.floats(0.01, 300.0)),
        weight=st.sampled_from((1.0, 1.0, 1.0, 0.5, 2.0, 3.0)),
    ),
    min_size=1,
    max_size=8,
)


def exact_rates(flows: list[Flow], capacity: dict[str, float]) -> list[Fraction]:
    """In turn, whichever flow can rise least gets that: its cap, or an even share of what is left of a resource."""
    left = {name: Fraction(amount) for name, amount in capacity.items()}
    rates: dict[int, Fraction] = {}
    while len(rates) < len(flows):
        rising = [i for i in range(len(flows)) if i not in rates]
        limits = {}
        for i in rising:
            shares = [
                left[name] / sum(Fraction(flows[j].weight) for j in rising if name in flows[j].resources)
                for name in flows[i].resources
            ]
            limits[i] = min([*shares, *([Fraction(flows[i].cap)] if flows[i].cap < INFINITE else [])])
        least = min(limits.values())
        for i in [i for i in rising if limits[i] == least]:
            rates[i] = least
            for name in flows[i].resources:
                left[name] -= Fraction(flows[i].weight) * least
    return [rates[i] for i in range(len(flows))]


@settings(max_examples=300, deadline=None)
@given(flows=FLOWS)
def test_rates_are_those_of_exact_arithmetic(flows: list[Flow]) -> None:
    assert fair_rates(flows, CAPACITY) == pytest.approx([float(rate) for rate in exact_rates(flows, CAPACITY)])


@settings(max_examples=300, deadline=None)
@given(flows=FLOWS)
def test_no_flow_can_have_more_but_from_one_that_has_no_more_than_it(flows: list[Flow]) -> None:
    """The definition: nothing is overloaded, and each flow runs at its cap or has a full resource on which no other
    flow is faster."""
    rates = fair_rates(flows, CAPACITY)
    load = dict.fromkeys(CAPACITY, 0.0)
    for flow, rate in zip(flows, rates, strict=True):
        assert 0 < rate <= flow.cap * (1 + 1e-9)
        for name in flow.resources:
            load[name] += flow.weight * rate
    assert all(load[name] <= amount * (1 + 1e-9) for name, amount in CAPACITY.items())
    for flow, rate in zip(flows, rates, strict=True):
        bottlenecks = [
            name
            for name in flow.resources
            if load[name] >= CAPACITY[name] * (1 - 1e-9)
            and all(other <= rate * (1 + 1e-9) for f, other in zip(flows, rates, strict=True) if name in f.resources)
        ]
        assert bottlenecks or rate == pytest.approx(flow.cap)


@settings(max_examples=100, deadline=None)
@given(flows=FLOWS, data=st.data())
def test_the_order_in_which_flows_come_makes_no_difference(flows: list[Flow], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(flows))))
    rates, again = fair_rates(flows, CAPACITY), fair_rates([flows[i] for i in order], CAPACITY)
    assert again == pytest.approx([rates[i] for i in order])


def test_flows_of_very_different_scale_are_not_disturbed_by_rounding() -> None:
    """Host cores count in ones, links in billions."""
    capacity = {"cores": 3.0, "link": 12e9, "slow": 1e-3}
    flows = [
        Flow(("cores",), 1.0, cap=1.0),
        Flow(("cores",), 1.0, cap=1.0, weight=7.0),
        Flow(("link",), 1.0),
        Flow(("link", "slow"), 1.0),
        Flow(("link",), 1.0),
    ]
    assert fair_rates(flows, capacity) == pytest.approx([0.375, 0.375, 6e9, 1e-3, 6e9], rel=1e-9)


def test_a_cap_frees_capacity_for_others() -> None:
    rates = fair_rates([Flow(("r",), 1.0, cap=1.0), Flow(("r",), 1.0, cap=9.0), Flow((), 1.0, cap=3.0)], {"r": 4.0})
    assert rates == pytest.approx([1.0, 3.0, 3.0])


@pytest.mark.parametrize(("narrow", "cap"), [(0.61, 1.7), (0.26, 2.57), (0.43, 0.93)])
def test_a_cap_that_rounding_keeps_from_being_reached_exactly_holds_nothing_else_back(
    narrow: float, cap: float
) -> None:
    assert narrow + (cap - narrow) < cap
    flows = [Flow(("narrow",), 1.0), Flow(("wide",), 1.0, cap=cap), Flow(("wide",), 1.0)]
    assert fair_rates(flows, {"narrow": narrow, "wide": 10.0}) == pytest.approx([narrow, cap, 10.0 - cap])


def test_weights_count_against_capacity() -> None:
    rates = fair_rates([Flow(("cores",), 1.0, cap=1.0, weight=2.0), Flow(("cores",), 1.0, cap=1.0)], {"cores": 2.0})
    assert rates == pytest.approx([2 / 3, 2 / 3])


def test_shared_resources_move_flows_in_time() -> None:
    shared = SharedResources({"link": 10.0})
    shared.add("a", Flow(("link",), 10.0))
    shared.advance(0.5)
    shared.add("b", Flow(("link",), 10.0))
    assert shared.next_completion() == (pytest.approx(1.5), "a")
    shared.advance(1.5)
    shared.remove("a")
    assert shared.next_completion() == (pytest.approx(2.0), "b")
