"""gatedelta._plugins.limits: the plug-ins' limits are those of the library, and of the GPUs it runs on."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from gatedelta import _lib  # noqa: E402
from gatedelta._operators import queries  # noqa: E402
from gatedelta._plugins import limits  # noqa: E402

KINDS = (_lib.ForwardArgs, _lib.BackwardArgs, _lib.RecurrentArgs)
SIZES = (1, 8, 16, 24, 50, 64, 96, 128, 240, 250, 256, 257, 272, 512)


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability of every GPU, for a library with CUDA."""

    def clear():
        for function in (limits.build_refusal, limits._capability_refusal):
            function.cache_clear()

    def set_to(value, compiled=True):
        clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: value)
        monkeypatch.setattr(_lib, "get_info", lambda: SimpleNamespace(cuda_compiled=int(compiled)))

    yield set_to
    clear()


def library_takes(kind, device, dtype, K, V, Hk=1, Hv=2):
    """What a size query says, which needs no GPU."""
    args, name = kind(), kind.__name__.removesuffix("Args")
    args.exec.device = device
    q, v = (torch.empty(1, 70, heads, size, dtype=dtype) for heads, size in ((Hk, K), (Hv, V)))
    gates = torch.empty(1, 70, Hv)
    for field, tensor in {"q": q, "k": q, "v": v, "g": gates, "beta": gates}.items():
        setattr(args.inputs, field, queries.describe(tensor, field))
    if name == "Summary":
        args.local_state = queries.describe(torch.empty(1, Hv, K, V), "local_state")
    elif name == "Backward":
        args.do = args.dv = queries.describe(v, "do")
    else:
        args.out = queries.describe(v, "out")
    try:
        _lib.size_query(f"gd_{name.lower()}_workspace", args)
    except (_lib.UnsupportedError, ValueError):
        return False
    return True


@pytest.mark.parametrize("device", [_lib.CPU, _lib.CUDA])
@pytest.mark.parametrize("kind", KINDS)
def test_head_sizes_are_the_librarys(kind, device):
    for (K, V), dtype in itertools.product(itertools.product(SIZES, SIZES), limits.DTYPES):
        taken = limits.head_refusal(K, V) is None
        assert library_takes(kind, device, dtype, K, V) == taken, (K, V, dtype)


def test_limits_of_summaries_are_the_librarys():
    """They are what gatedelta.fla asks of a cp_context on a GPU."""
    takes = functools.partial(library_takes, _lib.SummaryArgs, _lib.CUDA)
    for K, V in itertools.product(SIZES, SIZES):
        taken = limits.head_refusal(K, V) is None
        assert takes(torch.bfloat16, K, V) == takes(torch.float16, K, V, 1, 300) == taken, (K, V)
        assert not takes(torch.float32, K, V)


def test_words():
    assert limits.head_refusal(64, 256) is None
    assert limits.head_refusal(64, 100) == ("head sizes are K = 64, V = 100; multiples of 16 up to 256 are taken")
    assert limits.head_refusal(0, 16) is not None
    assert limits.dtype_refusal(torch.float16) is None
    assert limits.dtype_refusal(torch.float64) == ("dtype is torch.float64; float32, bfloat16 and float16 are taken")
    assert limits.device_refusal(torch.device("cpu")) is None
    assert limits.device_refusal(torch.device("meta")) == "device is meta; cpu and cuda are taken"


@pytest.mark.parametrize(("value", "reason"), [
    ((7, 5), "compute capability 7.5, needed is 8.0 or later"),
    ((8, 0), None), ((8, 9), None), ((9, 0), None), ((10, 0), None), ((12, 1), None),
])  # fmt: skip
def test_gpus(capability, value, reason):
    capability(value)
    assert limits.device_refusal(torch.device("cuda", 1)) == reason


def test_gpus_of_others(capability, monkeypatch):
    capability((9, 0), compiled=False)
    assert limits.device_refusal(torch.device("cuda", 0)) == "this gatedelta was built without CUDA"
    capability((9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert limits.device_refusal(torch.device("cuda", 0)) == "this torch is for ROCm; of GPUs NVIDIA's are taken"


def test_torch_compile_does_not_look_into_it(capability):
    capability((8, 6))
    compiled = torch.compile(lambda x: x + (limits._gpu_refusal(0) is None), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 1
