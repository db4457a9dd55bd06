"""The file of a run: written, read, joined, compared with that of another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .measure import FUSED

# To be changed whenever figures of the same name stop meaning the same.
FORMAT = "fused_act bench 1"

IDENTITY = ("section", "operator", "what", "call", "dtype", "layout", "shape")


class Refused(Exception):
    """Files that cannot be read, joined or compared, with the reason."""


def identity(row: dict) -> tuple:
    return tuple(str(row.get(key)) for key in IDENTITY)


def save(document: dict, path: Path) -> None:
    """One row per line, so that two runs can be compared with ``diff``, too."""
    parts = [f'"format": {json.dumps(document["format"])}', f'"about": {json.dumps(document["about"], indent=1)}']
    for key in ("rows", "skipped"):
        lines = ",\n".join(json.dumps(row) for row in document[key])
        parts.append(f'"{key}": [\n{lines}\n]')
    unfinished = path.with_name(f"{path.name}.part")  # a run may be stopped while it writes
    unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    unfinished.replace(path)


def load(path: Path) -> dict:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"{path} is not JSON: {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise Refused(f"{path} has the format {found!r}; this fused_act reads {FORMAT!r}")
    return document


def join(paths: Sequence[Path]) -> dict:
    """One document of the rows of several runs on one card, in which a later row replaces an equal earlier one."""
    first, *others = documents = [load(path) for path in paths]
    for path, document in zip(paths[1:], others, strict=True):
        for key in ("device", "driver", "torch", "cuda", "fused_act"):
            if document["about"].get(key) != first["about"].get(key):
                raise Refused(_differs(key, paths[0], first, path, document))
    rows, skipped = {}, {}
    for document in documents:
        rows |= {identity(row): row for row in document["rows"]}
        skipped |= {identity(row): row for row in document["skipped"]}
    return first | {"rows": list(rows.values()), "skipped": list(skipped.values())}


def _differs(key: str, a: Path, first: dict, b: Path, second: dict) -> str:
    return f"{key}: {a} has {first['about'].get(key)}, {b} has {second['about'].get(key)}"


def compare(old_path: Path, new_path: Path, tolerance: float) -> int:
    """Prints each of fused_act's ratios that became worse. Returns 1 if there is one, else 0.

    Worse is what exceeds the old ratio by more than ``tolerance``, if each ratio also lies outside the middle 80 % of
    the other run: a smaller change, or one that single repeats of the same run show too, says nothing.
    """
    old, new = load(old_path), load(new_path)
    if old["about"]["device"] != new["about"]["device"]:
        raise Refused(
            _differs("device", old_path, old, new_path, new) + ". Only runs on the same card can be compared."
        )
    before = {identity(row): row for row in old["rows"] if row["call"] in FUSED}
    after = {identity(row): row for row in new["rows"] if row["call"] in FUSED}
    common = [key for key in before if key in after]
    both = [key for key in common if before[key].get("bytes") == after[key].get("bytes")]
    if not common:
        raise Refused(f"{old_path} and {new_path} have no row in common")
    if not both:
        raise Refused(f"all rows of {old_path} and {new_path} count other bytes")

    for path, document in ((old_path, old), (new_path, new)):
        print(f"{path}: " + describe(document["about"]))
    worse = [
        key
        for key in both
        if after[key]["ratio"] > before[key]["ratio"] * (1 + tolerance)
        and after[key]["ratio"] > before[key]["p90"]
        and before[key]["ratio"] < after[key]["p10"]
    ]
    for key in sorted(worse, key=lambda key: before[key]["ratio"] / after[key]["ratio"]):
        a, b = before[key], after[key]
        print(
            f"worse by {b['ratio'] / a['ratio'] - 1:.1%}: {a['ratio']:.3f} ({a['p10']:.3f}-{a['p90']:.3f})"
            f" to {b['ratio']:.3f} ({b['p10']:.3f}-{b['p90']:.3f}): {', '.join(key)}"
        )
    for path, alone in ((old_path, len(before) - len(common)), (new_path, len(after) - len(common))):
        if alone:
            print(f"{alone} rows are in {path} alone and were not compared")
    if len(both) < len(common):
        print(f"{len(common) - len(both)} rows count other bytes in either file and were not compared")
    print(f"{len(both)} rows compared, {len(worse)} worse by more than {tolerance:.1%} and the measured spread")
    return 1 if worse else 0


def describe(about: dict) -> str:
    """The head of a report in one line."""
    return ", ".join(
        str(value) if key == "device" else f"{key} {value}" for key, value in about.items() if value is not None
    )
