"""The command line: ``harmony-lab demo``, ``plan``, ``machine`` and ``bench``."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harmony_lab import __version__
from harmony_lab.arguments import (
    add_emulated,
    add_machine,
    add_mode,
    add_precision,
    asked_machine,
    emulated,
    positive,
    preset_with,
)
from harmony_lab.bench_commands import CHECK_FAILED, add_benches
from harmony_lab.errors import HarmonyError
from harmony_lab.lab_arguments import require_folder
from harmony_lab.plan import Mode

__all__ = ["main"]

_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  Exit status: 0, 1 where a check of the demo failed, 2 where the command could not run."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        _require_folders(options)
        command: Callable[[argparse.Namespace, Console], int] = options.command
        return command(options, console)
    except OSError as error:
        print(f"harmony-lab: {error.filename}: {error.strerror}", file=sys.stderr)
        return _USER_ERROR
    except HarmonyError as error:
        print(f"harmony-lab: {error}", file=sys.stderr)
        return _USER_ERROR


def _require_folders(options: argparse.Namespace) -> None:
    """Refuse a file that cannot be written before the work that it is to hold."""
    for name in ("json", "report", "save_plan"):
        path: Path | None = getattr(options, name, None)
        if path is not None:
            require_folder(path, f"--{name.replace('_', '-')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harmony-lab", description="Plan and run the training of models that are larger than the GPUs at hand."
    )
    parser.add_argument("--version", action="version", version=f"harmony-lab {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_plan(commands)
    _add_machine(commands)
    add_benches(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo", help="train a GPT-2 that outgrows two emulated devices, check it against PyTorch"
    )
    demo.add_argument("--steps", type=positive, default=30, help="training steps (default 30)")
    _add_planned_for(demo, memory_default="together half of the training state")
    add_precision(demo)
    demo.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    demo.add_argument(
        "--report", type=Path, metavar="FILE", default=Path("harmony-lab-report.html"), help="HTML report"
    )
    demo.set_defaults(command=_demo)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="rank the plans for a profile in a file on a machine described here")
    plan.add_argument(
        "profile", type=Path, metavar="PROFILE.json", help="what Profile.save wrote, or published per-layer tables"
    )
    plan.add_argument("--minibatch", type=positive, default=32, help="samples per step (default 32)")
    plan.add_argument("--machine", metavar="PRESET", help="GPUs such as 4x3090, or so many of them: --devices")
    _add_planned_for(plan, memory_default="64MiB")
    plan.add_argument(
        "--explain", action="store_true", help="also what is not possible, the machine's limits, what each switch buys"
    )
    plan.add_argument("--clipped", action="store_true", help="for training that clips by the norm of all gradients")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write candidates, bound and explanation as JSON")
    plan.add_argument("--save-plan", type=Path, metavar="FILE", help="write the best plan, for Plan.load")
    plan.set_defaults(command=_plan)


def _add_machine(commands: Any) -> None:
    machine = commands.add_parser(
        "machine", help="the GPUs here, those of a preset or emulated ones; measure their links"
    )
    add_machine(machine)
    machine.add_argument("--json", type=Path, metavar="FILE", help="write the machine, for Machine.from_json")
    machine.set_defaults(command=_machine)


def _add_planned_for(parser: argparse.ArgumentParser, memory_default: str) -> None:
    add_emulated(parser, memory_default)
    add_mode(parser)


def _demo(options: argparse.Namespace, console: Console) -> int:
    from harmony_lab.demo import DemoSettings, run_demo

    given = {"num_devices": options.devices, "link_bytes_per_s": options.link}
    settings = DemoSettings(
        steps=options.steps,
        **{name: value for name, value in given.items() if value is not None},
        memory_bytes=options.memory,
        mode=options.mode,
        precision=options.precision,
        json_path=options.json,
        report_path=options.report,
    )
    return 0 if run_demo(settings, console) else CHECK_FAILED


def _plan(options: argparse.Namespace, console: Console) -> int:
    from harmony_lab.compiled import is_ready
    from harmony_lab.planner.explain import ablation
    from harmony_lab.planner.limits import limits
    from harmony_lab.planner.published import load_profile
    from harmony_lab.planner.search import Switches, search
    from harmony_lab.planner.warm import warm_up
    from harmony_lab.terminal import ablation_table, bar, limits_table, ranking_table, rejected_table

    profile = load_profile(options.profile)
    machine = emulated(options) if options.machine is None else preset_with(options.machine, options)
    console.print(f"{profile}\n{machine}; host memory {machine.host_words}")
    if machine.devices[0].model and machine.devices[0].model not in profile.device:
        console.print(f"Layers are taken to be as fast as they were on {profile.device}, where they were measured.")
    if not is_ready():
        console.print("The planner is being compiled; once, a minute or more.")
        warm_up(wait=True)
    with bar(console, "search") as move:
        modes = (options.mode,) if options.mode else tuple(Mode)
        switches = Switches(deferred_updates=options.clipped)
        result = search(profile, machine, options.minibatch, modes=modes, switches=switches, progress=move)
    console.print(ranking_table(result))
    for sentence in result.explain().split("  "):
        console.print(sentence)
    found = result.to_json() if options.json else {}
    if options.explain:
        limited, without = limits(profile, machine, result.best), ablation(result.best, profile, machine)
        console.print(rejected_table(result), limits_table(limited), ablation_table(without))
        found |= {"limits": limited.to_json(), "ablation": without.to_json()}
    console.print(f"Best plan: {result.best}", soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.save_plan:
        result.best.save(options.save_plan)
    return 0


def _machine(options: argparse.Namespace, console: Console) -> int:
    machine = asked_machine(options)
    if options.measure:
        from harmony_lab.profiler.links import probe_links
        from harmony_lab.terminal import links_table

        with console.status("measuring the links"):
            probe = probe_links(machine)
        machine = probe.machine
        console.print(links_table(probe))
        console.print(f"{probe}", soft_wrap=True)
    else:
        console.print(f"{machine}; host memory {machine.host_words}", soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(machine.to_json(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
