"""Keys of artefacts: what must change them, and what must not."""

import ast
import json
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from attn4.artifact import key as keys
from attn4.artifact.key import plan_from_json, plan_key, plan_to_json
from attn4.plan.plan import SoftmaxPlan
from host.artifact_kernel import PLAN


def _changed(value, path=()):
    """Every value that differs from ``value`` in one leaf, with the path of that leaf."""
    if is_dataclass(value):
        for field in fields(value):
            for where, other in _changed(getattr(value, field.name), (*path, field.name)):
                yield where, replace(value, **{field.name: other})
    elif isinstance(value, tuple):
        yield (*path, "shorter"), value[:-1]
        for i, item in enumerate(value):
            for where, other in _changed(item, (*path, str(i))):
                yield where, (*value[:i], other, *value[i + 1 :])
    elif isinstance(value, bool):
        yield path, not value
    elif isinstance(value, int | float):
        yield path, value + 1
    elif value is None:
        yield path, "something"
    else:
        yield path, value + "x"


CHANGES = list(_changed(PLAN))


def test_every_field_of_a_plan_is_tried():
    assert {path[0] for path, _ in CHANGES} == {field.name for field in fields(PLAN)}


@pytest.mark.fault("G9", "G11")
@pytest.mark.parametrize(
    "changed", [plan for _, plan in CHANGES], ids=[".".join(path) for path, _ in CHANGES]
)
def test_key_changes_with_each_field_of_the_plan(changed):
    assert plan_key(changed) != plan_key(PLAN)


def test_no_two_changes_have_the_same_key():
    assert len({plan_key(plan) for _, plan in CHANGES}) == len(CHANGES)


@pytest.mark.parametrize("part", ["source_digest", "host"])
def test_key_changes_with_the_kernel_sources_and_the_host(monkeypatch, part):
    before = plan_key(PLAN)
    monkeypatch.setattr(keys, part, lambda: "another")
    assert plan_key(PLAN) != before


def test_key_changes_with_the_format(monkeypatch):
    before = plan_key(PLAN)
    monkeypatch.setattr(keys, "FORMAT", keys.FORMAT + 1)
    assert plan_key(PLAN) != before


def test_kernels_import_nothing_that_the_key_does_not_cover():
    package = Path(keys.__file__).parent.parent
    imported = set()
    for file in (package / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(name.name for name in node.names)
    covered = tuple("attn4." + source.removesuffix(".py").replace("/", ".") for source in keys.KERNEL_SOURCES)
    ours = {name for name in imported if name.split(".")[0] == "attn4"}
    assert {name for name in ours if not f"{name}.".startswith(tuple(f"{c}." for c in covered))} == set()


@pytest.mark.fault("G9")
def test_toolchain_changes_with_each_version_and_the_toolkit():
    one = keys.Toolchain((("nvidia-cutlass-dsl", "4.8.1"),), 13)
    others = [replace(one, toolkit=12), replace(one, packages=(("nvidia-cutlass-dsl", "4.8.2"),))]
    assert len({tools.digest for tools in (one, *others)}) == 3


def test_key_is_the_same_in_another_process():
    code = "from host.artifact_kernel import PLAN; from attn4.artifact import plan_key; print(plan_key(PLAN))"
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == plan_key(PLAN)


def test_equal_plans_have_equal_keys_however_a_number_is_written():
    whole, real = (replace(PLAN, softmax=SoftmaxPlan(rescale_threshold=value)) for value in (8, 8.0))
    assert whole == real
    assert plan_key(whole) == plan_key(real)


def test_plan_survives_json():
    assert plan_from_json(json.loads(json.dumps(plan_to_json(PLAN)))) == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": "diagonal"}, "plan.mask is 'diagonal'; allowed are full, causal, window"),
        ({"head_dim": "128"}, "plan.head_dim is '128'"),
        ({"lse": 1}, "plan.lse is 1"),
        ({"pages": 16}, "plan has pages, which a Plan has not"),
        ({"roles": [{"name": "load"}]}, r"plan.roles\[0\] is not a whole Role"),
        ({"roles": "load"}, "plan.roles is 'load'; a value of type list is expected"),
    ],
)
def test_json_that_is_no_plan_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        plan_from_json(plan_to_json(PLAN) | change)


def test_json_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match=r"plan is .* of type dict"):
        plan_from_json([1, 2])
