"""Layer 4: a Plan becomes one loadable artefact, compiled once, kept on disk, loaded without a compiler.

``kernel_for`` is all that the layers above need. ``use_bundle`` and ``build_bundle`` serve machines
that have no CuTe DSL. The format and the rules are in ``docs/artifacts.md``.
"""

from attn4.artifact.artifact import Artifact, DamagedArtifactError
from attn4.artifact.bundle import Bundle, BundleReport, build_bundle, use_bundle
from attn4.artifact.errors import ArtifactWarning, CompileError, KernelUnavailableError
from attn4.artifact.key import plan_from_json, plan_key, plan_to_json
from attn4.artifact.store import artifact_for, kernel_for

__all__ = [
    "Artifact",
    "ArtifactWarning",
    "Bundle",
    "BundleReport",
    "CompileError",
    "DamagedArtifactError",
    "KernelUnavailableError",
    "artifact_for",
    "build_bundle",
    "kernel_for",
    "plan_from_json",
    "plan_key",
    "plan_to_json",
    "use_bundle",
]
