"""The benchmark has a row for every operator, times it against what it computes, and tells a slower run."""

import copy
import importlib.util
import io
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch

import fused_act
from fused_act import _bench
from fused_act.__main__ import main
from fused_act._bench import measure, results, start
from fused_act._bench.cases import code_bits, make_cases, read_by_backward, shared_gradients
from fused_act.demo import peak_memory

EVERY = [operator.name for operator in fused_act.ops()]
NAMED = ["relu", "silu", "gelu"]


@pytest.fixture(autouse=True)
def small_flush(monkeypatch):
    """These runs are there for their rows, not for their figures."""
    monkeypatch.setattr(measure, "FLUSH_BYTES", 2**10)


def bench(arguments, *paths):
    return main(["bench", *arguments.split(), *map(str, paths)])


def rows_of(path):
    return json.loads(path.read_text())["rows"]


SMALL = "--device cpu --repeats 3 --calls 2 --batches 2 --activations silu"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of four operators, two sizes and two layouts, all sections but one: its file, and what it wrote beside."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "FLUSH_BYTES", 2**10)
        arguments = f"{SMALL} --operators relu relu_bias act_add silu_and_mul --dtypes float32 bfloat16"
        arguments += " --sizes main 2^10 --shape 2 4 2 6 --markdown"
        assert bench(arguments, folder / "run.md", "--output", folder / "run.json") == 0
    return folder / "run.json"


# ---------------------------------------------------------------------------------------------------------------------
# What is compared


@pytest.mark.parametrize("op", fused_act.ops(), ids=lambda op: op.name)
def test_what_is_compared_computes_the_same(op, device):
    x = torch.randn(2, 4, 3, 6, device=device, dtype=torch.float64)
    for case in make_cases([op.name], ["relu", "silu", "softplus"]):
        values = case.parameters(x)
        y = getattr(torch.ops.fused_act, op.name)(x, **values)
        assert list(y.shape) == case.result_shape(x.shape)
        torch.testing.assert_close(case.written_out()(x, **values), y)


@pytest.mark.parametrize("section", ["forward", "backward", "training"])
@pytest.mark.parametrize("op", fused_act.ops(), ids=lambda op: op.name)
def test_calls_of_a_row_compute_the_same(op, section):
    """Eager's call gives what the fused one gives, for either set of inputs: in value and in number of gradients."""
    for case in make_cases([op.name], ["silu"]):
        xs = [torch.randn(2, 4, 3, 6, dtype=torch.float64) for _ in range(2)]
        grads = [torch.randn(case.result_shape(xs[0].shape), dtype=torch.float64) for _ in range(2)]
        calls = dict(measure.bandwidth_calls(section, case, xs, grads, None))
        assert {call for _, call in calls} == {"fused", "eager"}
        for what in {what for what, _ in calls}:
            seen = []
            for index in range(2):
                got, expected = (as_list(calls[what, call](index)) for call in ("fused", "eager"))
                assert len(got) == len(expected)
                for a, b in zip(got, expected):
                    torch.testing.assert_close(a, b)
                seen.append(got[0])
            assert not torch.equal(*seen), "both repeats got the same inputs"


def as_list(value):
    """The tensors of a result: those of gradients that were not asked for are undefined."""
    return [value] if isinstance(value, torch.Tensor) else [t for t in value if t is not None]


@pytest.mark.parametrize(
    "name, forward, backward",
    [
        ("relu", (2, 0), (3, 0)),
        ("relu_bias", (2, 1), (3, 1)),  # backward reads no bias, and writes its gradient
        ("bias_act", (2, 1), (3, 2)),  # here it reads it
        ("add_act", (3, 1), (5, 2)),
        ("act_add", (3, 1), (4, 2)),  # the residual is added last: no gradient depends on it
        ("silu_and_mul", (1.5, 0), (2.5, 0)),  # the result is half as large as x
    ],
)
def test_bytes(name, forward, backward):
    """In tensors as large as x and vectors of one element per channel."""
    (case,) = make_cases([name], ["relu"])
    shape, itemsize = (3, 64, 5, 2), 2

    def count(tensors, vectors):
        return (tensors * math.prod(shape) + vectors * 64) * itemsize

    assert case.bytes_moved("forward", shape, itemsize) == count(*forward)
    assert case.bytes_moved("backward", shape, itemsize) == count(*backward)
    shared = int("add" in name)  # the residual's gradient is that of x, or grad_output
    assert case.bytes_moved("training", shape, itemsize) == count(*forward) + count(backward[0] - shared, backward[1])
    if case.operands:
        of_x_alone = case.bytes_moved("backward", shape, itemsize, operand_gradients=False)
        assert of_x_alone == count(backward[0], backward[1] - 1)


@pytest.mark.parametrize(
    "name, tensors, vectors, bits",
    [
        ("relu", 4, 0, 1),
        ("relu_bias", 4, 2, 1),
        ("min_bias_scale", 4, 2, 2),
        ("add_act", 5, 2, 1),
        ("silu_and_mul", 4, 0, 0),
    ],
)
def test_bytes_with_codes(name, tensors, vectors, bits):
    """Large tensors: forward writes the codes, and backward reads them and nothing else but grad_output."""
    (case,) = make_cases([name], ["relu"])
    shape = (4, 64, 32, 4)
    assert code_bits(case) == bits
    moved = case.bytes_moved("training", shape, 2)
    assert moved == (tensors * math.prod(shape) + vectors * 64) * 2 + 2 * math.prod(shape) * bits // 8


def test_gradients_that_are_one_tensor():
    shared = {case.name: set(shared_gradients(case)) for case in make_cases(EVERY, ["relu", "silu"])}
    assert {name: names for name, names in shared.items() if names} == {
        f"{name}({act})": {"residual"} for name in ("add_act", "act_add") for act in ("relu", "silu")
    }


@pytest.mark.parametrize("case", make_cases(EVERY, ["relu", "silu"]), ids=lambda case: case.name)
def test_bytes_of_backward_are_of_what_is_saved(case):
    """Two ways to the same: what the gradients depend on, and what the operator keeps for them."""
    x = torch.randn(2, 4, 3, 6, requires_grad=True)
    values = {case.operator.input: x, **case.parameters(x, requires_grad=True)}
    saved = set()

    def pack(tensor):
        names = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.data_ptr() == tensor.data_ptr()]
        saved.update(names)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        getattr(torch.ops.fused_act, case.operator.name)(**values)
    assert saved == read_by_backward(case, operand_gradients=True)


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def test_every_operator_has_its_rows(tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = "--device cpu --only forward backward training --dtypes float32 --layouts contiguous --repeats 1"
    assert bench(f"{arguments} --sizes main --shape 1 4 2 2 --output", path) == 0
    rows = rows_of(path)
    names = {case.name for case in make_cases(EVERY, NAMED)}
    for section in ("forward", "backward", "training"):
        for call in ("fused", "eager", "control"):
            assert {r["operator"] for r in rows if r["section"] == section and r["call"] == call} == names
    assert all(r["us"] > 0 and r["bytes"] > 0 for r in rows)
    assert "bias_act(gelu)" in capsys.readouterr().out


def test_rows_are_the_product_of_what_was_asked(small):
    rows = rows_of(small)
    forward = {(r["operator"], r["dtype"], r["layout"], tuple(r["shape"])) for r in rows if r["section"] == "forward"}
    shapes = ((2, 4, 2, 6), (1, 64, 4, 4))
    assert forward == {
        (name, dtype, layout, shape)
        for name in ("relu", "relu_bias", "act_add(silu)", "silu_and_mul")
        for dtype in ("float32", "bfloat16")
        for layout in ("contiguous", "channels_last")
        for shape in shapes
    }
    assert all(r["elements"] == math.prod(r["shape"]) for r in rows)
    assert len({results.identity(r) for r in rows}) == len(rows), "two rows of one name"


def test_figures_of_a_row_agree(small):
    for r in rows_of(small):
        if r["section"] == "overhead":
            assert r["ratio"] == pytest.approx(r["us"] / r["yardstick_us"], rel=1e-3)
            continue
        copied = 2 * r["elements"] * {"float32": 4, "bfloat16": 2}[r["dtype"]]
        assert r["GB/s"] == pytest.approx(r["bytes"] / r["us"] / 1e3, rel=1e-3)
        assert r["fraction"] == pytest.approx(r["GB/s"] / (copied / r["yardstick_us"] / 1e3), rel=1e-3)
        assert r["ratio"] == pytest.approx(1 / r["fraction"], rel=1e-3)
        assert r["p10"] <= r["ratio"] * 1.0001 or r["p90"] >= r["ratio"]


def test_head(small):
    about = json.loads(small.read_text())["about"]
    assert about["torch"] == torch.__version__ and about["fused_act"] == fused_act.__version__
    assert about["device"] and about["date"] and about["shape"] == [2, 4, 2, 6]


@pytest.mark.slow
def test_overhead_and_compiled_rows(tmp_path):
    path = tmp_path / "results.json"
    arguments = f"{SMALL} --only forward overhead --dtypes float32 --layouts contiguous --operators relu --compile"
    assert bench(f"{arguments} --sizes 2^10 2^11 --output", path) == 0
    calls = {(r["section"], r["call"]) for r in rows_of(path)}
    assert calls >= {("forward", call) for call in ("fused", "eager", "torch.compile", "control")}
    ways = ("default", "packet", "functional", "eager", "torch.compile", "control")
    assert calls >= {("overhead", way) for way in ways}
    compiled = [r["elements"] for r in rows_of(path) if r["call"] == "torch.compile" and r["section"] == "forward"]
    assert compiled == [2**10], "torch.compile has the first size alone"


@pytest.mark.slow
def test_rows_of_what_a_process_pays_once(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "PROCESSES", 2)
    path = tmp_path / "results.json"
    arguments = "--only start --operators relu bias_act --activations gelu --dtypes float32 bfloat16"
    assert bench(f"--device cpu {arguments} --markdown", tmp_path / "run.md", "--output", path) == 0
    rows = rows_of(path)
    whats = ["first call", "first training step"]
    first = [
        (name, dtype, what)
        for dtype in ("float32", "bfloat16")
        for name in ("relu", "bias_act(gelu)")
        for what in whats
    ]
    assert [(r["operator"], r["dtype"], r["what"]) for r in rows] == [("fused_act", "float32", "import"), *first]
    assert all(0 < r["lowest_us"] <= r["us"] <= r["highest_us"] and r["yardstick_us"] > 0 for r in rows)
    assert rows[0]["yardstick_us"] > rows[0]["us"] > 1e3, "torch takes longer to import, and no import takes 1 ms"
    table = table_under((tmp_path / "run.md").read_text(), "start, float32")
    assert [r["operator"] for r in table] == ["fused_act", "relu", "relu", "bias_act(gelu)", "bias_act(gelu)"]
    assert float(table[1]["ms"]) == pytest.approx(rows[1]["us"] / 1e3, rel=1e-2) and table[1]["goal ms"].startswith("3")


def test_a_first_call_that_fails_is_a_skipped_row(tmp_path, monkeypatch):
    """Also one that ends its process, and an import."""
    monkeypatch.setattr(measure, "PROCESSES", 1)

    def no_import():
        raise subprocess.SubprocessError("no import")

    monkeypatch.setattr(measure, "import_times", no_import)

    def here(case, what, device, dtype):
        if case and case.name == "silu":
            os._exit(3)
        if case and case.name == "gelu":
            raise RuntimeError("no such thing\nat great length")
        return 1.0

    monkeypatch.setattr(start, "time_first", here)

    def in_this_process(**request):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
            patch.setattr(sys, "stdout", printed := io.StringIO())
            start.serve()
        return map(json.loads, printed.getvalue().splitlines())

    monkeypatch.setattr(measure, "first_calls", in_this_process)
    path = tmp_path / "results.json"
    assert bench("--device cpu --only start --operators relu gelu silu --dtypes float32 --output", path) == 0
    assert [r["operator"] for r in rows_of(path)] == ["relu", "relu"]
    skipped = [(r["operator"], r["reason"]) for r in json.loads(path.read_text())["skipped"]]
    assert skipped == [
        ("fused_act", "no import"),
        ("silu", "the process ended before its first call had"),
        ("gelu", "RuntimeError: no such thing"),
    ]


def test_what_does_not_compile_is_a_skipped_row(tmp_path, monkeypatch):
    def fails(function, **options):
        def call(*args, **values):
            raise NotImplementedError("no such thing\nat great length")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    path = tmp_path / "results.json"
    assert bench(f"{SMALL} --compile --operators relu --dtypes float32 --sizes 2^10 --output", path) == 0
    skipped = json.loads(path.read_text())["skipped"]
    assert {r["section"] for r in skipped} == {"forward", "training", "overhead"}
    assert {(r["call"], r["reason"]) for r in skipped} == {("torch.compile", "NotImplementedError: no such thing")}
    assert {r["call"] for r in rows_of(path)} >= {"fused", "eager", "default"}


@pytest.mark.parametrize("elements", [2**10, 2**11, 3 * 2**12, 2**20, 5 * 2**24, 2**30])
def test_shape_of_a_size(elements):
    n, c, h, w = measure.shape_of(elements)
    assert n * c * h * w == elements and c == 64
    assert h > 1 and w > 1 and w % 2 == 0, "a packed x has two halves, channels_last is another order"
    assert h <= 128 and w <= 128


@pytest.mark.parametrize("text", ["2^9", "2^31", "1000", "1025", "many", "2^", "2^x", "-1024"])
def test_sizes_that_are_refused(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--device", "cpu", f"--sizes={text}"])
    assert stopped.value.code == 2 and "--sizes" in capsys.readouterr().err


def test_sizes_that_are_read():
    assert [_bench.size(text) for text in ("main", "2^10", "2048", "2^30")] == ["main", 2**10, 2**11, 2**30]


def test_rows_that_do_not_fit_are_skipped(tmp_path, capsys):
    """2^16 elements in float32 are 256 KiB each; 1 MiB holds several tensors of 2^10, and not one row of 2^16."""
    path, markdown = tmp_path / "results.json", tmp_path / "results.md"
    arguments = f"{SMALL} --operators relu gelu --dtypes float32 --layouts contiguous --sizes 2^10 2^16"
    assert bench(f"{arguments} --memory {1 / 1024} --output", path, "--markdown", markdown) == 0
    document = json.loads(path.read_text())
    assert {r["elements"] for r in document["rows"] if r["section"] != "overhead"} == {2**10}
    skipped = document["skipped"]
    assert len(skipped) == 2 * 3 and {r["elements"] for r in skipped} == {2**16}
    assert all("GiB" in r["reason"] and r["operator"] in ("relu", "gelu") for r in skipped)
    assert skipped[0]["reason"] in capsys.readouterr().out and skipped[0]["reason"] in markdown.read_text()


def test_memory_that_runs_out_is_a_skipped_row(tmp_path, monkeypatch):
    make_calls = measure.bandwidth_calls

    def calls(section, case, *others):
        if case.name == "gelu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB.")
        return make_calls(section, case, *others)

    monkeypatch.setattr(measure, "bandwidth_calls", calls)
    path = tmp_path / "results.json"
    arguments = f"{SMALL} --operators relu gelu silu --dtypes float32 --layouts contiguous --sizes 2^10"
    assert bench(f"{arguments} --only forward --output", path) == 0
    assert {r["operator"] for r in rows_of(path)} == {"relu", "silu"}
    (skipped,) = json.loads(path.read_text())["skipped"]
    assert skipped["operator"] == "gelu" and "CUDA out of memory" in skipped["reason"]


@pytest.mark.parametrize("section", ["forward", "backward", "training"])
@pytest.mark.parametrize("name", ["relu", "softsign", "relu_hardswish", "min_bias_scale", "gated", "swiglu_oai"])
def test_no_row_needs_more_memory_than_is_counted(name, section):
    (case,) = make_cases([name], ["softsign"])  # one function, and several operations
    shape = (2, 64, 16, 16)

    def row():
        xs = [torch.randn(shape) for _ in range(2)]
        target = torch.empty_like(xs[0])
        grads = [torch.randn(case.result_shape(shape)) for _ in range(2 if section != "forward" else 0)]
        for call in dict(measure.bandwidth_calls(section, case, xs, grads, None)).values():
            call(0)
        return target

    assert peak_memory(row, torch.device("cpu")) <= case.live_tensors(section) * 4 * math.prod(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def table_under(markdown, title):
    """The rows of a table as dicts, by its title's beginning."""
    lines = markdown.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"## {title}"))
    table = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    header, rule, *rows = table
    assert all(set(cell) <= set(":-") for cell in rule)
    assert all(len(row) == len(header) for row in rows)
    return [dict(zip(header, row)) for row in rows]


def test_markdown_has_the_figures(small):
    markdown = small.with_suffix(".md").read_text()
    assert markdown.startswith("# fused_act on ") and f"- torch: {torch.__version__}" in markdown
    rows = rows_of(small)
    chosen = {"section": "forward", "dtype": "float32", "layout": "contiguous", "shape": [2, 4, 2, 6]}
    expected = {(r["operator"], r["call"]): r for r in rows if all(r[key] == value for key, value in chosen.items())}
    table = table_under(markdown, "forward, float32, contiguous, (2, 4, 2, 6)")
    assert [r["operator"] for r in table] == ["relu", "relu_bias", "act_add(silu)", "silu_and_mul"]
    for r in table:
        assert r["ratio"] == f"{expected[r['operator'], 'fused']['ratio']:.3f}"
        assert r["eager"] == f"{expected[r['operator'], 'eager']['ratio']:.3f}"
        assert "torch.compile" not in r, "a column without figures"
    sizes = table_under(markdown, "training, bfloat16, channels_last: fraction of the limit, by elements")
    assert list(sizes[0]) == ["operator", "96", "2^10"]
    overhead = table_under(markdown, "overhead")
    assert {r["operator"] for r in overhead} == {r["operator"] for r in table}
    summary = table_under(markdown, "Summary")
    ratios = [expected[r["operator"], "fused"]["ratio"] for r in table]
    first = next(r for r in summary if r["elements"] == "96")
    assert first["highest"] == f"{max(ratios):.3f}" and first["rows"] == "4"


def test_plots_are_written(small, tmp_path):
    pytest.importorskip("matplotlib")
    assert bench("report --plots", tmp_path / "plots", small) == 0
    names = {f"{kind}_{section}" for kind in ("limit", "bandwidth") for section in ("forward", "backward", "training")}
    written = {path.stem: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert set(written) == names | {"overhead"}
    assert all(data.startswith(b"\x89PNG") and len(data) > 10_000 for data in written.values())


def test_plots_show_the_figures(small):
    pytest.importorskip("matplotlib")
    from fused_act._bench import report

    document = json.loads(small.read_text())
    family = report.families(document)[0]
    figure = report.plot_limit(document, [family])
    drawn = {line.get_label(): sorted(line.get_xdata()) for line in figure.axes[0].lines}
    for call in ("fused", "eager"):
        assert drawn[call] == sorted(report.main_group(document, family).values(call, "fraction"))
    figure = report.plot_bandwidth(document, [family])
    drawn = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(drawn) == {"fused", "eager", "copy"}
    assert all(list(line.get_xdata()) == [96, 1024] for line in drawn.values())
    for call, line in drawn.items():
        bandwidths = [group.values("control" if call == "copy" else call, "GB/s") for group in family]
        assert list(line.get_ydata()) == [statistics.median(values) for values in bandwidths]


def without(monkeypatch, *missing):
    """As if these were not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in missing else found(name, *a))


def test_without_matplotlib_nothing_is_measured(monkeypatch, tmp_path, capsys):
    without(monkeypatch, "matplotlib")
    assert bench(f"{SMALL} --plots", tmp_path / "plots") == 2
    error = capsys.readouterr().err
    assert "matplotlib" in error and "fused_act[bench]" in error


def test_progress_without_rich(monkeypatch, capsys):
    without(monkeypatch, "rich")
    assert bench(f"{SMALL} --operators relu gelu --dtypes float32 --sizes 2^10 --only forward overhead") == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [line.partition("] ")[2] for line in lines] == [
        "forward, float32, contiguous, (1, 64, 4, 4)",
        "forward, float32, channels_last, (1, 64, 4, 4)",
        "overhead",
    ]
    assert lines[-1].startswith("[4/6,") and "\t" in captured.out


def test_progress_with_rich(capsys):
    pytest.importorskip("rich")
    assert bench(f"{SMALL} --operators relu gelu --dtypes float32 --sizes 2^10 --only forward overhead") == 0
    captured = capsys.readouterr()
    assert "6/6" in captured.err and "relu" in captured.out and "\t" not in captured.out


def test_report_joins_runs(small, tmp_path, capsys):
    """Rows of both, and of a row that both have, the later one."""
    document = json.loads(small.read_text())
    later = copy.deepcopy(document)
    later["rows"] = later["rows"][:2]
    later["rows"][0]["us"] = 12345.0
    later["rows"][1]["operator"] = "another"
    results.save(later, tmp_path / "later.json")
    assert bench("report --output", tmp_path / "joined.json", small, tmp_path / "later.json") == 0
    rows = rows_of(tmp_path / "joined.json")
    assert len(rows) == len(document["rows"]) + 1
    assert rows[0]["us"] == 12345.0 and rows[-1]["operator"] == "another"

    later["about"]["torch"] = "0.4.0"
    results.save(later, tmp_path / "later.json")
    assert bench("report", small, tmp_path / "later.json") == 2
    assert "0.4.0" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Comparing two runs


@pytest.fixture
def pair(small, tmp_path):
    """The small run twice, with spreads that are known, as (old, new, function that compares them)."""
    old = json.loads(small.read_text())
    for r in old["rows"]:
        r |= {"ratio": 1.0, "p10": 0.98, "p90": 1.02}
    new = copy.deepcopy(old)

    def compared(*options):
        results.save(old, tmp_path / "old.json")
        results.save(new, tmp_path / "new.json")
        return main(["bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])

    return old, new, compared


def row_of(document, **wanted):
    return next(r for r in document["rows"] if all(r[key] == value for key, value in wanted.items()))


RELU = dict(operator="relu", section="backward", call="fused", dtype="bfloat16", layout="channels_last")


def test_compare_equal_files(pair, capsys):
    old, _, compared = pair
    assert compared() == 0
    fused = [r for r in old["rows"] if r["call"] in ("fused", "default", "packet", "functional")]
    printed = capsys.readouterr().out
    assert f"{len(fused)} rows compared, 0 worse" in printed and "alone" not in printed


def test_compare_a_worse_row(pair, capsys):
    _, new, compared = pair
    row_of(new, **RELU).update(ratio=1.10, p10=1.08, p90=1.12)
    assert compared() == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("worse")]
    assert len(lines) == 1 and "10.0%" in lines[0] and "backward, relu, grad_x" in lines[0]
    assert "bfloat16, channels_last" in lines[0]
    assert compared("--tolerance", "0.11") == 0, "within the tolerance"


def test_compare_a_better_row(pair):
    _, new, compared = pair
    row_of(new, **RELU).update(ratio=0.80, p10=0.78, p90=0.82)
    assert compared() == 0


@pytest.mark.parametrize("noisy", ["old", "new"])
def test_compare_within_the_spread(pair, noisy):
    """More than the tolerance, but the single repeats of one of the runs reach as far."""
    old, new, compared = pair
    row_of(new, **RELU).update(ratio=1.10, p10=1.08, p90=1.12)
    row_of(old if noisy == "old" else new, **RELU).update(p10=0.8, p90=1.4)
    assert compared() == 0


@pytest.mark.parametrize("call", ["eager", "control"])
def test_compare_is_of_fused_rows(pair, call):
    _, new, compared = pair
    for r in new["rows"]:
        if r["call"] == call:
            r.update(ratio=3.0, p10=2.9, p90=3.1)
    assert compared() == 0


def test_compare_names_rows_without_a_partner(pair, capsys):
    old, new, compared = pair
    new["rows"] = [r for r in new["rows"] if r["operator"] != "relu"]
    assert compared() == 0
    gone = sum(
        r["operator"] == "relu" and r["call"] in ("fused", "default", "packet", "functional") for r in old["rows"]
    )
    assert f"{gone} rows are in " in capsys.readouterr().out
    new["rows"] = []
    assert compared() == 2 and "no row in common" in capsys.readouterr().err


def test_compare_leaves_out_rows_that_count_other_bytes(pair, capsys):
    _, new, compared = pair
    row_of(new, **RELU).update(ratio=3.0, p10=2.9, p90=3.1, bytes=1)
    assert compared() == 0
    assert "1 rows count other bytes" in capsys.readouterr().out


@pytest.mark.parametrize("which", ["old", "new"])
def test_compare_refuses_another_card_and_another_format(pair, capsys, which):
    old, new, compared = pair
    document = old if which == "old" else new
    document["about"]["device"] = "some other card"
    assert compared() == 2 and "some other card" in capsys.readouterr().err
    document["about"]["device"] = (new if which == "old" else old)["about"]["device"]
    assert compared() == 0
    document["format"] = "fused_act bench 0"
    assert compared() == 2 and "fused_act bench 0" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}'])
def test_compare_refuses_other_files(small, tmp_path, capsys, text):
    other = tmp_path / "other.json"
    other.write_text(text)
    assert bench("compare", small, other) == 2 and str(other) in capsys.readouterr().err
    assert bench("compare", tmp_path / "absent.json", small) == 2 and "absent.json" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The command line, and a GPU


def command(*arguments):
    path = os.pathsep.join(p for p in [str(Path(fused_act.__file__).parents[1]), *sys.path] if p)
    return subprocess.run(
        [sys.executable, "-m", "fused_act", "bench", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_command_line(tmp_path):
    output = tmp_path / "run.json"
    run = command(*f"{SMALL} --operators relu --dtypes float32 --sizes 2^10 --output {output}".split())
    assert run.returncode == 0, run.stderr
    assert "relu" in run.stdout and str(output) in run.stdout
    run = command("compare", str(output), str(output))
    assert run.returncode == 0 and "0 worse" in run.stdout, run.stderr


def test_command_line_errors(tmp_path, monkeypatch, capsys):
    assert bench("--device cpu --output", tmp_path / "no" / "run.json") == 2
    assert "no folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert bench("--device cpu --plots", tmp_path / "file") == 2
    assert "--plots" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench("--device cuda") == 2
    assert "--device cpu" in capsys.readouterr().err


@cases.needs_cuda
def test_run_on_a_gpu(tmp_path):
    path = tmp_path / "run.json"
    arguments = "--repeats 3 --calls 2 --batches 2 --operators relu relu_bias --dtypes float32 --sizes 2^20 2^10"
    assert bench(f"{arguments} --output", path) == 0
    document = json.loads(path.read_text())
    assert document["about"]["device"] == torch.cuda.get_device_name() and document["about"]["cuda"]
    assert not document["skipped"]
    training = [r for r in document["rows"] if r["section"] == "training" and r["call"] == "fused"]
    # At least the result and the gradient of x.
    assert training and all(r["peak_bytes"] >= 2 * 4 * r["elements"] for r in training)
    assert all(0 < r["us"] < 1e5 for r in document["rows"])


@cases.needs_cuda
def test_flushes_outlast_the_host():
    clock = measure.Clock(torch.device("cuda"), repeats=1)
    x = torch.randn(16, device="cuda")
    few = clock.flushes_before({"one": lambda i: x + 1})
    many = clock.flushes_before({"one": lambda i: x + 1, "many": lambda i: [x + 1 for _ in range(2000)]})
    assert 1 <= few < many
