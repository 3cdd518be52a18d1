"""Which folder may include which. docs/design.md describes the layers; this table is what holds the code to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PUBLIC = "include/gatedelta"

# A room is a folder, or a single file that is more open or more closed than its folder. A file belongs to the room with
# the longest matching path, and may include its own room and those listed here.
ROOMS = {
    PUBLIC: [],
    "src/core": [PUBLIC],
    "src/api": [PUBLIC, "src/core", "src/cpu/backend.hpp", "src/cuda/backend.hpp"],
    # CPU backend
    "src/cpu/backend.hpp": ["src/core"],
    "src/cpu": ["src/core", "src/cpu/backend.hpp"],
    # CUDA backend: what the API layer sees, and what needs no CUDA
    "src/cuda/backend.hpp": ["src/core"],
    "src/cuda/backend.cpp": [
        "src/cuda/backend.hpp", "src/cuda/limits.hpp", "src/cuda/workspace", "src/cuda/conv1d/config.hpp",
        "src/cuda/gated_norm/config.hpp", "src/cuda/layer/config.hpp", "src/cuda/portable/backward_config.hpp",
        "src/cuda/portable/summary_config.hpp", "src/cuda/fp32/config.hpp",
    ],
    "src/cuda/limits.hpp": ["src/core"],
    "src/cuda/limits.cpp": [
        "src/core", "src/cuda/limits.hpp", "src/cuda/workspace", "src/cuda/decode/config.hpp",
        "src/cuda/gated_norm/config.hpp", "src/cuda/portable/backward_config.hpp",
        "src/cuda/portable/summary_config.hpp", "src/cuda/fp32/config.hpp",
    ],
    "src/cuda/workspace": [
        "src/core", "src/cuda/tensors.hpp", "src/cuda/schedule", "src/cuda/sm90/prepare/config.hpp",
        "src/cuda/decode/config.hpp",
    ],
    # what host and device share
    "src/cuda/host_device.hpp": [],
    "src/cuda/tensors.hpp": ["src/core", "src/cuda/host_device.hpp"],
    "src/cuda/warp.cuh": [],
    "src/cuda/pdl.cuh": [],
    "src/cuda/params.hpp": ["src/cuda/tensors.hpp", "src/cuda/schedule"],
    "src/cuda/schedule": [
        "src/cuda/host_device.hpp", "src/cuda/tensors.hpp", "src/cuda/params.hpp", "src/cuda/warp.cuh",
        "src/cuda/sm90/ptx.cuh",
    ],
    "src/cuda/host": [
        "src/cuda/backend.hpp", "src/cuda/tensors.hpp", "src/cuda/params.hpp", "src/cuda/workspace",
        "src/cuda/sm90/tiles.hpp",
    ],
    # kernels: forward and backward stand on chain and prepare, and never on each other
    "src/cuda/sm90/tiles.hpp": ["src/cuda/host_device.hpp"],
    "src/cuda/sm90/ptx.cuh": ["src/cuda/sm90/tiles.hpp"],
    "src/cuda/sm90": [
        PUBLIC, "src/cuda/host_device.hpp", "src/cuda/tensors.hpp", "src/cuda/sm90/ptx.cuh",
    ],
    "src/cuda/sm90/prepare/config.hpp": ["src/cuda/tensors.hpp", "src/cuda/sm90/tiles.hpp"],
    "src/cuda/sm90/prepare": [
        "src/cuda/params.hpp", "src/cuda/warp.cuh", "src/cuda/schedule", "src/cuda/sm90",
        "src/cuda/sm90/prepare/config.hpp",
    ],
    "src/cuda/sm90/chain": [
        "src/cuda/params.hpp", "src/cuda/schedule", "src/cuda/sm90", "src/cuda/sm90/tiles.hpp",
        "src/cuda/sm90/prepare/config.hpp",
    ],
    "src/cuda/sm90/forward": [
        "src/cuda/backend.hpp", "src/cuda/limits.hpp", "src/cuda/host", "src/cuda/schedule", "src/cuda/workspace",
        "src/cuda/decode", "src/cuda/sm90/chain", "src/cuda/sm90/prepare",
    ],
    "src/cuda/sm90/backward": [
        "src/cuda/backend.hpp", "src/cuda/limits.hpp", "src/cuda/host", "src/cuda/schedule", "src/cuda/workspace",
        "src/cuda/params.hpp",
        "src/cuda/sm90", "src/cuda/sm90/tiles.hpp", "src/cuda/sm90/chain", "src/cuda/sm90/prepare",
        "src/cuda/sm90/prepare/config.hpp",
    ],
    # chunked kernels for more devices than sm90, so nothing of it
    "src/cuda/portable/prices.hpp": ["src/cuda/host_device.hpp"],
    "src/cuda/portable/config.hpp": [
        "src/core", "src/cuda/host_device.hpp", "src/cuda/tensors.hpp", "src/cuda/schedule",
        "src/cuda/portable/prices.hpp",
    ],
    "src/cuda/portable/backward_config.hpp": ["src/cuda/portable/cut.hpp"],
    "src/cuda/portable/cut.hpp": ["src/cuda/portable/config.hpp"],
    "src/cuda/portable/summary_config.hpp": ["src/cuda/portable/cut.hpp"],
    "src/cuda/portable/ptx.cuh": ["src/cuda/portable/config.hpp"],
    "src/cuda/portable": [
        "src/cuda/backend.hpp", "src/cuda/host", "src/cuda/schedule", "src/cuda/portable/backward_config.hpp",
        "src/cuda/portable/cut.hpp", "src/cuda/portable/ptx.cuh", "src/cuda/portable/summary_config.hpp",
    ],
    # fp32 inputs, for the same devices
    "src/cuda/fp32/config.hpp": [
        "src/core", "src/cuda/host_device.hpp", "src/cuda/tensors.hpp", "src/cuda/portable/config.hpp",
    ],
    "src/cuda/fp32": [
        "src/cuda/backend.hpp", "src/cuda/host", "src/cuda/portable", "src/cuda/fp32/config.hpp",
    ],
    "src/cuda/sm90/summary": [
        "src/cuda/backend.hpp", "src/cuda/limits.hpp", "src/cuda/host", "src/cuda/schedule", "src/cuda/workspace",
        "src/cuda/params.hpp", "src/cuda/warp.cuh", "src/cuda/sm90", "src/cuda/sm90/ptx.cuh", "src/cuda/sm90/chain",
        "src/cuda/sm90/prepare",
    ],
    # the fold of summaries, for more devices than sm90, so nothing of it
    "src/cuda/fold": ["src/cuda/backend.hpp", "src/cuda/host"],
    # recurrent steps: kernels for more devices than sm90, so nothing of it
    "src/cuda/decode/config.hpp": ["src/core", "src/cuda/host_device.hpp"],
    "src/cuda/decode/ptx.cuh": [],
    "src/cuda/decode/numbers.cuh": ["src/core", "src/cuda/decode/ptx.cuh"],
    "src/cuda/decode": [
        "src/cuda/backend.hpp", "src/cuda/host", "src/cuda/pdl.cuh", "src/cuda/decode/config.hpp",
        "src/cuda/decode/numbers.cuh", "src/cuda/decode/ptx.cuh",
    ],
    # gated norm, for the same devices
    "src/cuda/gated_norm/config.hpp": ["src/core", "src/cuda/decode/config.hpp"],
    "src/cuda/gated_norm": [
        "src/cuda/backend.hpp", "src/cuda/host", "src/cuda/pdl.cuh", "src/cuda/decode/numbers.cuh",
        "src/cuda/gated_norm/config.hpp",
    ],
    # convolution, for the same devices
    "src/cuda/conv1d/update_near.hpp": ["src/core", "src/cuda/host_device.hpp"],
    "src/cuda/conv1d/config.hpp": ["src/core", "src/cuda/host_device.hpp", "src/cuda/conv1d/update_near.hpp"],
    "src/cuda/conv1d": [
        "src/core", "src/cuda/backend.hpp", "src/cuda/host", "src/cuda/pdl.cuh", "src/cuda/conv1d/config.hpp",
        "src/cuda/conv1d/update_near.hpp", "src/cuda/decode/numbers.cuh",
    ],
    # the layer's step: all three
    "src/cuda/layer/config.hpp": [
        "src/core", "src/cuda/conv1d/update_near.hpp", "src/cuda/decode/config.hpp", "src/cuda/gated_norm/config.hpp",
    ],
    "src/cuda/layer": [
        "src/cuda/backend.hpp", "src/cuda/host", "src/cuda/conv1d", "src/cuda/decode", "src/cuda/gated_norm",
        "src/cuda/pdl.cuh", "src/cuda/layer/config.hpp",
    ],
    # callers of the C ABI
    "bindings/torch": [PUBLIC],
    "examples": [PUBLIC],
    "testing": [PUBLIC],
    "cli": [PUBLIC, "testing"],
    "cli/explain.cpp": ["cli", "src/cuda/workspace"],  # prints plans, of which the C ABI says nothing
    "tests/cpp/api": [PUBLIC],
    "tests/cpp/numerics": [PUBLIC, "testing", "cli"],
    "tests/cpp/gpu": ["testing"],
    "tests/cpp/cuda": [
        "src/cuda/workspace", "src/cuda/schedule", "src/cuda/conv1d/config.hpp", "src/cuda/decode/config.hpp",
        "src/cuda/gated_norm/config.hpp", "src/cuda/layer/config.hpp",
        "src/cuda/portable/backward_config.hpp", "src/cuda/portable/cut.hpp", "src/cuda/fp32/config.hpp",
        "src/cuda/sm90/tiles.hpp", "src/cuda/sm90/chain",
    ],
    "tests/cpp/emulate": [
        "testing", "src/cuda/portable", "src/cuda/portable/config.hpp", "src/cuda/portable/backward_config.hpp",
        "src/cuda/portable/cut.hpp", "src/cuda/portable/summary_config.hpp", "src/cuda/fp32",
    ],
    "tests/fuzz": [PUBLIC],
}  # fmt: skip

SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}
INCLUDE_ROOTS = ("src", "include", "")  # as the compiler is given them; a file's own folder comes first


def room_of(path: str) -> str | None:
    rooms = [room for room in ROOMS if path == room or path.startswith(room + "/")]
    return max(rooms, key=len, default=None)


def includes(path: str, text: str, files: set[str]) -> list[str]:
    """The files of this repository that `text` includes, as paths from its root."""
    found = []
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
        places = [(Path(place) / name).as_posix() for place in (str(Path(path).parent), *INCLUDE_ROOTS)]
        found.append(next((place for place in places if place in files), name))
    return found


def violations(sources: dict[str, str]) -> list[str]:
    found = []
    for path, text in sorted(sources.items()):
        room = room_of(path)
        if room is None:
            found.append(f"{path} is in no room: add its folder to ROOMS")
            continue
        for target in includes(path, text, set(sources)):
            if room_of(target) not in (room, *ROOMS[room]):
                found.append(f"{path} includes {target}, which {room} may not")
    return found


@pytest.fixture(scope="module")
def sources(root) -> dict[str, str]:
    folders = sorted({Path(room).parts[0] for room in ROOMS})
    files = [path for folder in folders for path in (root / folder).rglob("*") if path.suffix in SUFFIXES]
    return {path.relative_to(root).as_posix(): path.read_text() for path in files if path.is_file()}


def test_every_include_is_allowed(sources):
    assert violations(sources) == []


def test_every_room_is_there(root):
    assert [room for room in ROOMS if not (root / room).exists()] == []


def test_every_permission_is_used(sources):
    """A permission that no include needs is a hole in a wall."""
    used = {(room_of(path), room_of(target)) for path, text in sources.items()
            for target in includes(path, text, set(sources))}  # fmt: skip
    allowed = {(room, target) for room, targets in ROOMS.items() for target in targets}
    assert sorted(allowed - used) == []


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("src/core/problem.hpp", "cpu/plan.hpp"),  # upwards
        ("src/api/c_api.cpp", "cpu/plan.hpp"),  # past the backend's face
        ("src/api/validate/inputs.cpp", "cuda/workspace/forward.hpp"),
        ("src/cpu/dispatch.cpp", "cuda/backend.hpp"),  # sideways
        ("src/cuda/sm90/backward/backward.cu", "cuda/sm90/forward/launch.cuh"),
        ("src/cuda/sm90/chain/chain.cuh", "cuda/sm90/forward/launch.cuh"),
        ("src/cuda/decode/walk.cuh", "cuda/sm90/device.cuh"),
        ("cli/run.cpp", "core/problem.hpp"),  # around the C ABI
        ("cli/run.cpp", "../src/core/problem.hpp"),
        ("src/cpu/dispatch.cpp", "no/such/file.hpp"),
    ],
)
def test_a_forbidden_include_is_found(sources, path, include):
    changed = {**sources, path: f'#include "{include}"\n'}
    assert any(found.startswith(f"{path} includes ") for found in violations(changed))


def test_a_file_without_a_room_is_found(sources):
    assert violations({**sources, "src/new/file.cpp": ""}) == [
        "src/new/file.cpp is in no room: add its folder to ROOMS"
    ]
