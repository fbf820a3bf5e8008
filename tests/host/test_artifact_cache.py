"""The disk cache: one compile a key, whole entries or none, and no cache at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from attn4.artifact import (
    ArtifactWarning,
    CompileError,
    KernelUnavailableError,
    artifact_for,
    errors,
    store,
)
from attn4.artifact.artifact import read_artifact
from attn4.artifact.cache import ArtifactFolder, usage, user_cache_root
from attn4.artifact.key import FORMAT, Toolchain, artifact_key, plan_key, toolchain
from host.artifact_kernel import FAKE, PLAN, with_head_dim

pytestmark = pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed")

COMPILE = (
    "from attn4.artifact import artifact_for; from host import artifact_kernel as k; "
    f"a = artifact_for(k.PLAN, compiler={FAKE!r})"
)

SLEEP = "from host import artifact_kernel as k; sleep = k.time.sleep; k.time.sleep = lambda _: sleep(60)"


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    """A cache of this test's own, an environment without CuTe DSL's variables, warnings not yet given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ARTIFACT_TEST_LOG", str(tmp_path / "log"))
    for name in list(os.environ):
        if name.startswith("CUTE_DSL_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(errors, "_given", set())
    store._temporary_folder.cache_clear()
    return tmp_path


def compiles(home: Path) -> list[str]:
    path = home / "log"
    return path.read_text().splitlines() if path.exists() else []


def start(code: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE)


def entry() -> Path:
    return user_cache_root() / str(FORMAT) / artifact_key(PLAN, toolchain())


def test_first_call_compiles_and_the_second_reads(cache_home):
    first = artifact_for(PLAN, compiler=FAKE)
    second = artifact_for(PLAN, compiler=FAKE)
    assert first == second
    assert first.folder == entry()
    assert sorted(path.name for path in entry().iterdir()) == ["artifact.json", "kernel.ptx", "kernel.so"]
    assert len(compiles(cache_home)) == 1


@pytest.mark.fault("G10")
def test_eight_processes_on_a_cold_cache_compile_once(cache_home):
    code = f"{COMPILE}; print(a.description)"
    processes = [start(code) for _ in range(8)]
    answers = {process.communicate()[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(answers) == 1
    assert len(compiles(cache_home)) == 1


def test_plans_do_not_share_an_entry(cache_home):
    assert artifact_for(with_head_dim(64), compiler=FAKE).key != artifact_for(PLAN, compiler=FAKE).key
    assert len(compiles(cache_home)) == 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def describe(**changes):
    def damage(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


DAMAGES = {
    "library_truncated": ("kernel.so", truncate),
    "library_bit_flipped": ("kernel.so", flip),
    "library_empty": ("kernel.so", lambda path: path.write_bytes(b"")),
    "library_gone": ("kernel.so", Path.unlink),
    "ptx_bit_flipped": ("kernel.ptx", flip),
    "ptx_gone": ("kernel.ptx", Path.unlink),
    "description_truncated": ("artifact.json", truncate),
    "description_empty": ("artifact.json", lambda path: path.write_bytes(b"")),
    "description_binary": ("artifact.json", lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "description_a_list": ("artifact.json", lambda path: path.write_text("[1]")),
    "description_gone": ("artifact.json", Path.unlink),
    "description_of_another_key": ("artifact.json", describe(key="0" * 32 + "-" + "0" * 12)),
    "description_with_a_field_too_many": ("artifact.json", describe(surprise=1)),
    "description_of_another_format": ("artifact.json", describe(format=FORMAT + 1)),
    "description_with_kernels_of_another_kind": ("artifact.json", describe(kernels=[{"name": "k"}])),
    "description_with_a_field_too_few": ("artifact.json", lambda path: path.write_text('{"format": 1}')),
    "description_with_digests_of_another_kind": ("artifact.json", describe(sha256=[])),
}


@pytest.mark.fault("G10")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_compiled_again_and_replaced(cache_home, damage):
    whole = artifact_for(PLAN, compiler=FAKE)
    name, act = DAMAGES[damage]
    act(entry() / name)
    with pytest.warns(ArtifactWarning, match="damaged"):
        again = artifact_for(PLAN, compiler=FAKE)
    assert len(compiles(cache_home)) == 2
    assert again.description.sha256 == whole.description.sha256
    assert read_artifact(entry()) == again
    assert artifact_for(PLAN, compiler=FAKE) == again
    assert len(compiles(cache_home)) == 2


def test_an_entry_that_is_a_file_is_replaced(cache_home):
    entry().parent.mkdir(parents=True)
    entry().write_text("not a folder")
    assert artifact_for(PLAN, compiler=FAKE).folder == entry()
    assert entry().is_dir()


@pytest.mark.fault("G10")
def test_entry_appears_whole_or_not_at_all(tmp_path):
    folder = ArtifactFolder(tmp_path / "folder")
    good = artifact_for(PLAN, compiler=FAKE)
    seen = []

    def build(staging: Path) -> None:
        for file in good.folder.iterdir():
            shutil.copy(file, staging)
            seen.append((folder.root / good.key).exists())

    artifact, built = folder.get_or_build(good.key, build)
    assert built
    assert seen == [False, False, False]
    assert artifact == replace(good, folder=folder.root / good.key)
    assert not list(folder.root.glob(f".{good.key}*"))


def test_the_size_of_a_cache_is_told_while_others_build_in_it(tmp_path):
    kept = tmp_path / "1" / "kept"
    kept.mkdir(parents=True)
    (kept / "artifact.json").write_text("{}")
    stop = threading.Event()

    def build():
        while not stop.is_set():
            for name in (".being-built", "short-lived"):
                folder = tmp_path / "1" / name
                folder.mkdir()
                (folder / "kernel.so").write_bytes(b"12")
                shutil.rmtree(folder)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        found = [usage(tmp_path) for _ in range(2000)]
    finally:
        stop.set()
        thread.join()
    assert {count for count, _ in found} == {1}
    assert {size for _, size in found} <= {2, 4}


def test_failed_build_leaves_nothing_and_the_next_one_works(cache_home):
    with pytest.raises(CompileError, match="compiled for sm_80, and the plan asks for sm_90a"):
        artifact_for(PLAN, compiler="host.artifact_kernel:compile_for_another_arch")
    assert [path.name for path in entry().parent.iterdir()] == [".locks"]
    assert artifact_for(PLAN, compiler=FAKE).folder == entry()


def test_process_killed_while_compiling_leaves_no_entry_and_no_lock(cache_home):
    hanging = start(f"{SLEEP}; {COMPILE}")
    deadline = time.monotonic() + 60
    while not compiles(cache_home) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(entry().parent.glob(f".{entry().name}.*"))
    hanging.send_signal(signal.SIGKILL)
    hanging.wait()
    assert not entry().exists()
    assert artifact_for(PLAN, compiler=FAKE).folder == entry()
    assert not list(entry().parent.glob(f".{entry().name}.*"))


def test_cache_is_private_to_the_user(cache_home):
    artifact_for(PLAN, compiler=FAKE)
    root = user_cache_root()
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o777)
    artifact_for(PLAN, compiler=FAKE)
    assert root.stat().st_mode & 0o777 == 0o700


def test_cache_of_another_user_is_not_used(cache_home, monkeypatch):
    artifact_for(PLAN, compiler=FAKE)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.warns(ArtifactWarning, match="belongs to another user"):
        artifact = artifact_for(PLAN, compiler=FAKE)
    assert not artifact.folder.is_relative_to(user_cache_root())
    assert len(compiles(cache_home)) == 2


def test_without_a_cache_kernels_still_compile_once_a_process_with_one_warning(cache_home, monkeypatch):
    (cache_home / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home / "file" / "below"))
    with pytest.warns(ArtifactWarning, match="cannot be written") as given:
        first = artifact_for(PLAN, compiler=FAKE)
    assert len(given) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert artifact_for(PLAN, compiler=FAKE) == first
    assert len(compiles(cache_home)) == 1
    child = start(f"{COMPILE}; print(a.folder); assert a.library.is_file()")
    folder = Path(child.communicate()[0].strip())
    assert child.returncode == 0
    assert not folder.exists(), "the folder of a process is to go with it"


def test_cache_that_becomes_read_only_still_serves_what_it_has(cache_home, monkeypatch):
    kept = artifact_for(PLAN, compiler=FAKE)
    lock = ArtifactFolder._lock

    def refuse(folder, key):
        if folder.root.is_relative_to(user_cache_root()):
            raise PermissionError("read-only")
        return lock(folder, key)

    monkeypatch.setattr(ArtifactFolder, "_lock", refuse)
    assert artifact_for(PLAN, compiler=FAKE) == kept
    with pytest.warns(ArtifactWarning, match="read-only"):
        other = artifact_for(with_head_dim(64), compiler=FAKE)
    assert not other.folder.is_relative_to(user_cache_root())


def test_compiling_leaves_the_environment_alone(cache_home):
    before = dict(os.environ)
    artifact_for(PLAN, compiler=FAKE)
    assert dict(os.environ) == before


def test_variables_of_the_compiler_do_not_reach_a_kernel(cache_home, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_COMPILER_OPT", "opt-level=0")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    artifact_for(PLAN, compiler=FAKE)
    assert compiles(cache_home) == ["128 False []"]
    assert os.environ["CUTE_DSL_ARCH"] == "sm_100a"


def test_machine_without_a_compiler_reads_the_cache_whatever_compiled_it(cache_home, monkeypatch):
    kept = artifact_for(PLAN, compiler=FAKE)
    monkeypatch.setattr(store, "toolchain", lambda: None)
    assert artifact_for(PLAN) == kept
    with pytest.raises(KernelUnavailableError, match=r"Install nvidia-cutlass-dsl.*use_bundle") as raised:
        artifact_for(with_head_dim(64))
    assert plan_key(with_head_dim(64)) in str(raised.value)
    assert "head_dim 64" in str(raised.value)


@pytest.mark.fault("F8")
@pytest.mark.parametrize("version", ["4.6.0", "4.6.1", "4.7.2", "4.9.0", "4.80.0"])
def test_versions_of_the_compiler_that_kernels_are_not_written_for_are_refused(
    cache_home, monkeypatch, version
):
    other = Toolchain((("nvidia-cutlass-dsl", version),), 13)
    for module in ("store", "build"):
        monkeypatch.setattr(f"attn4.artifact.{module}.toolchain", lambda: other)
    with pytest.raises(CompileError, match=rf"{version}.*install.*4\.8") as raised:
        artifact_for(PLAN, compiler=FAKE)
    assert ("never returned" in str(raised.value)) == version.startswith("4.6")
    assert compiles(cache_home) == []


def test_another_toolchain_compiles_anew(cache_home, monkeypatch):
    artifact_for(PLAN, compiler=FAKE)
    other = Toolchain((("nvidia-cutlass-dsl", "4.8.99"),), 13)
    for module in ("store", "build"):
        monkeypatch.setattr(f"attn4.artifact.{module}.toolchain", lambda: other)
    newer = artifact_for(PLAN, compiler=FAKE)
    assert len(compiles(cache_home)) == 2
    assert ArtifactFolder(newer.folder.parent).find(plan_key(PLAN), None) == newer
    assert (
        ArtifactFolder(newer.folder.parent).find(plan_key(PLAN), toolchain()).description.dsl_version
        != "4.8.99"
    )
