"""`builtin:python?seconds=5&megabytes=512`: a program in the sandbox, without files and network; its output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from podium.errors import not_whole
from podium.isolation.sandbox import Limits, choose, run_program

_PROGRAM = """
import ast, sys, traceback
code = {code!r}
try:
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names = {{"__name__": "__main__"}}
    exec(compile(tree, "<code>", "exec"), names)
    if last is not None and (value := eval(compile(ast.Expression(last.value), "<code>", "eval"), names)) is not None:
        print(value)
except Exception as error:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<code>"]
    print(f"{{type(error).__name__}}: {{error}}" + (f" (line {{lines[-1]}})" if lines else ""))
    sys.exit(1)
"""
_ENDED = {
    "timeout": "the program ran out of time",
    "overflow": "the program printed too much",
    "signal": "the program was killed, perhaps for lack of memory",
    "fault": "the sandbox failed",
}


def make(*, seconds: int = 5, megabytes: int = 512, sandbox: str = "auto", folder: Path) -> Callable[[str], str]:
    """The tool with these limits. Raises `RewardError` where no sandbox works, `ConfigError` for other settings."""
    for name, value in (("seconds", seconds), ("megabytes", megabytes)):
        if type(value) is not int or value < 1:
            raise not_whole(name, value, fix=f"{name}=5")
    backend = choose(sandbox)
    limits = Limits(
        cpu_seconds=seconds, wall_seconds=3.0 * seconds, total_seconds=3.0 * seconds, memory_megabytes=megabytes
    )

    def python(code: str) -> str:
        """Run a Python program and return what it prints, and the value of its last line.

        Args:
            code: The program.

        Returns:
            The output.
        """
        [result] = run_program(_PROGRAM.format(code=str(code)), [{"stdin": ""}], backend=backend, limits=limits)
        if result.outcome == "ok":
            return result.stdout.rstrip("\n")
        printed = result.stdout.rstrip("\n")
        how = _ENDED.get(result.outcome, "")
        raise RuntimeError("\n".join(filter(None, [printed, how])) or f"the program ended as {result.outcome}")

    return python
