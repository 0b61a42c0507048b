"""Programs on one emulated device, written by hand."""

import _thread
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from plain_training import PlainTraining, breaking
from small_layers import build, layer, mlp

from harmony_lab.errors import DeviceMemoryError, HarmonyError, ProgramError, StepCancelledError, TrainingError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.program import OpKind, Program, Stream, TensorKind
from harmony_lab.runtime.emulated import EmulatedBackend
from harmony_lab.runtime.runner import Runner
from harmony_lab.trace import Origin

BUDGET = 8192
ONE_PACK = f"""
harmony_lab.program 1 minibatch=6 layers=3 budgets={BUDGET}
%0 weight d0 0:3 0:0 640
%1 input d0 0:3 0:6 384
%2 saved d0 0:3 0:6 2048
%3 activation d0 3:3 0:6 4
%4 activation d-1 3:3 0:6 4
%5 gradient d0 0:3 0:0 640
%6 gradient d-1 0:3 0:0 640
0 swap_in d0.swap_in 0:3 0:0 writes=0
1 swap_in d0.swap_in 0:3 0:6 writes=1
2 forward d0.compute 0:3 0:6 reads=0,1 writes=2,3 after=0,1
3 swap_out d0.swap_out 3:3 0:6 reads=3 writes=4 frees=3 after=2
4 backward d0.compute 0:3 0:6 reads=0,1,2 writes=5 frees=0,1,2 after=2
5 swap_out d0.swap_out 0:3 0:0 reads=5 writes=6 frees=5 after=4
6 update d-1.host 0:3 0:0 reads=6 frees=6 after=5
"""
TWO_PACKS = f"""
harmony_lab.program 1 minibatch=6 layers=3 budgets={BUDGET}
%0 weight d0 0:1 0:0 320
%1 weight d0 1:3 0:0 320
%2 input d0 0:1 0:6 192
%3 activation d0 1:1 0:6 192
%4 input d0 1:3 0:6 192
%5 saved d0 1:3 0:6 2048
%6 activation d0 3:3 0:6 4
%7 activation d-1 3:3 0:6 4
%8 gradient d0 1:3 0:0 320
%9 activation_gradient d0 1:1 0:6 192
%10 gradient d-1 1:3 0:0 320
%11 saved d0 0:1 0:6 2048
%12 gradient d0 0:1 0:0 320
%13 gradient d-1 0:1 0:0 320
0 swap_in d0.swap_in 0:1 0:0 writes=0,1,2,4
1 forward d0.compute 0:1 0:6 reads=0,2 writes=3 after=0
2 forward d0.compute 1:3 0:6 reads=1,3,4 writes=5,6
3 swap_out d0.swap_out 3:3 0:6 reads=6 writes=7 frees=6 after=2
4 backward d0.compute 1:3 0:6 reads=1,4,5 writes=8,9 frees=1,3,4,5
5 swap_out d0.swap_out 1:3 0:0 reads=8 writes=10 frees=8 after=4
6 update d-1.host 1:3 0:0 reads=10 frees=10 after=5
7 recompute d0.compute 0:1 0:6 reads=0,2 writes=11 after=6
8 backward d0.compute 0:1 0:6 reads=0,2,9,11 writes=12 frees=0,2,9,11
9 swap_out d0.swap_out 0:1 0:0 reads=12 writes=13 frees=12 after=8
10 update d-1.host 0:1 0:0 reads=13 frees=13 after=9
"""
RESIDENT_BUFFER = f"""
harmony_lab.program 1 minibatch=6 layers=2 budgets={BUDGET}
%0 weight d0 0:1 0:0 64
%1 buffer d0 0:1 0:0 64
%2 input d0 0:1 0:6 96
%3 activation d0 1:1 0:6 24
%4 saved d0 1:2 0:6 1024
%5 activation_gradient d0 1:1 0:6 24
%6 saved d0 0:1 0:6 1024
%7 gradient d0 0:1 0:0 64
%8 gradient d-1 0:1 0:0 64
%9 activation d0 2:2 0:6 4
%10 activation d-1 2:2 0:6 4
0 swap_in d0.swap_in 0:1 0:0 writes=0,1,2
1 forward d0.compute 0:1 0:6 reads=0,1,2 writes=3 after=0
2 forward d0.compute 1:2 0:6 reads=3 writes=4,9
3 swap_out d0.swap_out 2:2 0:6 reads=9 writes=10 frees=9 after=2
4 backward d0.compute 1:2 0:6 reads=3,4 writes=5 frees=3,4
5 recompute d0.compute 0:1 0:6 reads=0,1,2 writes=6
6 backward d0.compute 0:1 0:6 reads=0,1,2,5,6 writes=7 frees=0,2,5,6
7 swap_out d0.swap_out 0:1 0:0 reads=1 frees=1 after=6
8 swap_out d0.swap_out 0:1 0:0 reads=7 writes=8 frees=7 after=6
9 update d-1.host 0:1 0:0 reads=8 frees=8 after=8
"""
SHAPE = {"depth": 2, "width": 8, "num_samples": 6}


def sgd(layers: LayerSequence) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(layers.tensors.values()), lr=0.1)


@pytest.fixture
def runner() -> Iterator[Callable[..., Runner]]:
    """Makes runners of a written program, closes them after the test."""
    made: list[Runner] = []

    def make(layers: LayerSequence, text: str = ONE_PACK, memory: int = BUDGET, **options: int) -> Runner:
        program = Program.parse(text)
        machine = Machine.emulated(1, memory=memory, link=1e9)
        made.append(Runner(layers, sgd(layers), machine, lambda size: program, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.device_bytes == (0,)


@pytest.mark.parametrize("text", [ONE_PACK, TWO_PACKS])
@pytest.mark.parametrize("chaos_seed", [None, 1, 2])
def test_a_program_trains_as_plain_autograd_does(
    runner: Callable[..., Runner], text: str, chaos_seed: int | None
) -> None:
    layers = mlp(**SHAPE)
    plain = PlainTraining(layers, lambda tensors: torch.optim.SGD(tensors, lr=0.1))
    trained = runner(layers, text, chaos_seed=chaos_seed)
    for _ in range(5):
        assert trained.step(layers.example_batch) == pytest.approx(plain.step(layers.example_batch), rel=1e-6)
    plain.assert_equal(1e-6)


def test_the_trace_is_measured_and_in_order(runner: Callable[..., Runner]) -> None:
    layers = mlp(**SHAPE)
    trained = runner(layers, TWO_PACKS, chaos_seed=3)
    trained.step(layers.example_batch)
    trace = trained.last_trace
    assert trace is not None
    assert trace.origin is Origin.MEASURED
    for number, op, start_s, end_s in trace.spans():
        assert 0 <= start_s <= end_s
        assert all(trace.end_s[other] <= start_s for other in op.after), number
    assert trace.moved_bytes[-1, 0, TensorKind.WEIGHT] == 640
    assert trace.moved_bytes[0, -1, TensorKind.GRADIENT] == 640
    assert trace.moved_bytes[-1, 0, TensorKind.INPUT] == 384
    assert trace.moved_bytes[0, -1, TensorKind.ACTIVATION] == 4


def test_measured_memory_counts_blocks_saved_activations_and_temporaries(runner: Callable[..., Runner]) -> None:
    layers = mlp(**SHAPE)
    trained = runner(layers)
    trained.step(layers.example_batch)
    assert trained.last_trace is not None
    (memory,) = trained.last_trace.memory
    peaks = dict(zip(memory.kinds, memory.num_bytes.max(axis=0).tolist(), strict=True))
    assert peaks[TensorKind.WEIGHT] == peaks[TensorKind.GRADIENT] == 640
    assert peaks[TensorKind.INPUT] == 384
    assert peaks[TensorKind.ACTIVATION] == 4
    assert peaks[TensorKind.SAVED] >= 2 * 6 * 8 * 4  # what tanh saves, twice
    assert peaks[TensorKind.WORKSPACE] >= 6 * 8 * 4
    assert memory.total_bytes[-1] == 0
    assert (memory.num_bytes >= 0).all()
    assert memory.peak_bytes <= BUDGET


def test_recompute_does_not_update_buffers_again(runner: Callable[..., Runner]) -> None:
    def counting(parameters, buffers, inputs, batch, call):  # type: ignore[no-untyped-def]
        buffers[0].add_(1)
        return ((batch[0] * parameters[0]).sum(1),)

    def mean(parameters, buffers, inputs, batch, call):  # type: ignore[no-untyped-def]
        return (inputs[0].mean(),)

    layers = build(
        [
            layer(
                "0",
                counting,
                parameters=("w",),
                buffers=("n",),
                updated_buffers=("n",),
                batch_inputs=("x",),
                outputs=("v",),
            ),
            layer("1", mean, kind=1, inputs=("v",), outputs=("loss",)),
        ],
        {"w": torch.randn(4).requires_grad_(), "n": torch.tensor(0)},
        {"x": torch.randn(6, 4)},
        buffer_decay={"n": 1.0},
    )
    runner(layers, RESIDENT_BUFFER).step(layers.example_batch)
    assert layers.tensors["n"] == 1


def test_exceeding_the_budget_names_op_bytes_and_budget(runner: Callable[..., Runner]) -> None:
    layers = mlp(**SHAPE)
    trained = runner(layers, memory=1200)
    for _ in range(2):
        with pytest.raises(
            TrainingError, match=r"op 2, forward \[0:3\].*DeviceMemoryError.*emu0.*1200 bytes"
        ) as caught:
            trained.step(layers.example_batch)
        assert isinstance(caught.value.__cause__, DeviceMemoryError)
        assert trained.device_bytes == (0,)


def test_a_block_counts_before_it_is_there(runner: Callable[..., Runner]) -> None:
    layers = mlp(**SHAPE)
    with pytest.raises(
        TrainingError, match=r"op 1, swap_in .* needs 384 more bytes for input, but 640 of the budget of 1000"
    ):
        runner(layers, memory=1000).step(layers.example_batch)


def test_who_reads_memory_that_was_freed_meanwhile_reads_poison(runner: Callable[..., Runner]) -> None:
    too_early = ONE_PACK.replace("frees=0,1,2 after=2", "frees=0,2 after=2,3").replace(
        "reads=3 writes=4 frees=3", "reads=3 writes=4 frees=1,3"
    )
    layers = mlp(**SHAPE)
    runner(layers, too_early, chaos_seed=0).step(layers.example_batch)
    assert layers.tensors["0.weight"].isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("reads=3 writes=4 frees=3", "reads=3 writes=4 frees=2,3"),
            r"%2 saved.* is used before it is written or after it is freed",
        ),
        (("frees=5 after=4", "frees=5,5 after=4"), r"%5 gradient.* is freed before it is written or twice"),
    ],
)
def test_blocks_used_after_they_are_freed_are_named(
    runner: Callable[..., Runner], change: tuple[str, str], message: str
) -> None:
    text = ONE_PACK.replace(*change).replace("frees=0,1,2 after=2", "frees=0,1 after=2,3")
    layers = mlp(**SHAPE)
    with pytest.raises(TrainingError, match=message) as caught:
        runner(layers, text).step(layers.example_batch)
    assert isinstance(caught.value.__cause__, ProgramError)


# -- failures -----------------------------------------------------------------------------------------------------


class Switch:
    """Fails when it is on, and remembers the tensor that its frame held."""

    def __init__(self) -> None:
        self.on = False
        self.held: weakref.ref[torch.Tensor] | None = None

    def __call__(self) -> None:
        if self.on:
            tensor = torch.ones(1000)
            self.held = weakref.ref(tensor)
            try:
                raise ArithmeticError("broken", tensor)
            except ArithmeticError as error:
                kept = error  # a cycle: this frame, the error, its traceback
                raise kept from None


def test_an_error_in_a_layer_names_the_op_and_leaves_everything_ready_for_the_next_step(
    runner: Callable[..., Runner],
) -> None:
    switch = Switch()
    layers = mlp(**SHAPE)
    plain = PlainTraining(layers, lambda tensors: torch.optim.SGD(tensors, lr=0.1))
    trained = runner(breaking(layers, 1, switch))
    switch.on = True
    with pytest.raises(
        TrainingError, match=r"op 2, forward \[0:3\].*ArithmeticError.*broken[^$]*No weights were updated"
    ) as caught:
        trained.step(layers.example_batch)
    assert trained.device_bytes == (0,)
    assert switch.held is not None
    assert switch.held() is None, "the error keeps a tensor alive"
    assert caught.value.__cause__ is not None
    assert "in __call__" in caught.value.__cause__.__notes__[0]
    switch.on = False
    trained.step(layers.example_batch)
    plain.step(layers.example_batch)
    plain.assert_equal(1e-6)


def test_an_error_after_an_update_says_which_layers_were_updated(runner: Callable[..., Runner]) -> None:
    calls: list[bool] = []

    def fail_in_recompute() -> None:
        calls.append(torch.is_grad_enabled())
        if calls[-1]:
            raise ArithmeticError("broken")

    layers = mlp(**SHAPE)
    before = {name: tensor.detach().clone() for name, tensor in layers.tensors.items()}
    with pytest.raises(TrainingError, match=r"already updated in this step: 1:3\. Others were not"):
        runner(breaking(layers, 0, fail_in_recompute), TWO_PACKS).step(layers.example_batch)
    changed = {name for name, tensor in layers.tensors.items() if not torch.equal(tensor.detach(), before[name])}
    assert changed == {"1.weight", "1.bias"}


def test_twenty_failures_leave_threads_and_tensors_flat(runner: Callable[..., Runner]) -> None:
    switch = Switch()
    layers = mlp(**SHAPE)
    trained = runner(breaking(layers, 1, switch))
    trained.step(layers.example_batch)
    switch.on = True

    def counts() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    after: list[tuple[int, int]] = []
    for attempt in range(21):
        with pytest.raises(TrainingError):
            trained.step(layers.example_batch)
        if attempt in (0, 20):
            after.append(counts())
    assert after[0] == after[1]


def test_an_interrupt_ends_the_step_with_devices_free_and_the_next_step_works(runner: Callable[..., Runner]) -> None:
    layers = mlp(**SHAPE)
    interrupting = threading.Event()

    def interrupt() -> None:
        if interrupting.is_set() and (job := trained._executor._job):
            _thread.interrupt_main()
            job._aborted.wait(60)  # the step is under way when the main thread notices

    trained = runner(breaking(layers, 1, interrupt))
    before = layers.tensors["0.weight"].detach().clone()
    interrupting.set()
    with pytest.raises(KeyboardInterrupt) as caught:
        trained.step(layers.example_batch)
    assert "No weights were updated" in caught.value.__notes__[0]
    assert trained.device_bytes == (0,)
    assert torch.equal(layers.tensors["0.weight"].detach(), before)
    interrupting.clear()
    trained.step(layers.example_batch)
    assert not torch.equal(layers.tensors["0.weight"].detach(), before)


# -- cancelling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("during", ["preparing", "forward", "the second minibatch"])
def test_a_cancelled_step_was_never_begun(during: str) -> None:
    layers, program = mlp(**SHAPE), Program.parse(TWO_PACKS)
    plain = PlainTraining(layers, lambda tensors: torch.optim.SGD(tensors, lr=0.1))
    cancelled: list[bool] = []
    forwards: list[bool] = []

    def lower(size: int) -> Program:
        if during == "preparing":
            cancelled.append(trained.cancel())
        return program

    def forward() -> None:
        forwards.append(torch.is_grad_enabled())
        if not cancelled and forwards.count(False) == {"forward": 1, "the second minibatch": 2}[during]:
            cancelled.append(trained.cancel())

    broken = breaking(layers, 0, forward)
    with Runner(broken, sgd(broken), Machine.emulated(1, memory=BUDGET, link=1e9), lower) as trained:
        assert not trained.cancel()  # there is nothing to cancel yet
        with pytest.raises(StepCancelledError):
            trained.accumulate([layers.example_batch] * (2 if during == "the second minibatch" else 1))
        assert cancelled == [True]
        assert trained.device_bytes == (0,)
        assert trained.step_count == 0
        plain.assert_equal(0.0)
        trained.step(layers.example_batch)
        plain.step(layers.example_batch)
        plain.assert_equal(1e-6)


def test_a_step_that_has_begun_to_update_is_finished(runner: Callable[..., Runner]) -> None:
    layers = mlp(**SHAPE)
    plain = PlainTraining(layers, lambda tensors: torch.optim.SGD(tensors, lr=0.1))
    cancelled: list[bool] = []

    def in_recompute() -> None:
        if torch.is_grad_enabled():  # after the first update
            cancelled.append(trained.cancel())

    trained = runner(breaking(layers, 0, in_recompute), TWO_PACKS)
    trained.step(layers.example_batch)
    plain.step(layers.example_batch)
    assert cancelled == [False]
    plain.assert_equal(1e-6)


# -- threads ------------------------------------------------------------------------------------------------------


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("harmony-")]


def test_threads_stay_from_step_to_step_and_end_with_the_runner(runner: Callable[..., Runner]) -> None:
    layers = mlp(**SHAPE)
    num_threads = torch.get_num_threads()
    trained = runner(layers)
    trained.step(layers.example_batch)
    first = worker_threads()
    assert {thread.name for thread in first} == {
        "harmony-d0.compute",
        "harmony-d0.swap_in",
        "harmony-d0.swap_out",
        "harmony-host.host",
    }
    trained.step(layers.example_batch)
    assert worker_threads() == first
    trained.close()
    assert not worker_threads()
    assert torch.get_num_threads() == num_threads
    with pytest.raises(HarmonyError, match="closed"):
        trained.step(layers.example_batch)


def test_threads_of_a_forgotten_runner_end() -> None:
    layers = mlp(**SHAPE)
    program = Program.parse(ONE_PACK)
    trained = Runner(layers, sgd(layers), Machine.emulated(1, memory=BUDGET), lambda size: program)
    trained.step(layers.example_batch)
    threads = worker_threads()
    assert threads
    del trained
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_buffers_that_one_device_updates_twice_in_a_step_are_refused(runner: Callable[..., Runner]) -> None:
    layers = mlp(**SHAPE)
    stateful = replace(layers.layers[1], buffers=("statistics",), updated_buffers=("statistics",))
    layers = replace(
        layers,
        layers=(layers.layers[0], stateful, layers.layers[2]),
        tensors={**layers.tensors, "statistics": torch.zeros(16)},
        buffer_decay={"statistics": 0.9},
    )
    out = "\n%7 buffer d0 0:3 0:0 64\n7 swap_out d0.swap_out 0:3 0:0 reads=7\n8 swap_out d0.swap_out 0:3 0:0 reads=7\n"
    assert Program.parse(ONE_PACK + out).ops[7].kind is OpKind.SWAP_OUT
    with pytest.raises(ProgramError, match="'statistics' is updated by several packs or groups on device 0"):
        runner(layers, ONE_PACK + out).step(layers.example_batch)


def test_an_error_while_a_thread_starts_arrives_and_leaves_no_thread(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: EmulatedBackend, device: int, stream: Stream) -> None:
        torch.set_num_threads(1)
        if stream is Stream.SWAP_OUT:
            raise OSError("no such device")

    layers = mlp(**SHAPE)
    num_threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(EmulatedBackend, "enter_worker", failing)
        trained = runner(layers)
        for _ in range(2):
            with pytest.raises(
                TrainingError, match=r"thread for d0\.swap_out could not start: OSError: no such device"
            ):
                trained.step(layers.example_batch)
            assert not worker_threads()
    assert torch.get_num_threads() == num_threads


def test_threads_can_be_started_after_one_could_not(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = mlp(**SHAPE)
    trained = runner(layers)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            trained.step(layers.example_batch)
    trained.step(layers.example_batch)
    assert worker_threads()


def _no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("setting", "advice"),
    [("", "set PYTORCH_ALLOC_CONF=expandable_segments:True"), ("expandable_segments:True", "Other programs may use")],
)
def test_a_device_without_memory_comes_with_what_helps(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, setting: str, advice: str
) -> None:
    def no_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    layers = mlp(depth=2, num_samples=6)
    with pytest.raises(TrainingError, match=f"OutOfMemoryError: CUDA out of memory(.|\n)*No weights(.|\n)*{advice}"):
        runner(breaking(layers, 0, no_memory)).step(layers.example_batch)
