"""What a refused call says to a user of the torch functions: Python's names, allowed dtypes, nothing of the C ABI."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

import gatedelta  # noqa: E402
from gatedelta import _lib  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from gatedelta._operators import ops, queries  # noqa: E402
from test_torch_calls import make  # noqa: E402

from tools.dev_paths import ROOT  # noqa: E402

# Names of the C ABI that no Python function has.
C_NAMES = re.compile(
    r"GD_|gd_|aoti_|\b(initial_indices|final_indices|saved_bytes|has_scale|d_o|d_final_state|beta_kind|state_layout|"
    r"gate|isa|null)\b"
)


def test_option_bits_are_those_of_the_binding():
    header = (ROOT / "bindings" / "torch" / "inputs.hpp").read_text()
    theirs = {name.lower(): 1 << int(bit) for name, bit in re.findall(r"\bk(\w+) = 1 << (\d+)", header)}
    names = "GATE_RAW BETA_LOGIT BETA_LOGIT_DOUBLED STATE_V_FIRST L2NORM FINAL_STATE UNCUT BATCH_INVARIANT "
    names = (names + "SMALL_WORKSPACE TILED_KEY_HEADS").split()
    assert theirs == {name.replace("_", "").lower(): getattr(ops, name) for name in names}


def state(*shape):
    return torch.zeros(shape)


FLOATS = "must be float32, bfloat16 or float16$"
INTEGERS = "must be int32 or int64$"
STATE, POOL, SLOTS = state(1, 2, 32, 16), state(4, 2, 32, 16), torch.tensor([1, 1])
WITHOUT_GATE = "is given, but it acts only on a raw g .use_gate_in_kernel.: leave it out$"

CHUNK = {
    "A_log without the gate": ({"A_log": state(2)}, f"^A_log {WITHOUT_GATE}"),
    "dt_bias without the gate": ({"dt_bias": state(2)}, f"^dt_bias {WITHOUT_GATE}"),
    "shape of out": ({"out": state(1, 70, 2, 32)}, r"^out: shape is \[1, 70, 2, 32\], must be"),
    "slots without a pool": (
        {"initial_state_indices": SLOTS[:1]},
        "^initial_state_indices is given without initial_state$",
    ),
    "slot past the pool": (
        {"initial_state": POOL, "initial_state_indices": torch.tensor([4])},
        r"^initial_state_indices\[0\] is 4, but initial_state has 4 slots$",
    ),
    "slot past the written pool": (
        {"final_state": POOL, "final_state_indices": torch.tensor([5])},
        r"^final_state_indices\[0\] is 5, but final_state has 4 slots$",
    ),
    "length of slots": (
        {"final_state": POOL, "final_state_indices": SLOTS},
        r"^final_state_indices: shape is \[2\]",
    ),
    "slot written twice": (
        {"final_state": POOL, "final_state_indices": SLOTS, "cu_seqlens": torch.tensor([0, 10, 70])},
        r"^final_state_indices\[1\]: slot 1 is written more than once$",
    ),
    "infinite scale": ({"scale": float("inf")}, "^scale is inf, must be finite$"),
    "float64 state": ({"initial_state": STATE.double()}, f"^initial_state: dtype is float64, {FLOATS}"),
    "fp8 state": (
        {"initial_state": STATE.to(torch.float8_e4m3fn)},
        f"^initial_state: dtype is float8_e4m3fn, {FLOATS}",
    ),
    "int32 state": ({"initial_state": STATE.int()}, f"^initial_state: dtype is int32, {FLOATS}"),
    "int16 offsets": ({"cu_seqlens": torch.tensor([0, 70]).short()}, f"^cu_seqlens: dtype is int16, {INTEGERS}"),
    "float offsets": ({"cu_seqlens": torch.tensor([0.0, 70.0])}, f"^cu_seqlens: dtype is float32, {INTEGERS}"),
    "bool slots": (
        {"initial_state": POOL, "initial_state_indices": torch.tensor([True])},
        f"^initial_state_indices: dtype is bool, {INTEGERS}",
    ),
    "buffer on meta": ({"out": state(1, 70, 2, 16).to("meta")}, "^out is on meta, but q is on cpu$"),
    "state on meta": ({"final_state": STATE.to("meta")}, "^final_state is on meta, but q is on cpu$"),
    "offsets on meta": (
        {"out": state(1, 70, 2, 16), "cu_seqlens": torch.tensor([0, 70]).to("meta")},
        "^cu_seqlens is on meta, but q is on cpu$",
    ),
}


def check_message(caught, pattern):
    text = str(caught.value)
    assert text.startswith("gatedelta: "), text
    text = text.removeprefix("gatedelta: ")
    assert re.search(pattern, text), text
    assert not C_NAMES.search(text), text


@pytest.mark.parametrize("name", CHUNK)
def test_chunk(name):
    arguments, pattern = CHUNK[name]
    with pytest.raises(ValueError) as caught:
        gd.chunk_gated_delta_rule(*make()[:5], **arguments)
    check_message(caught, pattern)


def test_overlap():
    q, k, v, g, beta, _ = make()
    with pytest.raises(ValueError) as caught:
        gd.chunk_gated_delta_rule(q, k, v, g, beta, out=v)
    check_message(caught, "^v and out overlap in memory$")


@pytest.mark.parametrize(
    "arguments, pattern",
    [
        (
            {"final_state": POOL, "final_state_indices": torch.tensor([9])},
            r"^final_state_indices\[0\] is 9",
        ),
        ({"accept_lengths": torch.tensor([1])}, "^accept_lengths is given without final_state$"),
        (
            {"step_states": POOL, "step_indices": torch.tensor([[4] * 3])},
            r"^step_indices\[0, 0\] is 4, but",
        ),
        ({"step_states": state(1, 3, 2, 32, 16), "accept_lengths": torch.tensor([0.5])}, "^accept_lengths"),
    ],
)
def test_recurrent(arguments, pattern):
    q, k, v, g, beta, _ = make(T=3)
    with pytest.raises(ValueError) as caught:
        gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **arguments)
    check_message(caught, pattern)


def test_recurrent_with_nothing_to_compute():
    q, k, v, g, beta, _ = make(T=3)
    with pytest.raises(ValueError, match="output_o=False leaves nothing to compute: give final_state= or step_states="):
        gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, output_o=False)


def test_backward():
    q, k, v, g, beta, h0 = make()
    for arguments, pattern in (
        ({"do": v[:, 1:]}, r"^do: shape is \[1, 69, 2, 16\], must be"),
        ({"do": v, "dht": h0[..., 1:]}, "^dht: shape is"),
        ({"do": v.double()}, f"^do: dtype is float64, {FLOATS}"),
    ):
        with pytest.raises(ValueError) as caught:
            gd.chunk_gated_delta_rule_bwd(q, k, v, g, beta, None, **arguments)
        check_message(caught, pattern)


def test_messages_about_cuda():
    """Of the library's own checks, which need no GPU."""
    q, k, v, g, beta, _ = make(K=128, V=128, dtype=torch.bfloat16)

    def refusal(args, query):
        args.exec.device = _lib.CUDA
        for name, tensor in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
            setattr(args.inputs, name, queries.describe(tensor, name))
        args.out = queries.describe(v, "out")
        with pytest.raises(_lib.UnsupportedError) as caught:
            _lib.size_query(query, args)
        return str(caught.value)

    args = _lib.RecurrentArgs()
    args.inputs.cu_seqlens = queries.describe(torch.empty(1 << 27, dtype=torch.int32, device="meta"), "cu_seqlens")
    message = refusal(args, "gd_recurrent_workspace")
    assert message.startswith("N * Hv is 134217727 * 2, must be at most") and not C_NAMES.search(message)
    args = _lib.ForwardArgs()
    args.saved_bytes = 1
    args.inputs.initial_state_indices = args.final_state_indices = queries.describe(
        torch.tensor([0]), "initial_state_indices"
    )
    args.inputs.initial_state = args.final_state = queries.describe(state(1, 2, 128, 128), "initial_state")
    text = refusal(args, "gd_forward_workspace")
    assert "initial_state_indices and final_state_indices" in text and not C_NAMES.search(text)


def test_unusable_instruction_set(run_python):
    """GATEDELTA_ISA is what the user set, so it is what the message names."""
    code = (
        "import torch, gatedelta.torch as gd; x = torch.ones(1, 3, 1, 16); g = torch.zeros(1, 3, 1); "
        "gd.chunk_gated_delta_rule(x, x, x, g, g)"
    )
    unusable = {"avx2", "neon"} - set(gatedelta.info()["cpu_isa_usable"])
    result = run_python("-c", code, env={"GATEDELTA_ISA": (isa := unusable.pop())}, check=False)
    assert f"UnsupportedError: GATEDELTA_ISA is {isa}, which " in result.stderr


def test_out_of_memory_shows_torchs_text():
    q = torch.zeros(1, 1, 1, 16).expand(1, 2**43, 1, 16)  # its o would take 2^49 bytes
    gates = torch.zeros(1, 1, 1).expand(1, 2**43, 1)
    with pytest.raises(RuntimeError) as caught:
        gd.chunk_gated_delta_rule(q, q, q, gates, gates)
    text = str(caught.value)
    if torch.__version__ >= (2, 13):
        assert re.search("^gatedelta failed: .*memory.*562949953421312", text, re.DOTALL) and "aoti" not in text, text
    else:
        assert text == "gatedelta failed: torch failed in aoti_torch_empty_strided"


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("position", range(5))
def test_numpy_arrays_are_a_type_error(position, grad):
    tensors = make()[:5]
    tensors[position] = tensors[position].numpy()
    name = ("q", "k", "v", "g", "beta")[position]
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, not numpy.ndarray"),
    ):
        gd.chunk_gated_delta_rule(*tensors)
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, not numpy.ndarray"),
    ):
        gd.fused_recurrent_gated_delta_rule(*tensors[:4], beta=tensors[4])


@pytest.mark.parametrize(
    "name, function",
    [
        *((name, gd.chunk_gated_delta_rule) for name in (
            "initial_state", "cu_seqlens", "A_log", "dt_bias", "initial_state_indices", "out", "final_state",
            "final_state_indices", "checkpoints", "checkpoint_indices",
        )),
        *((name, gd.recurrent_gated_delta_rule) for name in ("out", "accept_lengths", "step_states", "step_indices")),
    ],
)  # fmt: skip
def test_no_other_argument_takes_a_list(name, function):
    q, k, v, g, beta, _ = make()
    with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, not builtins.list"):
        function(q, k, v, g=g, beta=beta, **{name: [1.0]})
