"""The command line: ``attn4 COMMAND``, each command a module of this package, loaded when it is used."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from attn4 import __version__

COMMANDS = {
    "demo": ("attn4.cli.demo", "run a small language model on its own attention and on attn4"),
    "doctor": ("attn4.cli.doctor", "say what this machine can run, and why not the rest"),
    "explain": ("attn4.cli.explain", "print the plan of a problem on a machine, without a GPU"),
    "compile": ("attn4.cli.compile", "build kernels ahead of time, without a GPU"),
    "emulate": ("attn4.cli.emulate", "run a compiled kernel on an emulated GPU: result, hazards, counts"),
    "bench": ("attn4.cli.bench", "time cases against other packages and draw the results"),
}
"""Command -> its module, with ``add_arguments(parser)`` and ``run(args) -> int``, and a line for the list."""

USER_ERROR = 2
"""Exit status of a request that cannot be met, as argparse uses it for a wrong argument."""

KERNEL_ERROR = 3
"""Exit status when a kernel can neither be found nor compiled here."""


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for ``argv``: it knows every command by name, and only the chosen one by its options."""
    parser = argparse.ArgumentParser(prog="attn4", description="Exact attention on NVIDIA GPUs and on CPUs.")
    parser.add_argument("--version", action="version", version=f"attn4 {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module_name, summary) in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=summary, add_help=False)
            continue
        module = import_module(module_name)
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; what went wrong is told, without a traceback.

    ``argv`` is without the program's name; ``None`` takes the process's own.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    args: Any = build_parser(words).parse_args(words)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except (ValueError, NotImplementedError) as error:
        print(f"attn4 {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        # `attn4 explain | head`: the reader has what it wanted; what Python flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RuntimeError as error:
        from attn4.artifact import CompileError, KernelUnavailableError
        from attn4.compiled import DisassemblerMissingError

        if not isinstance(error, (CompileError, KernelUnavailableError, DisassemblerMissingError)):
            raise
        print(f"attn4 {args.command}: {error}", file=sys.stderr)
        return KERNEL_ERROR
    return status
