"""The operators as torch's compiler sees them: opcheck, fullgraph compilation forward and backward, dynamic shapes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gatedelta import _lib  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from gatedelta._operators import ops, queries  # noqa: E402
from test_torch_calls import make  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def arguments(*, in_place=False, packed=False, raw=False, pool=False, T=70):
    """The operators' common arguments, and v and the states to go on with."""
    q, k, v, g, beta, h0 = make(B=1 if packed else 2, T=T, H=2, HV=4, N=2)
    offsets = torch.tensor([0, 20, T]) if packed else None
    A_log, dt_bias = (torch.randn(4), torch.randn(4)) if raw else (None, None)
    indices = torch.tensor([1, 0]) if pool else None
    initial = None if in_place else h0
    options = ops.GATE_RAW if raw else 0
    return [q, k, v, g, beta, options, offsets, initial, None, A_log, dt_bias, indices], v, h0


VARIANTS = [{}, {"packed": True}, {"raw": True}, {"pool": True}]
IDS = ["dense", "packed", "raw", "pool"]


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_opcheck_functional(variant):
    (*tensors, options, offsets, initial, scale, A_log, dt_bias, indices), _, _ = arguments(**variant)
    for operator in (ops.chunk_fwd, ops.chunk_fwd_save, ops.recurrent):
        for wanted in (options, options | ops.FINAL_STATE):
            torch.library.opcheck(
                operator.__wrapped__, (*tensors, wanted, offsets, initial, scale, A_log, dt_bias, indices)
            )


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_opcheck_backward(variant):
    common, v, h0 = arguments(**variant)
    saved = ops.chunk_fwd_save(*common)[2]
    wanted = 0b00011111 | (0b01100000 if "raw" in variant else 0) | (0 if "pool" in variant else 0b10000000)
    d_o, d_states = torch.randn_like(v), torch.randn_like(h0)
    torch.library.opcheck(ops.chunk_bwd.__wrapped__, (*common, d_o, d_states, saved, wanted))
    torch.library.opcheck(ops.chunk_bwd.__wrapped__, (*common, d_o, None, None, 0b00000101))


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
def test_opcheck_out(in_place):
    common, v, h0 = arguments(in_place=in_place, pool=True, T=130)
    indices = torch.tensor([1, 0])  # as arguments() reads them
    checkpoints = torch.zeros(4, 4, 32, 16)
    torch.library.opcheck(
        ops.chunk_fwd_out.__wrapped__,
        (*common, torch.empty_like(v), h0.clone(), indices, in_place, checkpoints, None, 64),
    )
    steps = torch.zeros(2, 130, 4, 32, 16)
    torch.library.opcheck(
        ops.recurrent_out.__wrapped__,
        (*common, torch.empty_like(v), h0.clone(), indices, in_place, torch.tensor([3, 5]), steps, None),
    )
    torch.library.opcheck(
        ops.recurrent_out.__wrapped__, (*common, None, h0.clone(), indices, in_place, None, None, None)
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_fake_sizes_on_cuda(dynamic):
    """The shapes of CUDA results, which the compiler needs, are known without a GPU; for symbolic lengths, too."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        T = mode.shape_env.create_unbacked_symint() if dynamic else 70
        q = torch.empty(2, T, 2, 128, dtype=torch.bfloat16, device="cuda:0")
        v = torch.empty(2, T, 4, 128, dtype=torch.bfloat16, device="cuda:0")
        g = torch.empty(2, T, 4, device="cuda:0")
        o, state, saved = ops.chunk_fwd_save(q, q, v, g, g, ops.FINAL_STATE)
        gradients = ops.chunk_bwd(q, q, v, g, g, 0, *[None] * 6, torch.empty_like(v), None, saved, 0b00011111)
    assert o.is_cuda and o.dtype == torch.bfloat16 and o.shape == v.shape
    assert state.is_cuda and state.dtype == torch.float32 and state.shape == (2, 4, 128, 128)
    assert saved.is_cuda and saved.dtype == torch.uint8 and saved.dim() == 1
    if not dynamic:  # two sequences of two chunks, four heads; offsets; the work list; no saved state
        assert saved.shape == (2 * 2 * 4 * (6912 + 8) + 64 + 64 + 640 + 65536,)
    assert all(x.is_cuda and x.shape == y.shape for x, y in zip(gradients, (q, q, v, g, g), strict=False))


def test_fake_recurrent_on_cuda():
    with FakeTensorMode():
        q, v = (torch.empty(3, 4, heads, 64, dtype=torch.bfloat16, device="cuda:0") for heads in (2, 4))
        g = torch.empty(3, 4, 4, device="cuda:0")
        o, state = gd.fused_recurrent_gated_delta_rule(q, q, v, g, beta=g, output_final_state=True)
        pool = torch.empty(9, 4, 64, 64, device="cuda:0")
        slots = torch.empty(3, dtype=torch.int32, device="cuda:0")
        o_pool, returned = gd.fused_recurrent_gated_delta_rule(
            q, q, v, g, beta=g, initial_state=pool, final_state=pool, initial_state_indices=slots,
            final_state_indices=slots,
        )  # fmt: skip
    assert o.is_cuda and o.dtype == torch.bfloat16 and o.shape == v.shape and o_pool.shape == v.shape
    assert state.is_cuda and state.dtype == torch.float32 and state.shape == (3, 4, 64, 64) and returned is pool


def test_fake_saved_size_is_the_librarys():
    """The compiler learns the size that the library itself requires of a forward on CUDA."""
    shapes = [(B, T, HV, None) for B in (1, 3) for T in (0, 1, 64, 65, 1024, 5000) for HV in (2, 6)]
    shapes += [(1, T, HV, N) for T in (0, 65, 1000, 2049) for HV in (2, 6) for N in (1, 2, 17, 40)]
    for B, T, HV, N in shapes:
        with FakeTensorMode():
            q, v = (torch.empty(B, T, heads, 128, dtype=torch.bfloat16, device="cuda:0") for heads in (2, HV))
            gates = torch.empty(B, T, HV, device="cuda:0")
            offsets = None if N is None else torch.zeros(N + 1, dtype=torch.int32, device="cuda:0")
            saved = ops.chunk_fwd_save(q, q, v, gates, gates, 0, offsets)[2]
        args = _lib.ForwardArgs()
        args.exec.device = _lib.CUDA
        for name, tensor in {"q": q, "k": q, "v": v, "g": gates, "beta": gates, "cu_seqlens": offsets}.items():
            setattr(args.inputs, name, queries.describe(tensor, name))
        args.out = queries.describe(v, "out")
        assert saved.shape == (_lib.size_query("gd_forward_saved_size", args),)


def layer(q, k, v, g, beta, h0, A_log, offsets=None, **more):
    o, state = gd.chunk_gated_delta_rule(
        q * 1.5, k, v, g, beta, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, A_log=A_log, cu_seqlens=offsets, **more,
    )  # fmt: skip
    return o.square().sum() + (state * 0.5).sum()


def layer_inputs(T=70, B=2, N=None, dtype=torch.float32):
    tensors = make(B=B, T=T, H=2, HV=4, N=N, dtype=dtype)
    return [x.requires_grad_() for x in [*tensors, torch.zeros(4)]]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training_step_compiles_in_one_graph(backend):
    inputs = layer_inputs()
    want_loss = layer(*inputs)
    want = torch.autograd.grad(want_loss, inputs)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    loss = compiled(*inputs)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=0)
    for got, expected in zip(torch.autograd.grad(loss, inputs), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_training_step_without_states_compiles():
    tensors = [x.requires_grad_() for x in make()[:5]]

    def loss(*x):
        return gd.chunk_gated_delta_rule(*x)[0].square().sum()

    want = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors), tensors)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
def test_dynamic_lengths_compile_once(recompute):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for T in (70, 200, 513):
        inputs = layer_inputs(T=T, dtype=torch.bfloat16)
        want = torch.autograd.grad(layer(*inputs, recompute=recompute), inputs)
        got = torch.autograd.grad(compiled(*inputs, recompute=recompute), inputs)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert counter.frame_count == 1


def test_packed_sequences_compile():
    inputs = layer_inputs(T=150, B=1, N=3)
    offsets = torch.tensor([0, 64, 64, 150])
    want = torch.autograd.grad(layer(*inputs, offsets), inputs)
    got = torch.autograd.grad(torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs, offsets), inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_decode_in_place_compiles(backend):
    q, k, v, g, beta, _ = make(B=2, T=1)
    slots = torch.tensor([3, 1])

    def step(pool, q):
        o, _ = gd.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=pool, final_state=pool, initial_state_indices=slots,
            final_state_indices=slots,
        )  # fmt: skip
        return o + 1

    with torch.no_grad():
        want_pool, got_pool = torch.ones(5, 2, 32, 16), torch.ones(5, 2, 32, 16)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for _ in range(3):
            assert torch.equal(compiled(got_pool, q), step(want_pool, q))
        assert torch.equal(got_pool, want_pool)


def test_prefill_into_buffers_compiles():
    q, k, v, g, beta, h0 = make(B=2, T=130)

    def prefill(state, out, checkpoints):
        gd.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, final_state=state, out=out, checkpoints=checkpoints,
            checkpoint_every=64,
        )  # fmt: skip
        return out.sum()

    results = []
    for function in (prefill, torch.compile(prefill, fullgraph=True, backend="aot_eager")):
        buffers = [h0.clone(), torch.zeros_like(v), torch.zeros(4, 2, 32, 16)]
        with torch.no_grad():
            results.append([function(*buffers), *buffers])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_wrong_inputs_are_explained_while_compiling():
    tensors = [x.requires_grad_() for x in make()[:5]]
    compiled = torch.compile(gd.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="q: dtype is float64, must be float32, bfloat16 or float16"):
        compiled(tensors[0].double(), *tensors[1:])
    with pytest.raises(Exception, match="k: shape is"):
        compiled(tensors[0], tensors[1][:, 1:], *tensors[2:])
    with pytest.raises(Exception, match="rank 4, not 3"):
        compiled(tensors[0][0], *tensors[1:], output_final_state=True)


@pytest.mark.parametrize("function", [gd.chunk_gated_delta_rule, gd.recurrent_gated_delta_rule])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_calls_without_gates_compile(backend, function):
    """g and beta None, in training and with buffers."""
    q, k, v, _, _, h0 = make(B=2, T=4)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def train(q, k, v):
        return function(q, k, v, g=None, beta=None)[0].square().sum()

    def decode(state):
        return function(q, k, v, g=None, beta=None, initial_state=state, final_state=state)[0] + 1

    want = torch.autograd.grad(train(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(train, fullgraph=True, backend=backend)(*leaves), leaves)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        states = [h0.clone() for _ in range(2)]
        outputs = [decode(states[0]), torch.compile(decode, fullgraph=True, backend=backend)(states[1])]
    assert torch.equal(*outputs) and torch.equal(*states)


def test_fake_tensors_without_gates():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 70, 2, 128, dtype=torch.bfloat16, device="cuda:0") for _ in range(3))
        o, state = gd.chunk_gated_delta_rule(q, k, v, None, None, output_final_state=True)
        _, _, saved = gd.chunk_gated_delta_rule_fwd(q, k, v, None, None)
        gradients = gd.chunk_gated_delta_rule_bwd(q, k, v, None, None, saved, v)
    assert o.is_cuda and o.shape == v.shape and state.shape == (2, 2, 128, 128) and saved.data.is_cuda
    assert [x if x is None else x.shape for x in gradients] == [q.shape, k.shape, v.shape, None, None, None]


def test_forward_mode_is_refused_while_compiling():
    q, k, v, g, beta, _ = make()

    def tangent(q):
        return torch.func.jvp(lambda x: gd.chunk_gated_delta_rule(x, k, v, g, beta)[0], (q,), (q,))[1]

    with pytest.raises(Exception, match="no forward-mode derivative"):
        torch.compile(tangent, backend="aot_eager")(q)


def test_recurrent_training_compiles():
    tensors = [x.requires_grad_() for x in make(B=2, T=4)]

    def loss(q, k, v, g, beta, h0):
        o, state = gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=h0, output_final_state=True)
        return o.square().sum() + state.sum()

    want = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors), tensors)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
