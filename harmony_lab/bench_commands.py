"""The benchmarks as commands, each of which prints what it measures."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from harmony_lab.arguments import positive
from harmony_lab.errors import HarmonyError
from harmony_lab.units import format_bytes, format_change

__all__ = ["CHECK_FAILED", "add_benches"]

CHECK_FAILED = 1  # exit status


def add_benches(commands: Any) -> None:
    """The command ``bench``, with one of its own for each benchmark."""
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
            format_change(reference_s / row["makespan_s"] - 1),
            format_change(reference_s / row["lower_bound_s"] - 1),
            format_change(reference_s / row["makespan_all_switches_s"] - 1),
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
        from harmony_lab.bench.notebook_with_run import saved_bytes_with_run, trained_lab

        lab = gpt2_xl_lab(options.layers)
    except ImportError as error:
        raise HarmonyError(f"{error.name} is missing: pip install 'harmony_lab[test]'") from None
    with lab, bar(console, "notebook") as move:
        found = bench_notebook(lab, progress=move)
    narrow, batches = trained_lab(options.layers)
    with narrow:
        found["saved_bytes_with_run"] = saved_bytes_with_run(narrow, batches)
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
    return 0 if not found["chaos_failures"] else CHECK_FAILED


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
    for time, prefix in (("real", ""), ("virtual", "virtual_")):
        of_steps, of_streams = (
            f"median {found[f'{prefix}median_{what}']:.1%}, worst {found[f'{prefix}worst_{what}']:.1%}"
            for what in ("error", "stream_error")
        )
        console.print(f"errors in {time} time: {of_steps}; of streams: {of_streams}")
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
