"""The command line: ``harmony-lab demo``, ``plan``, ``machine`` and ``bench``."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
from harmony_lab.errors import HarmonyError
from harmony_lab.lab_arguments import require_folder
from harmony_lab.plan import Mode
from harmony_lab.units import format_bytes

__all__ = ["main"]

_CHECK_FAILED = 1
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

    demo = commands.add_parser(
        "demo", help="train a GPT-2 that outgrows two emulated devices, check it against PyTorch"
    )
    demo.add_argument("--steps", type=positive, default=30, help="training steps (default 30)")
    _add_machine(demo, memory_default="together half of the training state")
    add_precision(demo)
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
    plan.add_argument("--machine", metavar="PRESET", help="GPUs such as 4x3090, or so many of them: --devices")
    _add_machine(plan, memory_default="64MiB")
    plan.add_argument(
        "--explain", action="store_true", help="also what is not possible, the machine's limits, what each switch buys"
    )
    plan.add_argument("--clipped", action="store_true", help="for training that clips by the norm of all gradients")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write candidates, bound and explanation as JSON")
    plan.add_argument("--save-plan", type=Path, metavar="FILE", help="write the best plan, for Plan.load")
    plan.set_defaults(command=_plan)

    machine = commands.add_parser(
        "machine", help="the GPUs here, those of a preset or emulated ones; measure their links"
    )
    add_machine(machine)
    machine.add_argument("--json", type=Path, metavar="FILE", help="write the machine, for Machine.from_json")
    machine.set_defaults(command=_machine)

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
    runtime = benches.add_parser("runtime", help="step times against plain PyTorch, two devices, overlap, chaos")
    runtime.add_argument("--chaos-plans", type=positive, default=2000, metavar="N", help="random plans (default 2000)")
    runtime.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    runtime.set_defaults(command=_bench_runtime)
    prediction = benches.add_parser("prediction", help="predicted against measured steps on emulated devices")
    prediction.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    prediction.set_defaults(command=_bench_prediction)
    compiled = benches.add_parser("compile", help="steps with compiled layers against steps with layers as they are")
    compiled.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    compiled.set_defaults(command=_bench_compiled)
    return parser


def _add_machine(parser: argparse.ArgumentParser, memory_default: str) -> None:
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
    return 0 if run_demo(settings, console) else _CHECK_FAILED


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

    from harmony_lab.bench.baseline_steps import bench_baseline_steps
    from harmony_lab.bench.baselines import bench_baselines, to_json
    from harmony_lab.terminal import bar
    from harmony_lab.units import format_seconds

    with bar(console, "baselines") as move:
        rows = bench_baselines(options.profiles, progress=move)
    with bar(console, "measured steps") as move:
        measured = bench_baseline_steps(progress=move)
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
    table = Table("measured on emulated devices", "iteration", "predicted", "times", "swapped", "times")
    for row in measured:
        if row["fits"]:
            seconds = [format_seconds(row[key]) for key in ("measured_s", "predicted_s")]
            ratios = [f"{row[key]:.2f}" for key in ("speedup", "swap_ratio")]
            table.add_row(row["name"], *seconds, ratios[0], format_bytes(row["swap_bytes"]), ratios[1])
        else:
            table.add_row(row["name"], "does not fit")
    console.print(table)
    if options.json:
        to_json(rows, measured, options.json)
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
        console.print(f"{name}: {'none' if value is None else format(value, '.4g')}")
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
        console.print(f"{name}: {value if isinstance(value, dict) else format(value, ',')}")
    if options.json:
        to_json(found, options.json)
    return 0


def _bench_runtime(options: argparse.Namespace, console: Console) -> int:
    from harmony_lab.bench.runtime import bench_runtime, to_json
    from harmony_lab.terminal import bar

    with bar(console, "runtime") as move:
        found = bench_runtime(chaos_plans=options.chaos_plans, progress=move)
    for name, value in found.items():
        console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}", soft_wrap=True)
    if options.json:
        to_json(found, options.json)
    return 0 if not found["chaos_failures"] else _CHECK_FAILED


def _bench_prediction(options: argparse.Namespace, console: Console) -> int:
    from rich.table import Table

    from harmony_lab.bench.prediction import bench_prediction, to_json
    from harmony_lab.terminal import bar
    from harmony_lab.units import format_rate, format_seconds

    with bar(console, "prediction") as move:
        found = bench_prediction(progress=move)
    table = Table("model", "mode", "link", "predicted", "measured", "error", "swapped")
    for row in found["rows"]:
        seconds = (format_seconds(row["predicted_s"]), format_seconds(row["measured_s"]))
        link, swapped = format_rate(row["link_bytes_per_s"]), format_bytes(row["swap_bytes_measured"])
        table.add_row(row["model"], row["plan"][:2], link, *seconds, f"{row['error']:.1%}", swapped)
    console.print(table)
    console.print(f"median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}")
    console.print(f"streams: {found['median_stream_error']:.1%}, {found['worst_stream_error']:.1%}")
    if options.json:
        to_json(found, options.json)
    return 0


def _bench_compiled(options: argparse.Namespace, console: Console) -> int:
    from rich.table import Table

    from harmony_lab.bench.compiled import bench_compiled, to_json
    from harmony_lab.terminal import bar
    from harmony_lab.units import format_seconds

    with bar(console, "compiled layers") as move:
        found = bench_compiled(progress=move)
    table = Table("model", "step, compiled / plain", "computing", "saved activations", "profiling and compiling")
    for row in found["rows"]:
        ratios = [f"{row[name]:.2f}" for name in ("ratio", "compute_ratio", "saved_ratio")]
        table.add_row(row["model"], *ratios, format_seconds(row["profile_s"]))
    console.print(table)
    console.print(f"median {found['median_ratio']:.2f}")
    if options.json:
        to_json(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
