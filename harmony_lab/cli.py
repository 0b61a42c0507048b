"""The command line: ``harmony-lab demo``, ``harmony-lab plan`` and ``harmony-lab bench``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from harmony_lab import __version__
from harmony_lab.errors import HarmonyError
from harmony_lab.plan import Mode
from harmony_lab.units import parse_bytes, parse_rate

__all__ = ["main"]

_CHECK_FAILED = 1
_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  Exit status: 0, 1 where a check of the demo failed, 2 where the command could not run."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        command: Callable[[argparse.Namespace, Console], int] = options.command
        return command(options, console)
    except OSError as error:
        print(f"harmony-lab: {error.filename}: {error.strerror}", file=sys.stderr)
        return _USER_ERROR
    except HarmonyError as error:
        print(f"harmony-lab: {error}", file=sys.stderr)
        return _USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harmony-lab", description="Plan and run the training of models that are larger than the GPUs at hand."
    )
    parser.add_argument("--version", action="version", version=f"harmony-lab {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="train a GPT-2 that outgrows two emulated devices, check it against PyTorch"
    )
    demo.add_argument("--steps", type=_positive, default=30, help="training steps (default 30)")
    _add_machine(demo, memory_default="together half of the training state")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    demo.add_argument(
        "--report", type=Path, metavar="FILE", default=Path("harmony-lab-report.html"), help="HTML report"
    )
    demo.set_defaults(command=_demo)

    plan = commands.add_parser("plan", help="rank the plans for a saved profile on a machine described here")
    plan.add_argument("profile", type=Path, metavar="PROFILE.json", help="what Profile.save wrote")
    plan.add_argument("--minibatch", type=_positive, default=32, help="samples per step (default 32)")
    plan.add_argument("--machine", metavar="PRESET", help="GPUs such as 4x3090, instead of --devices, --memory, --link")
    _add_machine(plan, memory_default="64MiB")
    plan.set_defaults(command=_plan)

    bench = commands.add_parser("bench", help="benchmarks, which print what they measure")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    models = benches.add_parser("models", help="decompose and profile a zoo of models, compare with PyTorch")
    models.add_argument("names", nargs="*", metavar="MODEL", help="models of the zoo (default all)")
    models.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    models.set_defaults(command=_bench_models)
    return parser


def _add_machine(parser: argparse.ArgumentParser, memory_default: str) -> None:
    parser.add_argument("--devices", type=_positive, default=2, help="number of emulated devices (default 2)")
    parser.add_argument(
        "--memory", type=_bytes, metavar="SIZE", help=f"per device, as 64MiB (default {memory_default})"
    )
    parser.add_argument("--link", type=_rate, metavar="RATE", default=2e9, help="shared host link, as 2GB/s (default)")
    parser.add_argument("--mode", type=Mode, choices=tuple(Mode), help="only plans of this mode (default both)")


def _demo(options: argparse.Namespace, console: Console) -> int:
    from harmony_lab.demo import DemoSettings, run_demo

    settings = DemoSettings(
        steps=options.steps,
        num_devices=options.devices,
        memory_bytes=options.memory,
        link_bytes_per_s=options.link,
        mode=options.mode,
        json_path=options.json,
        report_path=options.report,
    )
    return 0 if run_demo(settings, console) else _CHECK_FAILED


def _plan(options: argparse.Namespace, console: Console) -> int:
    from harmony_lab.costs import Profile
    from harmony_lab.machine import Machine
    from harmony_lab.planner.search import search
    from harmony_lab.terminal import bar, ranking_table

    try:
        profile = Profile.load(options.profile)
    except ValueError as error:
        raise HarmonyError(f"{options.profile} is not a profile that Profile.save wrote: {error}") from None
    if options.machine:
        machine = Machine.preset(options.machine)
    else:
        machine = Machine.emulated(options.devices, memory=options.memory or "64MiB", link=options.link)
    console.print(f"{profile}\n{machine}", soft_wrap=True)
    with bar(console, "search") as move:
        modes = (options.mode,) if options.mode else tuple(Mode)
        result = search(profile, machine, options.minibatch, modes=modes, progress=move)
    console.print(ranking_table(result))
    console.print(f"{result.explain()}\nBest plan: {result.best}", soft_wrap=True)
    return 0


def _bench_models(options: argparse.Namespace, console: Console) -> int:
    from rich.table import Table

    from harmony_lab.terminal import bar
    from harmony_lab.units import format_seconds

    try:
        from harmony_lab.bench.models import bench_models, to_json
    except ImportError as error:
        raise HarmonyError(f"{error.name} is missing: pip install 'harmony_lab[test]'") from None
    with bar(console, "models") as move:
        rows = bench_models(options.names or None, progress=move)
    table = Table("model", "layers", "kinds", "decompose", "profile", "gradients off by", "peak predicted / measured")
    for row in rows:
        if row["supported"]:
            ratio = row["peak_predicted_bytes"] / row["peak_measured_bytes"]
            seconds = (format_seconds(row["decompose_s"]), format_seconds(row["profile_s"]))
            counts = (str(row["num_layers"]), str(row["num_types"]))
            table.add_row(row["model"], *counts, *seconds, f"{row['max_grad_diff']:.1e}", f"{ratio:.4f}")
    console.print(table)
    for row in rows:
        if not row["supported"]:
            console.print(f"{row['model']} is refused: {row['reason']}", soft_wrap=True)
    if options.json:
        to_json(rows, options.json)
    return 0


# -- argument types -----------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 was expected, got {text!r}")
    return number


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rate(text: str) -> float:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
