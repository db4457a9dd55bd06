"""The command line: `python -m fused_act info`, `operators`, `demo` and `bench`."""

import argparse
import sys
from collections.abc import Sequence

from . import _bench, demo, info, operators


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fused_act", description="Fused activation chains for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("info", help="print versions, devices and SIMD level: what a bug report needs")
    command.set_defaults(run=info.run)

    command = commands.add_parser("operators", help="print the table of operators in Markdown: docs/operators.md")
    command.set_defaults(run=operators.run)

    # Its extras (scikit-learn, matplotlib, rich) are imported when it runs.
    command = commands.add_parser("demo", help="compare with eager PyTorch, then train a small net with both")
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)

    command = commands.add_parser("bench", help="time every operator against a copy, eager PyTorch and torch.compile")
    _bench.add_arguments(command)

    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
