"""The command line: ``harmony-lab demo``, ``harmony-lab plan`` and ``harmony-lab bench``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from harmony_lab import __version__
from harmony_lab.arguments import add_emulated, add_mode, emulated, positive
from harmony_lab.errors import HarmonyError
from harmony_lab.plan import Mode

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
    demo.add_argument("--steps", type=positive, default=30, help="training steps (default 30)")
    _add_machine(demo, memory_default="together half of the training state")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    demo.add_argument(
        "--report", type=Path, metavar="FILE", default=Path("harmony-lab-report.html"), help="HTML report"
    )
    demo.set_defaults(command=_demo)

    plan = commands.add_parser("plan", help="rank the plans for a profile in a file on a machine described here")
    plan.add_argument(
        "profile", type=Path, metavar="PROFILE.json", help="what Profile.save wrote, or published per-layer tables"
    )
    plan.add_argument("--minibatch", type=positive, default=32, help="samples per step (default 32)")
    plan.add_argument("--machine", metavar="PRESET", help="GPUs such as 4x3090, instead of --devices, --memory, --link")
    _add_machine(plan, memory_default="64MiB")
    plan.set_defaults(command=_plan)

    bench = commands.add_parser("bench", help="benchmarks, which print what they measure")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    models = benches.add_parser("models", help="decompose and profile a zoo of models, compare with PyTorch")
    models.add_argument("names", nargs="*", metavar="MODEL", help="models of the zoo (default all)")
    models.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    models.set_defaults(command=_bench_models)
    without = benches.add_parser(
        "baselines", help="what published models would take without a plan, against the best one"
    )
    without.add_argument("--profiles", type=Path, metavar="DIR", required=True, help="folder of profiles")
    without.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    without.set_defaults(command=_bench_baselines)
    planner = benches.add_parser("planner", help="the search against the published scheduler, on its profiles")
    planner.add_argument("--profiles", type=Path, metavar="DIR", required=True, help="folder of profiles and plans")
    planner.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    planner.set_defaults(command=_bench_planner)
    notebook = benches.add_parser("notebook", help="bytes and milliseconds of the dashboard, for a GPT-2 XL")
    notebook.add_argument("--layers", type=positive, default=48, help="of the GPT-2 (default 48)")
    notebook.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    notebook.set_defaults(command=_bench_notebook)
    return parser


def _add_machine(parser: argparse.ArgumentParser, memory_default: str) -> None:
    add_emulated(parser, memory_default)
    add_mode(parser)


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
    from harmony_lab.machine import Machine
    from harmony_lab.planner.published import load_profile
    from harmony_lab.planner.search import search
    from harmony_lab.terminal import bar, ranking_table

    profile = load_profile(options.profile)
    machine = Machine.preset(options.machine) if options.machine else emulated(options)
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


def _bench_baselines(options: argparse.Namespace, console: Console) -> int:
    from rich.table import Table

    from harmony_lab.bench.baselines import bench_baselines, to_json
    from harmony_lab.terminal import bar
    from harmony_lab.units import format_bytes, format_seconds

    with bar(console, "baselines") as move:
        rows = bench_baselines(options.profiles, progress=move)
    table = Table("model", "GPUs", "baseline", "iteration", "best plan", "times", "swapped", "best plan", "times")
    for row in rows:
        cells = [row["model"], str(row["num_devices"]), row["baseline"]]
        for name, show in (("step_s", format_seconds), ("swap_bytes", format_bytes)):
            ratio = row["speedup" if name == "step_s" else "swap_ratio"]
            found = [show(row[key]) if row[key] is not None else "" for key in (name, f"ours_{name}")]
            cells += [found[0] or "does not fit", found[1], f"{ratio:.2f}" if ratio is not None else ""]
        table.add_row(*cells)
    console.print(table)
    for row in rows:
        if not row["fits"]:
            where = f"{row['model']} on {row['num_devices']}, {row['baseline']}"
            console.print(f"{where}: {row['reason']}", soft_wrap=True)
    if options.json:
        to_json(rows, options.json)
    return 0


def _bench_planner(options: argparse.Namespace, console: Console) -> int:
    from rich.table import Table

    from harmony_lab.bench.planner import bench_planner, summary, to_json
    from harmony_lab.terminal import bar
    from harmony_lab.units import format_seconds

    with bar(console, "settings") as move:
        rows = bench_planner(options.profiles, progress=move)
    table = Table("model", "mode", "batch", "GPUs", "search", "faster", "iteration", "gain", "possible", "all switches")
    for row in rows:
        reference_s = row["reference_plan_makespan_s"]
        table.add_row(
            *(row["model"], row["mode"], str(row["minibatch_size"]), str(row["num_devices"])),
            format_seconds(row["search_s"]),
            f"{row['reference_search_s'] / row['search_s']:.0f} ×",
            format_seconds(row["makespan_s"]),
            f"{reference_s / row['makespan_s'] - 1:+.1%}",
            f"{reference_s / row['lower_bound_s'] - 1:+.1%}",
            f"{reference_s / row['makespan_all_switches_s'] - 1:+.1%}",
        )
    console.print(table)
    for name, value in summary(rows).items():
        console.print(f"{name}: {value:.4g}")
    if options.json:
        to_json(rows, options.json)
    return 0


def _bench_notebook(options: argparse.Namespace, console: Console) -> int:
    from harmony_lab.terminal import bar

    try:
        from harmony_lab.bench.notebook import bench_notebook, gpt2_xl_lab, to_json

        lab = gpt2_xl_lab(options.layers)
    except ImportError as error:
        raise HarmonyError(f"{error.name} is missing: pip install 'harmony_lab[test]'") from None
    with bar(console, "notebook") as move:
        found = bench_notebook(lab, progress=move)
    for name, value in found.items():
        console.print(f"{name}: {value:,}")
    if options.json:
        to_json(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
