"""The %harmony magic and how objects are shown, in an IPython shell without a front end."""

import gc
import re
import subprocess
import sys
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import harmony_lab as hl
from harmony_lab.planner.baselines import BASELINES
from harmony_lab.run import Run

PLAN = "pp minibatch=8 forward=8[] backward=8[0:5] devices=0"


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell()
    made.run_line_magic("load_ext", "harmony_lab")
    yield made
    made.run_line_magic("unload_ext", "harmony_lab")


def harmony(shell: InteractiveShell, line: str) -> Any:
    return shell.run_line_magic("harmony", line)


def completions(shell: InteractiveShell, text: str) -> set[str]:
    with provisionalcompleter():
        return {completion.text for completion in shell.Completer.completions(text, len(text))}


def test_loading_the_extension_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "InteractiveShell().run_line_magic('load_ext', 'harmony_lab')\n"
        "print([name for name in ('torch', 'plotly', 'ipywidgets', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_machine_is_returned(shell):
    found, expected = harmony(shell, "machine"), hl.Machine.detect()
    assert replace(found, host=expected.host) == expected  # what the host has available changes from moment to moment


def test_the_lab_there_is_needs_no_name(shell, lab, batches):
    shell.user_ns.update(lab=lab, batches=batches)
    assert harmony(shell, "lab") is lab
    assert harmony(shell, "profile") is lab.profile is not None
    assert harmony(shell, "plan") is lab.result is not None
    run = harmony(shell, "launch batches --steps 100000")
    assert isinstance(run, Run)
    assert harmony(shell, "stop") is run
    assert run.status == "stopped"


def test_report_writes_the_file_and_returns_its_path(shell, lab, tmp_path):
    shell.user_ns["lab"] = lab.prepare()
    path = harmony(shell, f"report '{tmp_path / 'a report.html'}'")
    assert path == tmp_path / "a report.html"
    assert "<svg" in path.read_text(encoding="utf-8")


def test_lab_and_profile_of_named_things(shell, lab, batches):
    model, loss = lab.layers.model, lambda output, target: (output - target).square().mean()
    shell.user_ns.update(net=model, first=batches[0], mse=loss, box=lab.machine, adam=lab.optimizer)
    measured = harmony(shell, "profile net first --loss mse --machine box")
    assert len(measured) == len(lab.layers)
    made = harmony(shell, "lab net first adam --minibatch 8 --loss mse --machine box")
    assert isinstance(made, hl.Lab)
    assert made.machine is lab.machine
    assert harmony(shell, "lab") is made  # though it has no name
    made.close()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "say what to do: machine, profile"),
        ("fly", "invalid choice: 'fly'"),
        ("plan", "there is no open Lab"),
        ("launch nowhere", "there is no 'nowhere' in this notebook"),
        (
            "profile net first[0]",
            r"'first\[0\]' is no name, and only names are taken: batch = first\[0\] in a cell first",
        ),
        ("profile net", "give MODEL and BATCH"),
        ("stop --steps 3", "unrecognized arguments"),
        ("launch loader --steps many", "a whole number of at least 1 was expected, got 'many'"),
        ("trace", "a cell of its own starts with %%harmony trace"),
        ("report 'x", "close the quotation"),
        ("machine 4x9999", "there is no preset for a GPU called '9999'"),
        ("lab net first --minibatch 8 --machine nowhere", "'nowhere' is no machine: there is none in this notebook"),
        ("lab net first --minibatch 8 --machine net", "'net' is no machine: here it is a Linear"),
        ("lab net first net --minibatch 8 --machine h100", "optimizer is a Linear, expected one of torch.optim"),
        ("lab net first --minibatch 8 --loss first", "'first' is a tuple; --loss is a function"),
        ("profile first first", "'first' is a tuple; MODEL is a torch.nn.Module"),
        ("plan --lab net", "'net' is a Linear; --lab is a Lab"),
        ("launch loader --max-grad-norm -1", "a number above 0 was expected, got '-1'"),
        ("lab net first --minibatch 8 --link 5", "write '5GB/s'"),
        ("lab net first --minibatch 8 --precision fp16", "precision must be fp32 or bf16, got 'fp16': fp16 needs"),
        ("plan --mode ddp", "dp or pp was expected, got 'ddp'"),
        ("lab net first --minibatch 8 --machine ''", "'' is no machine"),
        (";", "say what to do: machine, profile"),
    ],
)
def test_mistakes_are_one_line_with_the_cure(shell, batches, line, message):
    shell.user_ns.update(net=torch.nn.Linear(2, 2), first=batches[0])
    with pytest.raises(UsageError, match=message) as caught:
        harmony(shell, line)
    assert len(str(caught.value).splitlines()) == 1


def test_our_errors_reach_the_cell_without_a_traceback(shell, lab, batches, capsys):
    lab.optimizer = None
    shell.user_ns.update(lab=lab, batches=batches)
    result = shell.run_cell("%harmony launch batches")
    assert isinstance(result.error_in_exec, UsageError)
    printed = capsys.readouterr()
    assert "this Lab has no optimizer" in printed.err
    assert "Traceback" not in printed.out + printed.err


def test_several_labs_must_be_told_apart(shell, lab, batches):
    other = hl.Lab(
        lab.layers.model[:2], batches[0], loss_fn=lambda out, target: (out - target).abs().mean(), minibatch_size=8
    )
    shell.user_ns.update(first=lab, again=lab, second=other)
    with pytest.raises(UsageError, match=r"several Labs are open \(first, second\)"):
        harmony(shell, "lab")
    assert harmony(shell, "lab --lab second") is other
    other.close()


def test_commands_names_and_options_are_completed(shell):
    shell.user_ns["train_loader"] = []
    assert "report" in completions(shell, "%harmony rep")
    assert "trace" in completions(shell, "%%harmony tr")
    assert "train_loader" in completions(shell, "%harmony launch train_l")
    assert {"train_loader", "--steps"} <= completions(shell, "%harmony launch ")
    assert completions(shell, "%harmony launch --st") & {"--steps", "steps"}


def test_machines_and_what_options_take_are_completed(shell):
    shell.user_ns["four_cards"] = hl.Machine.preset("4x4090")
    assert {"4x4090", "4x3090"} <= completions(shell, "%harmony lab net first --machine 4x")
    assert completions(shell, "%harmony machine 2x40") == {"2x4070", "2x4080", "2x4090"}
    assert {"4090", "four_cards"} <= completions(shell, "%harmony profile net first --machine ")
    assert {"fp32", "bf16"} <= completions(shell, "%harmony lab net first --precision ")


def test_a_machine_is_described_by_preset_or_options(shell):
    assert harmony(shell, "machine 4x4090, pcie4 x8 behind 2 switches").num_devices == 4
    described = harmony(shell, "machine --devices 3 --memory 8MiB")
    assert described == hl.Machine.emulated(3, memory="8MiB")
    measured = harmony(shell, "machine --measure --devices 1 --memory 1MiB")
    assert measured.rate(-1, 0) > 0
    assert measured.machine.budgets == (2**20,)
    assert len(repr(measured).splitlines()) == 1 + len(measured.rates)
    assert "host → emu0" in repr(measured)


def test_a_lab_for_a_preset_machine(shell, lab, batches):
    shell.user_ns.update(net=lab.layers.model, first=batches[0], mse=torch.nn.functional.mse_loss)
    made = harmony(shell, "lab net first --minibatch 8 --loss mse --machine 2x4090")
    assert made.machine == hl.Machine.preset("2x4090")
    made.close()


CHAINED = """
%harmony lab net first adam --minibatch 8 --loss mse --devices 2 --memory 100KiB;
%harmony launch batches --steps 1 --max-grad-norm 0.5;
%harmony stop
"""


def test_a_lab_is_known_at_once_and_a_semicolon_is_no_word(shell, lab, batches):
    mse = torch.nn.functional.mse_loss
    shell.user_ns.update(net=lab.layers.model, first=batches[0], adam=lab.optimizer, mse=mse, batches=batches)
    lab.close()
    result = shell.run_cell(CHAINED)
    assert result.success
    assert isinstance(result.result, Run)
    gc.collect()
    made = harmony(shell, "lab;")  # still there, though nobody has named or shown it
    assert made.machine.budgets == (100 * 2**10,) * 2
    assert made.run is result.result
    assert "update=next" in str(made.plan)  # clipped, as asked for
    shell.run_cell("%harmony lab net first adam --minibatch 8 --loss mse")
    assert made.closed


def test_a_lab_that_got_a_name_is_kept_by_that_name_alone(shell, lab, batches):
    shell.user_ns.update(net=lab.layers.model, first=batches[0], mse=torch.nn.functional.mse_loss)
    shell.run_cell("mine = %harmony lab net first --minibatch 8 --loss mse")
    made = weakref.ref(shell.user_ns["mine"])
    shell.run_cell("mine = None")
    gc.collect()
    assert made() is None


def test_the_usage_is_shown_and_a_profile_says_with_what_optimizer(shell, lab, batches):
    for asked in ("help", "?", "--help", "lab --help", "plan ?"):
        assert "%harmony launch LOADER" in repr(harmony(shell, asked))
    mse = torch.nn.functional.mse_loss
    shell.user_ns.update(net=lab.layers.model, first=batches[0], adam=lab.optimizer, mse=mse, box=lab.machine)
    given = "--loss mse --machine box --memory 1MiB --devices 1"
    assert "without an optimizer" in repr(harmony(shell, f"profile net first {given}"))
    measured = harmony(shell, f"profile net first adam {given}")
    assert "gradients and optimizer state" in repr(measured)
    assert measured.optimizer_state_bytes


def test_plans_are_compared_by_rank_name_and_text(shell, lab):
    shell.user_ns["lab"] = lab.prepare()
    shell.user_ns["mine"] = lab.result.best.with_(prefetch=0)
    table = harmony(shell, "compare")
    assert len(lab.result.candidates) > 10
    assert list(table["name"]) == [*(f"candidate {rank}" for rank in range(10)), *BASELINES]
    assert table["times_the_best"].min() == 1.0
    assert table[table["step_s"].isna()]["note"].str.len().gt(10).all()  # why a baseline is not possible
    assert "zero-infinity order" in repr(harmony(shell, "compare 0 'zero-infinity order'"))
    ranks = harmony(shell, "compare 0 1")
    assert ranks.b.trace.makespan_s == lab.preview(lab.result.candidates[1].plan).trace.makespan_s
    named = harmony(shell, f"compare mine '{lab.result.best}'")
    assert named.a.plan == str(lab.result.best.with_(prefetch=0))
    assert named.b.plan == str(lab.result.best)
    assert repr(named).splitlines()[0].split() == ["A:", "mine", "B:", "the", "plan", "given", "B", "against", "A"]
    assert named.to_frame().index[0] == "step"
    assert named._repr_html_().count("<img") == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare 0 batches", "'batches' is a list; give a rank, a Plan"),
        ("compare 0 paged", "'paged' is no name in this notebook; give a rank, a Plan, its text, chosen, or one"),
        ("compare 0 'dp minibatch=8'", "this is not a plan: 'dp minibatch=8': forward= is missing; backward="),
        ("compare 0 99999", "there is no rank 99999"),
        ("report /nowhere/x.html", "report /nowhere/x.html: there is no folder /nowhere"),
    ],
)
def test_mistakes_with_a_lab_are_one_line_too(shell, lab, batches, line, message):
    lab.choose(PLAN)
    if line.startswith("compare"):
        lab.prepare()
    shell.user_ns.update(lab=lab, batches=batches)
    with pytest.raises(UsageError, match=message) as caught:
        harmony(shell, line)
    assert len(str(caught.value).splitlines()) == 1


def test_free_closes_labs_and_trainers_and_says_so(shell, lab, batches):
    other = torch.nn.Sequential(torch.nn.Linear(64, 64))
    layers = hl.decompose(other, batches[0], torch.nn.functional.mse_loss)
    machine = hl.Machine.emulated(1, memory="1MiB")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    plan = "pp minibatch=8 forward=8[] backward=8[0:1] devices=0"
    trainer = hl.Trainer(layers, optimizer, plan, machine)
    run = lab.launch(batches, 100_000)
    shell.user_ns.update(lab=lab, kept=[trainer])
    freed = harmony(shell, "free")
    assert repr(freed) == "closed 1 Lab and 1 Trainer"
    assert repr(harmony(shell, "free")) == "closed 0 Labs and 0 Trainers"
    assert lab.closed
    assert not run.active
    with pytest.raises(hl.HarmonyError):
        trainer.step(batches[0])


CELL = """
with hl.Trainer(layers, adam, plan, machine, profile=measured) as trainer:
    for batch in batches:
        trainer.step(batch)
"""


def test_a_traced_cell_gives_the_last_step_it_measured(shell, lab, batches):
    lab.prepare()
    shell.user_ns.update(
        hl=hl, layers=lab.layers, adam=lab.optimizer, plan=lab.plan, machine=lab.machine, measured=lab.profile
    )
    shell.user_ns["batches"] = batches
    trace = shell.run_cell_magic("harmony", "trace", CELL)
    assert trace is shell.user_ns["trainer"].last_trace
    assert trace.origin == "measured"
    shown = shell.display_formatter.format(trace)[0]
    assert shown["text/plain"] == repr(trace)
    assert shown["text/html"].count("<img") == 2


def test_a_traced_launch_is_waited_for(shell, lab, batches):
    shell.user_ns.update(lab=lab, batches=batches)
    trace = shell.run_cell_magic("harmony", "trace", "run = lab.launch(batches, 3)")
    assert len(shell.user_ns["run"].losses) == 3
    assert trace is shell.user_ns["run"].trace


def test_a_traced_cell_without_a_step_says_what_to_do(shell):
    with pytest.raises(UsageError, match="no training step was taken"):
        shell.run_cell_magic("harmony", "trace", "1 + 1")


def test_an_error_in_a_traced_cell_is_the_users_with_its_lines(shell):
    with pytest.raises(ZeroDivisionError) as caught:
        shell.run_cell_magic("harmony", "trace", "count = 0\n1 / count")
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == "1 / count"


def test_a_traced_launch_that_fails_is_told_in_one_line(shell, lab, batches):
    shell.user_ns.update(lab=lab, batches=iter([(batches[0][0], None)]))
    with pytest.raises(UsageError, match="training stopped in step 1 of 3") as caught:
        shell.run_cell_magic("harmony", "trace", "lab.launch(batches, 3)")
    assert len(str(caught.value).splitlines()) == 1


def test_machines_and_previews_are_short_where_there_is_no_page(lab):
    lab.prepare()
    assert repr(lab.machine) == f"<Machine {lab.machine}>"
    assert len(repr(lab.chosen).splitlines()) == 2
    assert str(lab.plan) in repr(lab.chosen)


def test_static_forms_have_their_pictures_as_images_for_viewers_that_take_svg_away(lab, batches):
    lab.prepare()
    run = lab.launch(batches, 2).wait(120)
    for shown, num_pictures in (
        (lab.result.candidates[0], 2),
        (lab.chosen, 2),
        (lab.predicted, 2),
        (run.trace, 2),
        (run, 1),
        (lab, 7),
    ):
        html = shown._repr_html_()
        assert "<svg" not in html
        assert len(re.findall(r'<img src="data:image/svg\+xml;base64,[^"]+" alt="[^"]{20,}"', html)) == num_pictures
    assert str(lab.plan) in lab.plan._repr_html_()


@pytest.mark.parametrize("named", [True, False])
def test_unloading_takes_everything_away_and_closes_labs(lab, batches, named):
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "harmony_lab")
    if named:
        shell.user_ns["lab"] = lab
    else:
        shell.user_ns["Out"][1] = lab  # merely shown
    run = lab.launch(batches, 100_000)
    shell.run_line_magic("unload_ext", "harmony_lab")
    assert lab.closed
    assert not run.active
    assert "harmony" not in shell.magics_manager.magics["line"]
    assert set(shell.display_formatter.format(lab)[0]) == {"text/html", "text/plain"}
