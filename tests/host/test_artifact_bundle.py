"""Bundles: built ahead of time in several processes, found by argument, registration or installation."""

import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from attn4.artifact import (
    ArtifactWarning,
    CompileError,
    KernelUnavailableError,
    artifact_for,
    build_bundle,
    bundle,
    errors,
    store,
    use_bundle,
)
from attn4.artifact.bundle import installed_bundles
from attn4.artifact.key import Toolchain, artifact_key, plan_to_json, toolchain
from host.artifact_kernel import FAKE, PLAN, with_head_dim

pytestmark = pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed")

FAILING = "host.artifact_kernel:compile_or_fail"


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ARTIFACT_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(errors, "_given", set())
    monkeypatch.setattr(bundle, "_registered", [])
    installed_bundles.cache_clear()
    yield
    installed_bundles.cache_clear()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A bundle with PLAN in it."""
    folder = tmp_path_factory.mktemp("bundle") / "b"
    build_bundle([PLAN], folder, jobs=1, compiler=FAKE)
    return folder


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(store, "toolchain", lambda: None)


def test_bundle_holds_each_plan_once_and_lists_it(tmp_path):
    events = []
    plans = [PLAN, with_head_dim(64), PLAN]
    report = build_bundle(plans, tmp_path / "b", jobs=2, compiler=FAKE, progress=events.append)
    assert len(report.built) == 2
    assert not report.skipped
    assert not report.failed
    assert [(event.done, event.total, event.built) for event in events] == [(1, 2, True), (2, 2, True)]
    index = json.loads((tmp_path / "b" / "index.json").read_text())
    assert index["artifacts"].keys() == {artifact_key(plan, toolchain()) for plan in plans}
    assert index["artifacts"][artifact_key(PLAN, toolchain())]["plan"] == plan_to_json(PLAN)
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {*index["artifacts"], "index.json", ".locks"}
    assert all((tmp_path / "b" / name).stat().st_mode & 0o055 == 0o055 for name in index["artifacts"])


def test_bundle_skips_what_is_there_and_builds_what_is_damaged(tmp_path):
    first = build_bundle([PLAN, with_head_dim(64)], tmp_path / "b", jobs=1, compiler=FAKE)
    first.built[0].library.write_bytes(b"")
    with pytest.warns(ArtifactWarning, match="damaged"):
        second = build_bundle([PLAN, with_head_dim(64)], tmp_path / "b", jobs=1, compiler=FAKE)
    assert [artifact.key for artifact in second.built] == [first.built[0].key]
    assert [artifact.key for artifact in second.skipped] == [first.built[1].key]


def test_plan_that_fails_does_not_stop_the_others(tmp_path):
    """One raises, one takes its process with it, one compiles in the process that follows."""
    plans = [with_head_dim(64), with_head_dim(96), PLAN]
    report = build_bundle(plans, tmp_path / "b", jobs=1, compiler=FAILING)
    assert [artifact.key for artifact in report.built] == [artifact_key(PLAN, toolchain())]
    reasons = {plan.head_dim: reason for plan, reason in report.failed}
    assert "ValueError: 64 is not to be compiled" in reasons[64]
    assert "ended (-9)" in reasons[96]
    assert "about to die" in reasons[96]


def test_bundle_of_nothing_is_an_empty_bundle(tmp_path):
    report = build_bundle([], tmp_path / "b")
    assert report.built == report.skipped == report.failed == ()
    assert json.loads((tmp_path / "b" / "index.json").read_text())["artifacts"] == {}


def test_jobs_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="jobs is 0"):
        build_bundle([PLAN], tmp_path / "b", jobs=0)


def test_bundle_cannot_be_built_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "toolchain", lambda: None)
    with pytest.raises(CompileError, match="Install nvidia-cutlass-dsl"):
        build_bundle([PLAN], tmp_path / "b")


def test_variables_of_the_compiler_do_not_reach_a_bundle(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    build_bundle([PLAN], tmp_path / "b", compiler=FAKE)
    assert (tmp_path / "log").read_text() == "128 False []\n"


def test_bundle_is_found_by_argument_without_a_compiler(built, no_compiler):
    assert artifact_for(PLAN, bundle=built).folder.parent == built
    with pytest.raises(KernelUnavailableError):
        artifact_for(PLAN)


def test_bundle_in_use_is_found_until_it_is_removed(built, no_compiler):
    with use_bundle(built):
        assert artifact_for(PLAN).folder.parent == built
    with pytest.raises(KernelUnavailableError):
        artifact_for(PLAN)
    handle = use_bundle(built)
    assert artifact_for(PLAN).folder.parent == built
    handle.remove()
    handle.remove()
    with pytest.raises(KernelUnavailableError):
        artifact_for(PLAN)


def test_one_of_two_uses_of_a_bundle_outlives_the_other(built, no_compiler):
    first, second = use_bundle(built), use_bundle(built)
    first.remove()
    assert artifact_for(PLAN).folder.parent == built
    second.remove()


def test_latest_bundle_in_use_comes_first(built, tmp_path, no_compiler):
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    use_bundle(built)
    with use_bundle(copy):
        assert artifact_for(PLAN).folder.parent == copy
        assert artifact_for(PLAN, bundle=built).folder.parent == built
    assert artifact_for(PLAN).folder.parent == built


def test_bundle_comes_before_the_cache_and_the_compiler(built, tmp_path):
    assert artifact_for(PLAN, bundle=built, compiler=FAKE).folder.parent == built
    assert not (tmp_path / "log").exists()


def test_bundle_of_another_compiler_version_is_taken(built, monkeypatch):
    monkeypatch.setattr(store, "toolchain", lambda: Toolchain((("nvidia-cutlass-dsl", "4.8.99"),), 13))
    assert artifact_for(PLAN, bundle=built).folder.parent == built


def test_damaged_kernel_in_a_bundle_is_passed_over_with_a_warning(built, tmp_path, no_compiler):
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    next(copy.glob("*/kernel.so")).write_bytes(b"")
    use_bundle(built)
    with pytest.warns(ArtifactWarning, match="damaged"):
        assert artifact_for(PLAN, bundle=copy).folder.parent == built


def test_folder_that_is_not_there_is_refused(tmp_path):
    for call in (use_bundle, lambda path: artifact_for(PLAN, bundle=path)):
        with pytest.raises(ValueError, match="is not a folder"):
            call(tmp_path / "nowhere")


def install(site, name, package):
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[attn4.bundles]\n{name} = {package}\n")


def test_installed_bundle_is_found_without_importing_its_package(built, tmp_path, monkeypatch, no_compiler):
    site = tmp_path / "site"
    install(site, "some-kernels", "some_kernels")
    shutil.copytree(built, site / "some_kernels")
    (site / "some_kernels" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    assert artifact_for(PLAN).folder.parent == site / "some_kernels"


def test_installed_bundle_that_is_broken_is_told_and_passed_over(tmp_path, monkeypatch, no_compiler):
    install(tmp_path / "site", "other-kernels", "other_kernels")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    with (
        pytest.warns(ArtifactWarning, match="names the package other_kernels, which is not installed"),
        pytest.raises(KernelUnavailableError),
    ):
        artifact_for(PLAN)


def test_bundle_serves_a_process_that_has_no_compiler(built):
    code = """
import sys
sys.modules["cutlass"] = None
from attn4.artifact import artifact_for
from host.artifact_kernel import PLAN
print(artifact_for(PLAN, bundle=sys.argv[1]).folder.parent)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, str(built)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(built)
