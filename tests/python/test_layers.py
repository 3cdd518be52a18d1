"""Which folder may include which. docs/design.md describes the layers; this table is what holds the code to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PUBLIC = "include/gatedelta"

# A room is a folder, or a single file that is more open or more closed than its folder. A file belongs to the room with
# the longest matching path. It may include its own room and those listed here, which stand above it in the table.
ROOMS = {
    # what everybody may include
    PUBLIC: [],
    "src/core": [PUBLIC],
    # CPU backend
    "src/cpu/backend.hpp": ["src/core"],
    "src/cpu": ["src/core", "src/cpu/backend.hpp"],
    # CUDA: what all kernels share, without a word of an architecture
    "src/cuda/device": ["src/core"],
    "src/cuda/backend.hpp": ["src/core", "src/cuda/device"],
    "src/cuda/limits.hpp": ["src/core", "src/cuda/device"],
    "src/cuda/limits.cpp": ["src/core", "src/cuda/limits.hpp"],
    "src/cuda/kernels.hpp": ["src/core", "src/cuda/backend.hpp"],
    "src/cuda/no_cuda.cpp": ["src/cuda/kernels.hpp"],
    "src/cuda/host": ["src/cuda/device", "src/cuda/backend.hpp", "src/cuda/kernels.hpp"],
    # a family of kernels each, for compute capability 8.0 and later; config.hpp is plain arithmetic
    "src/cuda/decode/config.hpp": ["src/core", "src/cuda/device"],
    "src/cuda/decode": ["src/cuda/device", "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/decode/config.hpp"],
    "src/cuda/conv1d/update_vec.hpp": ["src/core", "src/cuda/device"],
    "src/cuda/conv1d/config.hpp": ["src/core", "src/cuda/device", "src/cuda/conv1d/update_vec.hpp"],
    "src/cuda/conv1d": [
        "src/core", "src/cuda/device", "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/conv1d/update_vec.hpp",
        "src/cuda/conv1d/config.hpp",
    ],
    "src/cuda/gated_norm/config.hpp": ["src/core", "src/cuda/device"],
    "src/cuda/gated_norm": [
        "src/cuda/device", "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/gated_norm/config.hpp",
    ],
    "src/cuda/layer/config.hpp": [
        "src/core", "src/cuda/device", "src/cuda/decode/config.hpp", "src/cuda/conv1d/update_vec.hpp",
        "src/cuda/gated_norm/config.hpp",
    ],
    "src/cuda/layer": [
        "src/cuda/device", "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/decode", "src/cuda/conv1d",
        "src/cuda/gated_norm", "src/cuda/layer/config.hpp",
    ],
    "src/cuda/state_merge": ["src/cuda/kernels.hpp", "src/cuda/host"],
    "src/cuda/fp32/config.hpp": ["src/core", "src/cuda/device"],
    "src/cuda/fp32": [
        "src/cuda/device", "src/cuda/limits.hpp", "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/fp32/config.hpp",
    ],
    # the chunked kernels for all of these devices
    "src/cuda/portable": ["src/core", "src/cuda/device"],
    "src/cuda/portable/schedule": ["src/cuda/portable"],
    "src/cuda/portable/launch.hpp": ["src/cuda/host", "src/cuda/portable/schedule"],
    "src/cuda/portable/chain": ["src/cuda/device", "src/cuda/portable"],
    "src/cuda/portable/prepare": [
        "src/cuda/device", "src/cuda/host", "src/cuda/portable", "src/cuda/portable/launch.hpp",
    ],
    "src/cuda/portable/cut": [
        "src/cuda/device", "src/cuda/host", "src/cuda/portable", "src/cuda/portable/launch.hpp",
        "src/cuda/portable/prepare",
    ],
    "src/cuda/portable/forward": [
        "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/portable/launch.hpp", "src/cuda/portable/chain",
    ],
    "src/cuda/portable/backward/config.hpp": ["src/cuda/portable/schedule"],
    "src/cuda/portable/backward": [
        "src/cuda/device", "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/portable/launch.hpp",
        "src/cuda/portable/chain", "src/cuda/portable/prepare", "src/cuda/portable/backward/config.hpp",
    ],
    "src/cuda/portable/summary/config.hpp": ["src/cuda/portable/schedule"],
    "src/cuda/portable/summary": [
        "src/cuda/device", "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/portable/launch.hpp",
        "src/cuda/portable/summary/config.hpp",
    ],
    "src/cuda/portable/limits.cpp": [
        "src/cuda/limits.hpp", "src/cuda/kernels.hpp", "src/cuda/portable/backward/config.hpp",
        "src/cuda/portable/summary/config.hpp",
    ],
    # the chunked kernels for Hopper: forward, backward and summary stand on chain and prepare, and never on each other
    "src/cuda/sm90": [PUBLIC, "src/cuda/device"],
    "src/cuda/sm90/schedule": ["src/cuda/device", "src/cuda/sm90"],
    "src/cuda/sm90/params.hpp": ["src/cuda/device", "src/cuda/sm90/schedule"],
    "src/cuda/sm90/lists": ["src/cuda/device", "src/cuda/sm90", "src/cuda/sm90/schedule", "src/cuda/sm90/params.hpp"],
    "src/cuda/sm90/prepare/config.hpp": ["src/cuda/device", "src/cuda/sm90"],
    "src/cuda/sm90/prepare": [
        "src/cuda/device", "src/cuda/sm90", "src/cuda/sm90/params.hpp", "src/cuda/sm90/lists",
        "src/cuda/sm90/prepare/config.hpp",
    ],
    "src/cuda/sm90/chain": [
        "src/cuda/sm90", "src/cuda/sm90/schedule", "src/cuda/sm90/params.hpp", "src/cuda/sm90/prepare/config.hpp",
    ],
    "src/cuda/sm90/workspace": [
        "src/core", "src/cuda/device", "src/cuda/decode/config.hpp", "src/cuda/sm90/schedule",
        "src/cuda/sm90/prepare/config.hpp",
    ],
    "src/cuda/sm90/host": [
        "src/cuda/device", "src/cuda/host", "src/cuda/sm90", "src/cuda/sm90/params.hpp", "src/cuda/sm90/workspace",
    ],
    "src/cuda/sm90/forward": [
        "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/decode", "src/cuda/sm90/lists", "src/cuda/sm90/prepare",
        "src/cuda/sm90/chain", "src/cuda/sm90/workspace", "src/cuda/sm90/host",
    ],
    "src/cuda/sm90/backward": [
        "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/sm90", "src/cuda/sm90/schedule", "src/cuda/sm90/params.hpp",
        "src/cuda/sm90/lists", "src/cuda/sm90/prepare/config.hpp", "src/cuda/sm90/prepare", "src/cuda/sm90/chain",
        "src/cuda/sm90/workspace", "src/cuda/sm90/host",
    ],
    "src/cuda/sm90/summary": [
        "src/cuda/device", "src/cuda/kernels.hpp", "src/cuda/host", "src/cuda/sm90", "src/cuda/sm90/params.hpp",
        "src/cuda/sm90/lists", "src/cuda/sm90/prepare", "src/cuda/sm90/chain", "src/cuda/sm90/workspace",
        "src/cuda/sm90/host",
    ],
    "src/cuda/sm90/limits.cpp": ["src/cuda/limits.hpp", "src/cuda/kernels.hpp", "src/cuda/sm90/workspace"],
    # which kernels serve a call
    "src/cuda/dispatch.cpp": [
        "src/cuda/backend.hpp", "src/cuda/limits.hpp", "src/cuda/kernels.hpp", "src/cuda/conv1d/config.hpp",
        "src/cuda/gated_norm/config.hpp", "src/cuda/layer/config.hpp", "src/cuda/fp32/config.hpp",
        "src/cuda/portable/backward/config.hpp", "src/cuda/portable/summary/config.hpp", "src/cuda/sm90/workspace",
    ],
    # checks calls and picks the device
    "src/api": [PUBLIC, "src/core", "src/cpu/backend.hpp", "src/cuda/backend.hpp"],
    # callers of the C ABI
    "bindings/torch": [PUBLIC],
    "examples": [PUBLIC],
    "testing": [PUBLIC],
    "cli": [PUBLIC, "testing"],
    "cli/explain.cpp": ["src/cuda/sm90/workspace", "cli"],  # prints plans, of which the C ABI says nothing
    "tests/cpp/api": [PUBLIC],
    "tests/cpp/ops": ["testing"],
    "tests/cpp/numerics": [PUBLIC, "testing", "cli", "tests/cpp/ops"],
    "tests/cpp/gpu": ["testing", "tests/cpp/ops"],
    "tests/cpp/soak": ["testing", "cli"],
    "tests/cpp/cuda": [
        "src/cuda/device", "src/cuda/decode/config.hpp", "src/cuda/conv1d/config.hpp", "src/cuda/gated_norm/config.hpp",
        "src/cuda/layer/config.hpp", "src/cuda/fp32/config.hpp", "src/cuda/portable/schedule",
        "src/cuda/portable/backward/config.hpp", "src/cuda/sm90", "src/cuda/sm90/schedule", "src/cuda/sm90/chain",
        "src/cuda/sm90/workspace",
    ],
    "tests/cpp/emulate": [
        "src/cuda/device", "src/cuda/fp32", "src/cuda/portable/schedule", "src/cuda/portable/prepare",
        "src/cuda/portable/cut", "src/cuda/portable/forward", "src/cuda/portable/backward/config.hpp",
        "src/cuda/portable/backward", "src/cuda/portable/summary/config.hpp", "src/cuda/portable/summary", "testing",
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


def test_every_arrow_points_up_the_table():
    """So no two rooms include each other, by however many steps."""
    order = list(ROOMS)
    assert [
        f"{room} includes {target}, which stands below it"
        for room, targets in ROOMS.items()
        for target in targets
        if order.index(target) >= order.index(room)
    ] == []


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
        ("src/api/validate/inputs.cpp", "cuda/sm90/workspace/forward.hpp"),
        ("src/cpu/dispatch.cpp", "cuda/backend.hpp"),  # sideways
        ("src/cuda/sm90/backward/backward.cu", "cuda/sm90/forward/launch.cuh"),
        ("src/cuda/sm90/chain/chain.cuh", "cuda/sm90/forward/launch.cuh"),
        ("src/cuda/decode/generic.cuh", "cuda/sm90/device.cuh"),
        ("src/cuda/device/warp.cuh", "cuda/sm90/ptx.cuh"),  # what all share includes no architecture's
        ("src/cuda/host/launch.cuh", "cuda/sm90/params.hpp"),
        ("src/cuda/portable/forward/forward.cu", "cuda/sm90/forward/launch.cuh"),
        ("src/cuda/portable/forward/forward.cu", "cuda/portable/backward/gates.cuh"),
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
