"""The %harmony magic and how objects are shown, in an IPython shell without a front end."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import harmony_lab as hl
from harmony_lab.run import Run


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
    assert harmony(shell, "machine") == hl.Machine.detect()


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
        ("profile net", "give MODEL and BATCH"),
        ("stop --steps 3", "unrecognized arguments"),
    ],
)
def test_mistakes_are_one_line_with_the_cure(shell, line, message):
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


def test_commands_and_names_are_completed(shell):
    shell.user_ns["train_loader"] = []
    assert "report" in completions(shell, "%harmony rep")
    assert "train_loader" in completions(shell, "%harmony launch train_l")


def test_unloading_takes_everything_away_and_closes_labs(lab, batches):
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "harmony_lab")
    shell.user_ns["lab"] = lab
    run = lab.launch(batches, 100_000)
    shell.run_line_magic("unload_ext", "harmony_lab")
    assert lab.closed
    assert not run.active
    assert "harmony" not in shell.magics_manager.magics["line"]
    assert set(shell.display_formatter.format(lab)[0]) == {"text/html", "text/plain"}
