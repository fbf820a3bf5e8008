"""Compiling in a process of its own: a clean environment, several at once, a crash that hurts nobody.

The child reads one request a line, ``{"plan": ..., "folder": ...}``, and answers each with one line,
``{"error": null}`` or ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import TracebackType
from typing import Self

from attn4.artifact.build import KERNELS, build_here
from attn4.artifact.errors import CompileError
from attn4.artifact.key import plan_from_json, plan_to_json
from attn4.plan.plan import Plan

_LOG_TAIL_BYTES = 4000
_SERVE = "import sys; from attn4.artifact.worker import serve; serve(sys.argv[1])"


class CompilerProcess:
    """A child that compiles plans one after the other. Not for use by several threads at once."""

    def __init__(self, compiler: str = KERNELS) -> None:
        self._compiler = compiler
        self._child: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()

    def build(self, plan: Plan, folder: Path) -> None:
        """Compile ``plan``, and write its artefact into the empty ``folder``. Raises CompileError."""
        child = self._child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        request = json.dumps({"plan": plan_to_json(plan), "folder": str(folder.resolve())})
        try:
            child.stdin.write(request + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            self._child = None
            raise CompileError(f"The compiling process ended ({child.wait()}); it said:\n{self._tail()}")
        error = json.loads(answer)["error"]
        if error is not None:
            raise CompileError(error)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE, self._compiler],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace")


def serve(compiler: str) -> None:
    """Answer requests from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints must not be read as an answer
    for line in sys.stdin:
        request = json.loads(line)
        error = None
        try:
            build_here(plan_from_json(request["plan"]), Path(request["folder"]), compiler)
        except CompileError as failure:
            error = str(failure)
        except Exception:  # noqa: BLE001  any failure belongs to its plan, not to the child
            error = traceback.format_exc()
        print(json.dumps({"error": error}), file=answers, flush=True)
