"""The house keeps its measures: sizes of functions and files, and what may not stand in them."""

import ast
import re
from functools import partial
from pathlib import Path

import pytest

from attn4.artifact.key import toolchain

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "tests").rglob("*.py"))

WANTED = {"file lines": 400, "function lines": 60, "arguments": 8}
LIMIT = {"file lines": 600, "function lines": 120, "arguments": 12}

CONVENTIONS = {"flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata", "__call__"}
"""Their arguments are laid down elsewhere: by the flash-attn packages, and by how kernels are called."""


def arguments(function):
    """How many a caller can give, self and cls not counted."""
    given = function.args
    names = [arg.arg for arg in given.posonlyargs + given.args + given.kwonlyargs]
    return len([name for name in names if name not in ("self", "cls")])


def measures(path, source):
    """(measure, value, where) of a file and of each function in it; a docstring is not counted as lines."""
    where = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    yield "file lines", len(source.splitlines()), where
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        docstring = first.end_lineno - first.lineno + 1 if documented else 0
        name = f"{where}:{node.lineno} {node.name}"
        yield "function lines", node.end_lineno - node.lineno + 1 - docstring, name
        if node.name not in CONVENTIONS:
            yield "arguments", arguments(node), name


def over(limits, found):
    return [
        f"{where}: {value} {name}, at most {limits[name]}"
        for name, value, where in found
        if value > limits[name]
    ]


def all_measures():
    return [measure for path in FILES for measure in measures(path, path.read_text())]


def test_nothing_is_over_the_hard_limits():
    found = all_measures()
    for line in over(WANTED, found):
        print(f"larger than it should be: {line}")
    assert over(LIMIT, found) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\n" * 601, "601 file lines"),
        ("def f():\n" + "    x = 1\n" * 120, "121 function lines"),
        ("def f(" + ", ".join(f"a{i}" for i in range(13)) + "): pass", "13 arguments"),
        ("def f(*, " + ", ".join(f"a{i}" for i in range(13)) + "): pass", "13 arguments"),
    ],
)
def test_what_is_too_large_is_found(source, expected):
    (line,) = over(LIMIT, measures(Path("big.py"), source))
    assert expected in line


def test_a_docstring_does_not_make_a_function_long():
    source = 'def f():\n    """\n' + "    words\n" * 130 + '    """\n    return 1\n'
    assert over(LIMIT, measures(Path("documented.py"), source)) == []


def test_only_the_kernels_import_cutlass():
    """import-linter checks the layers; this one also holds where it is not installed."""
    guilty = [
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if path.is_relative_to(ROOT / "src") and "attn4/kernels/" not in path.as_posix()
        if re.search(r"^\s*(import|from) cutlass\b", path.read_text(), re.MULTILINE)
    ]
    assert guilty == []


def test_integrations_stay_leaves_of_two_hundred_lines():
    sizes = {
        path.name: len(path.read_text().splitlines())
        for path in (ROOT / "src/attn4/integrations").glob("*.py")
    }
    assert {name: size for name, size in sizes.items() if size > 200} == {}


def test_every_module_says_what_it_is_for():
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if (source := path.read_text()).strip() and ast.get_docstring(ast.parse(source)) is None
    ]
    assert silent == []


def test_the_examples_in_the_readme_run_on_a_cpu(monkeypatch):
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # The default backend of torch.compile needs a C++ compiler, and ten seconds.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names, shapes = {}, []
    for example in examples:
        if "attn4.emulator" in example and toolchain() is None:
            continue
        exec(example, names)
        shapes.append(tuple(names["out"].shape))
    assert len(examples) == 4
    assert shapes[0] == (512, 8, 64)


def test_links_between_the_documents_lead_somewhere():
    broken = [
        f"{page.relative_to(ROOT).as_posix()} -> {target}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
