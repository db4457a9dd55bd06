"""``python -m fused_act bench``: times every operator of the table against a copy of the same bytes, eager PyTorch and
torch.compile.

    python -m fused_act bench --output h100.json                            # all but torch.compile
    python -m fused_act bench --only overhead --device cpu
    python -m fused_act bench report h100.json --markdown h100.md --plots h100
    python -m fused_act bench compare old.json new.json                     # exits 1 where a ratio became worse

benchmarks/README.md in the sources says how each figure is measured. With the extras, ``fused_act[bench]``, there are a
progress bar, tables that are aligned, and plots.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import time
from pathlib import Path

import torch

from .._table import ops
from ..demo import DTYPES, pick_device
from . import report, results
from .measure import LAYOUTS, SECTIONS, Run, describe, shape_of

SIZES = {"cuda": ["main", 2**14, 2**18, 2**22, 2**26], "cpu": ["main", 2**12, 2**16, 2**20]}
SAVE_SECONDS = 20  # between two times that what is measured is written, so that a run that is stopped leaves something
MAIN_SHAPES = {"cuda": (128, 64, 126, 126), "cpu": (8, 64, 126, 126)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options and commands of ``python -m fused_act bench``."""
    names = [operator.name for operator in ops()]
    activations = [operator.name for operator in ops() if operator.is_activation]
    parser.set_defaults(run=run)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    default = [section for section in SECTIONS if section != "start"]
    help = "default: all but start, which takes five processes for each figure, of 0.7 s on a GPU"
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=default, help=help)
    parser.add_argument("--operators", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.add_argument(
        "--activations",
        nargs="+",
        choices=activations,
        default=["relu", "silu", "gelu"],
        metavar="NAME",
        help="for operators that take one by name; default relu silu gelu",
    )
    help = "default float32 bfloat16 float16"
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16", "float16"], help=help)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: both")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=size,
        metavar="ELEMENTS",
        help="numbers of elements from 2^10 to 2^30, or main for that of --shape; the first one is that of tables, of"
        " plots and of torch.compile; default main 2^14 2^18 2^22 2^26, on a CPU main 2^12 2^16 2^20",
    )
    help = "that main means; default 128 64 126 126, on a CPU 8 64 126 126"
    parser.add_argument("--shape", nargs=4, type=positive, metavar=("N", "C", "H", "W"), help=help)
    parser.add_argument("--compile", action="store_true", help="time torch.compile too (not in backward)")
    parser.add_argument("--repeats", type=positive, help="of each bandwidth figure; default 100, on a CPU 15")
    parser.add_argument("--calls", type=positive, default=300, help="per batch in the overhead section; default 300")
    parser.add_argument("--batches", type=positive, default=15, help="in the overhead section; default 15")
    help = "skip rows that would need more than this; default: what is free"
    parser.add_argument("--memory", type=float, metavar="GIB", help=help)
    add_outputs(parser)

    commands = parser.add_subparsers(metavar="COMMAND", title="commands, instead of a run")
    command = commands.add_parser("report", help="tables and plots of earlier runs on one card, as if they were one")
    command.set_defaults(run=run_report)
    command.add_argument("files", nargs="+", type=Path, metavar="JSON", help="a later row replaces an earlier one")
    add_outputs(command)
    command = commands.add_parser("compare", help="exit 1 where a ratio of the second run is worse than in the first")
    command.set_defaults(run=run_compare)
    command.add_argument("old", type=Path, metavar="OLD.json")
    command.add_argument("new", type=Path, metavar="NEW.json")
    help = "what counts as worse, if it is outside the spread of both runs too; default 0.05"
    command.add_argument("--tolerance", type=float, default=0.05, help=help)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="JSON", help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw into this folder")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def size(text: str) -> int | str:
    """``main``, ``2^20`` or ``1048576``."""
    if text == "main":
        return text
    base, _, exponent = text.partition("^")
    try:
        elements = int(base) ** int(exponent or 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither main nor a number of elements") from None
    if not 2**10 <= elements <= 2**30 or elements % 2**10:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 1024 from 2^10 to 2^30")
    return elements


def problem(args: argparse.Namespace) -> str | None:
    """What would make the outputs fail, found before anything is measured."""
    for option, path in (("--output", args.output), ("--markdown", args.markdown)):
        if path and not path.parent.is_dir():
            return f"{option}: no folder {path.parent}"
    if args.plots:
        if not importlib.util.find_spec("matplotlib"):
            return "--plots needs matplotlib, which is not installed: pip install 'fused_act[bench]'"
        try:
            args.plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"--plots: {error}"
    return None


def run(args: argparse.Namespace) -> int:
    """Measures. Returns 0, or 2 if it could not run."""
    main_shape = tuple(args.shape or MAIN_SHAPES[args.device])
    sizes = args.sizes or SIZES[args.device]
    args.shapes = list(dict.fromkeys(main_shape if size == "main" else shape_of(size) for size in sizes))
    args.repeats = args.repeats or (100 if args.device == "cuda" else 15)
    for name in ("dtypes", "layouts", "only"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    try:
        device, _ = pick_device(args.device)
    except RuntimeError as error:
        return fail(f"{error}; --device cpu times the CPU")
    if reason := problem(args):
        return fail(reason)

    torch.manual_seed(0)
    document = {"format": results.FORMAT, "about": describe(args, device)}
    print(results.describe(document["about"]), flush=True)
    # What has been imported so far is not garbage: kept out of the collections before figures, which then take no time.
    gc.collect()
    gc.freeze()
    try:
        begin = time.perf_counter()
        measured = Run(args, device)
        document |= {"rows": measured.rows, "skipped": measured.skipped}
        saved = begin

        def save() -> None:
            nonlocal saved
            if args.output:
                results.save(document, args.output)
            saved = time.perf_counter()

        with report.Progress(sum(map(measured.steps, args.only))) as progress:

            def advance(what: str) -> None:
                progress.advance(what)
                if time.perf_counter() - saved > SAVE_SECONDS:
                    save()

            for section in args.only:
                measured.measure(section, advance)
                save()
    finally:
        gc.unfreeze()
    print(f"{len(measured.rows)} rows in {time.perf_counter() - begin:.0f} s, {len(measured.skipped)} skipped")
    write(document, args)
    return 0


def run_report(args: argparse.Namespace) -> int:
    if reason := problem(args):
        return fail(reason)
    try:
        document = results.join(args.files)
    except results.Refused as error:
        return fail(str(error))
    if args.output:
        results.save(document, args.output)
    write(document, args)
    return 0


def run_compare(args: argparse.Namespace) -> int:
    try:
        return results.compare(args.old, args.new, args.tolerance)
    except results.Refused as error:
        return fail(str(error))


def write(document: dict, args: argparse.Namespace) -> None:
    """Prints the tables and writes what was asked for; the figures are written already."""
    report.print_tables(document)
    written = [args.output] if args.output else []
    if args.markdown:
        report.write_markdown(document, args.markdown)
        written.append(args.markdown)
    if args.plots:
        written += report.write_plots(document, args.plots)
    for path in written:
        print(f"written: {path}")


def fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2
