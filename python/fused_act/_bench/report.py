"""A run as tables, for the terminal and in Markdown, and as plots."""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .measure import FUSED, SECTIONS, WAYS
from .results import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

YARDSTICKS = {
    "forward": "a copy of the same bytes",
    "backward": "copies of the bytes that it needs",
    "training": "copies of the bytes that it needs",
    "overhead": "F.hardswish, 64 elements, wall clock per call",
    "start": "the import of torch, and what F.softplus takes first",
}
OTHERS = ("eager", "torch.compile")
TEXT = {"section", "operator", "what", "call", "dtype", "layout", "worst", "reason"}  # columns that are not figures


# ---- Progress ----------------------------------------------------------------------------------------------------


class Progress:
    """A bar on stderr with rich, where it is installed; else a line whenever another part begins."""

    def __init__(self, total: int):
        self.total, self.done, self.description, self.begin = total, 0, "", time.perf_counter()
        self.bar = None
        if importlib.util.find_spec("rich"):
            from rich import progress
            from rich.console import Console

            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=22),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
            )
            # Without the thread that would redraw it meanwhile, and take its time from calls that are timed.
            console = Console(stderr=True, highlight=False)
            self.bar = progress.Progress(*columns, console=console, auto_refresh=False)
            self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, failed: object, *error: object) -> None:
        if self.bar:
            if not failed:
                self.bar.update(self.task, completed=self.total)
            self.bar.stop()

    def advance(self, description: str) -> None:
        """Said before each step."""
        if self.bar:
            self.bar.update(self.task, description=description, completed=self.done, refresh=True)
        elif description != self.description:
            elapsed = time.perf_counter() - self.begin
            print(f"[{self.done}/{self.total}, {elapsed:.0f} s] {description}", file=sys.stderr, flush=True)
        self.description = description
        self.done += 1


# ---- Tables ------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass
class Group:
    """The rows of one section, dtype, layout and shape, by (operator, what) and call."""

    section: str
    dtype: str
    layout: str
    shape: tuple[int, ...]
    rows: dict[tuple[str, str], dict[str, dict]] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def values(self, call: str, key: str) -> list[float]:
        return [calls[call][key] for calls in self.rows.values() if call in calls]


def groups(document: dict) -> list[Group]:
    found: dict[tuple, Group] = {}
    for row in document["rows"]:
        place = (row["section"], row["dtype"], row["layout"], tuple(row["shape"]))
        group = found.setdefault(place, Group(*place))
        group.rows.setdefault((row["operator"], row["what"]), {})[row["call"]] = row
    return sorted(found.values(), key=lambda group: SECTIONS.index(group.section))


def families(document: dict) -> list[list[Group]]:
    """The groups of each section, dtype and layout in rising size."""
    found: dict[tuple, list[Group]] = {}
    for group in groups(document):
        found.setdefault((group.section, group.dtype, group.layout), []).append(group)
    return [sorted(family, key=lambda group: group.elements) for family in found.values()]


def main_group(document: dict, family: list[Group]) -> Group:
    """The group of the run's first size; where it was skipped, that of the largest."""
    shape = tuple(document["about"]["shape"])
    return next((group for group in family if group.shape == shape), family[-1])


def tables(document: dict) -> list[Table]:
    found = [summary(document)]
    for family in families(document):
        group = main_group(document, family)
        found.append(TABLES.get(group.section, bandwidth_table)(group))
        if len(family) > 1:
            found.append(size_table(family))
    if document["skipped"]:
        header = ["section", "operator", "call", "dtype", "layout", "elements", "reason"]
        rows = [[power(row[key]) if key == "elements" else row[key] for key in header] for row in document["skipped"]]
        found.append(Table("Skipped", header, rows))
    return [without_empty_columns(table) for table in found if table.rows]


def summary(document: dict) -> Table:
    header = ["section", "what", "dtype", "layout", "elements", "rows", "fused", "highest", "worst", *OTHERS, "noise"]
    rows = []
    for group in [group for family in families(document) for group in family]:
        noise = group.values("control", "ratio")
        for what in dict.fromkeys(what for _, what in group.rows if what != "control"):
            rows_here = {key: calls for key, calls in group.rows.items() if key[1] == what}
            part = Group(group.section, group.dtype, group.layout, group.shape, rows_here)
            call = next((call for call in FUSED if part.values(call, "ratio")), None)
            if call is None:
                continue
            worst = max((calls[call]["ratio"], operator) for (operator, _), calls in part.rows.items() if call in calls)
            if group.section == "overhead":
                noise = part.values("control", "ratio")
            rows.append(
                [group.section, what, group.dtype, group.layout, power(group.elements), str(len(part.rows))]
                + [median(part.values(call, "ratio")), f"{worst[0]:.3f}", worst[1]]
                + [median(part.values(other, "ratio")) for other in OTHERS]
                + [f"{min(noise):.3f}-{max(noise):.3f}" if noise else ""]
            )
    note = (
        "Ratios to the yardstick of the section: medians over the operators, and the operator with the highest."
        " Noise: the yardstick against itself, in the same turns."
    )
    return Table("Summary", header, rows, note)


def bandwidth_table(group: Group) -> Table:
    header = ["operator", "what", "us", "GB/s", "ratio", "p10-p90", "goal", "of limit", *OTHERS]
    header += ["MiB", *(f"MiB {other}" for other in OTHERS)]
    rows = []
    for (operator, what), calls in group.rows.items():
        if r := calls.get("fused"):
            cells = [operator, what if group.section == "backward" else "", number(r["us"]), number(r["GB/s"])]
            cells += [f"{r['ratio']:.3f}", spread(r), goal(r), f"{r['fraction']:.1%}"]
            cells += [f"{calls[other]['ratio']:.3f}" if other in calls else "" for other in OTHERS]
            rows.append(cells + [mebibytes(calls.get(call)) for call in ("fused", *OTHERS)])
    title = f"{group.section}, {group.dtype}, {group.layout}, {group.shape}: ratio to {YARDSTICKS[group.section]}"
    copied = [calls["control"]["yardstick_us"] for calls in group.rows.values() if "control" in calls]
    note = f"The copy takes {number(statistics.median(copied))} us." if copied else ""
    if group.section == "training":
        note += " MiB: what the step had allocated at its worst moment, on top of its inputs." if rows[0][-3] else ""
    return Table(title, header, rows, note)


def size_table(family: list[Group]) -> Table:
    header = ["operator", "what", *(power(group.elements) for group in family)]
    keys = dict.fromkeys(key for group in family for key, calls in group.rows.items() if "fused" in calls)
    rows = []
    for operator, what in keys:
        found = [group.rows.get((operator, what), {}).get("fused") for group in family]
        cells = [f"{row['fraction']:.1%}" if row else "" for row in found]
        rows.append([operator, what if family[0].section == "backward" else "", *cells])
    title = f"{family[0].section}, {family[0].dtype}, {family[0].layout}: fraction of the limit, by elements"
    return Table(title, header, rows)


def overhead_table(group: Group) -> Table:
    header = ["operator", "what", *WAYS, "goal", *OTHERS, "us", "hardswish us"]
    rows = []
    for (operator, what), calls in group.rows.items():
        if r := calls.get(WAYS[0]):
            ratios = [f"{calls[way]['ratio']:.3f}" if way in calls else "" for way in (*WAYS, *OTHERS)]
            ratios.insert(len(WAYS), goal(r))
            rows.append([operator, what, *ratios, number(r["us"]), number(r["yardstick_us"])])
    return Table(f"overhead: ratio to {YARDSTICKS['overhead']}", header, rows)


def start_table(group: Group) -> Table:
    header = ["operator", "what", "ms", "lowest-highest", "goal ms", "yardstick ms"]
    rows = []
    for (operator, what), calls in group.rows.items():
        for r in calls.values():
            limit, ms = r.get("limit_ms"), r["us"] / 1e3
            low, high = (number(r[f"{end}_us"] / 1e3) for end in ("lowest", "highest"))
            wanted = "" if limit is None else f"{limit:g}" + (" over" if ms > limit else "")
            rows.append([operator, what, number(ms), f"{low}-{high}", wanted, number(r["yardstick_us"] / 1e3)])
    return Table(f"start, {group.dtype}: what a process pays once; yardstick {YARDSTICKS['start']}", header, rows)


TABLES = {"overhead": overhead_table, "start": start_table}  # the others' is bandwidth_table


def without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table.header)) if any(row[i] for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Table(table.title, [table.header[i] for i in kept], rows, table.note)


def power(elements: int) -> str:
    exponent = elements.bit_length() - 1
    return f"2^{exponent}" if elements == 2**exponent else f"{elements:,}"


def number(value: float) -> str:
    """Of four digits, or as many as stand before the point."""
    return f"{value:.{max(0, 4 - len(str(int(value))))}f}"


def median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else ""


def spread(r: dict) -> str:
    return f"{r['p10']:.2f}-{r['p90']:.2f}"


def goal(r: dict) -> str:
    return "" if r.get("limit") is None else f"{r['limit']:.2f}" + (" over" if r["ratio"] > r["limit"] else "")


def mebibytes(r: dict | None) -> str:
    return "" if r is None or r.get("peak_bytes") is None else f"{r['peak_bytes'] / 2**20:,.1f}"


def print_tables(document: dict) -> None:
    """With rich where it is installed, else tab-separated."""
    print(describe(document["about"]))
    for table in tables(document):
        print(f"\n{table.title}")
        if not importlib.util.find_spec("rich"):
            print("\n".join("\t".join(cells) for cells in [table.header, *table.rows]))
        else:
            from rich.console import Console
            from rich.table import Table as RichTable

            shown = RichTable(box=None, pad_edge=False)
            for name in table.header:
                shown.add_column(name, justify="left" if name in TEXT else "right", no_wrap=name != "reason")
            for cells in table.rows:
                shown.add_row(*cells)
            console = Console(highlight=False, markup=False)
            console.width = max(console.width, 150)  # piped output counts as 80 columns, which would cut figures off
            console.print(shown)
        if table.note:
            print(table.note)


def write_markdown(document: dict, path: Path) -> None:
    about = document["about"]
    lines = [f"# fused_act on {about['device']}", ""]
    lines += [f"- {key}: {value}" for key, value in about.items() if key != "device" and value is not None]
    for table in tables(document):
        rules = [":---" if name in TEXT else "---:" for name in table.header]
        lines += ["", f"## {table.title}", ""]
        for cells in (table.header, rules, *table.rows):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines += ["", table.note] if table.note else []
    path.write_text("\n".join(lines) + "\n")


# ---- Plots -------------------------------------------------------------------------------------------------------

# The same for a call in every plot.
COLOURS = {"fused": "#1f3a93", "eager": "#f5a623", "torch.compile": "#3a9d5d", "copy": "#555555"}
COLOURS |= dict(zip(WAYS, ("#1f3a93", "#5b7bd5", "#9db4ee"), strict=True))


def write_plots(document: dict, folder: Path) -> list[Path]:
    """``bandwidth_SECTION.png`` (against size), ``limit_SECTION.png`` (each operator) and ``overhead.png``."""
    found = families(document)
    written = []
    for section in SECTIONS:
        here = [family for family in found if family[0].section == section]
        if not here or section == "start":  # a few figures for all operators: the table is enough
            continue
        if section == "overhead":
            plots: list[tuple[str, Callable, list]] = [("overhead", plot_overhead, here)]
        else:
            plots = [(f"limit_{section}", plot_limit, here)]
            if several := [family for family in here if len(family) > 1]:  # of one size there is no curve
                plots.append((f"bandwidth_{section}", plot_bandwidth, several))
        for name, plot, shown in plots:
            figure = plot(document, shown)
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1])
    return written


def new_figure(document: dict, title: str, width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(width, 8), height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, whatever backend the user has set
    about = document["about"]
    figure.suptitle(f"{title}\n{about['device']}, torch {about['torch']}, fused_act {about['fused_act']}", fontsize=11)
    return figure


def plot_bandwidth(document: dict, here: list[list[Group]]) -> Figure:
    """Bytes that are needed per time, against the number of elements: the median operator and the middle 80 %."""
    section = here[0][0].section
    columns = min(3, len(here))
    lines = math.ceil(len(here) / columns)
    title = f"{section}: bandwidth by size, median over the operators and the middle 80 %"
    figure = new_figure(document, title, 5 * columns, 4 * lines + 0.6)
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, family in zip(grid, here, strict=False):
        for call in ("fused", *OTHERS):
            points = [(group.elements, sorted(group.values(call, "GB/s"))) for group in family]
            points = [(elements, values) for elements, values in points if values]
            if points:
                sizes = [elements for elements, _ in points]
                middle = [statistics.median(values) for _, values in points]
                low = [values[len(values) // 10] for _, values in points]
                high = [values[-1 - len(values) // 10] for _, values in points]
                axes.plot(sizes, middle, marker="o", markersize=4, label=call, color=COLOURS[call])
                axes.fill_between(sizes, low, high, color=COLOURS[call], alpha=0.15, linewidth=0)
        copies = [(group.elements, group.values("control", "GB/s")) for group in family]
        copies = [(elements, statistics.median(values)) for elements, values in copies if values]
        axes.plot(*zip(*copies, strict=True), linestyle="--", label="copy", color=COLOURS["copy"])
        axes.set_xscale("log", base=2)
        axes.set(title=f"{family[0].dtype}, {family[0].layout}", xlabel="elements", ylabel="GB/s", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in grid[len(here) :]:
        axes.remove()
    return figure


def plot_limit(document: dict, here: list[list[Group]]) -> Figure:
    """Of each operator the share of the copy's bandwidth that it reaches."""
    shown = [main_group(document, family) for family in here]
    names = list(dict.fromkeys(label(key) for group in shown for key in group.rows if key[1] != "control"))
    title = f"{shown[0].section}: fraction of the limit, which is a copy"
    figure = new_figure(document, title, 3.2 * len(shown) + 2.5, 0.19 * len(names) + 2)
    for axes, group in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False).flat, shown, strict=True):
        for call in (*OTHERS, "fused"):
            points = [(calls[call]["fraction"], label(key)) for key, calls in group.rows.items() if call in calls]
            dots(axes, points, names, call)
        axes.axvline(1, linestyle="--", color=COLOURS["copy"])
        axes.set(title=f"{group.dtype}, {group.layout}\n{group.shape}", xlim=(0, None))
        axes.title.set_fontsize(9)
    legend_below(figure)
    return figure


def plot_overhead(document: dict, here: list[list[Group]]) -> Figure:
    """Of each operator the microseconds per call."""
    (group,) = [main_group(document, family) for family in here]
    modes = list(dict.fromkeys(what for _, what in group.rows))
    names = list(dict.fromkeys(operator for operator, _ in group.rows))
    title = "overhead per call on 64 elements, in microseconds; dashed: F.hardswish"
    figure = new_figure(document, title, 3.2 * len(modes) + 2.5, 0.19 * len(names) + 2)
    for axes, mode in zip(figure.subplots(1, len(modes), sharey=True, squeeze=False).flat, modes, strict=True):
        chosen = {operator: calls for (operator, what), calls in group.rows.items() if what == mode}
        for call in (*OTHERS, *reversed(WAYS)):
            dots(axes, [(calls[call]["us"], name) for name, calls in chosen.items() if call in calls], names, call)
        yardstick = statistics.median(r["yardstick_us"] for calls in chosen.values() for r in calls.values())
        axes.axvline(yardstick, linestyle="--", color=COLOURS["copy"])
        axes.set(title=mode, xlim=(0, None))
    legend_below(figure)
    return figure


def dots(axes: Axes, points: list[tuple[float, str]], names: list[str], call: str) -> None:
    """One dot per name, the first name on top."""
    if points:
        heights = [-names.index(name) for _, name in points]
        axes.plot([value for value, _ in points], heights, "o", markersize=4, label=call, color=COLOURS[call])
    axes.set_yticks([-index for index in range(len(names))], names, fontsize=7)
    axes.set_ylim(-len(names) + 0.5, 0.5)
    axes.grid(alpha=0.3)


def legend_below(figure: Figure) -> None:
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines if line.get_label()[0] != "_"}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))


def label(key: tuple[str, str]) -> str:
    """Of a row of a plot: the operator, and whether backward gives the operands' gradients too."""
    operator, what = key
    return f"{operator}, operand too" if what == "grad_x + operand" else operator
