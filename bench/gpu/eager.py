"""Splits the host time of one eager call into layers, in microseconds: of a chunked call, and of a decode step.

On a GPU the chunked call is that of eager_call_us in bench.gpu.chunked, and the step is one of 8 sequences in a pool.
On the CPU they are the smallest calls possible, so that little of them is arithmetic. Each layer is timed on its own,
the lower ones through the C ABI with memory allocated beforehand; the cost of a step between two layers is their
difference. On CUDA only host time counts: batches are too short to fill the launch queue, and the synchronisation
between them is not timed.

Usage: python -m bench.gpu.eager [--device cpu] [--batches 50]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from ctypes import byref, c_size_t

import torch
from gatedelta import _lib
from gatedelta import torch as gd
from gatedelta._operators import ops as _ops
from gatedelta.torch import _direct

from bench.gpu import chunked as gpu
from bench.gpu import segments
from bench.lib import chain


def make_inputs(device: str) -> dict[str, torch.Tensor]:
    if device == "cuda":
        return gpu.make_inputs(gpu.EAGER_ROW)
    q, gates = torch.randn(1, 1, 1, 16), torch.full((1, 1, 1), -0.5)
    return {
        "q": q, "k": q.clone(), "v": q.clone(), "g": gates, "beta": gates.sigmoid(),
        "initial_state": torch.zeros(1, 1, 16, 16), "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
    }  # fmt: skip


class CCall:
    """gd_forward and its workspace query, with arguments made beforehand."""

    def __init__(self, inputs: dict[str, torch.Tensor]):
        self.out, self.final = torch.empty_like(inputs["v"]), torch.empty_like(inputs["initial_state"])
        self.inputs = inputs  # the arguments hold addresses only
        self.args = segments.arguments(inputs, self.out, self.final)
        if self.out.is_cuda:
            self.args.exec.device, self.args.exec.device_index = segments.CUDA, torch.cuda.current_device()
            self.args.exec.stream = torch.cuda.current_stream().cuda_stream
        else:
            self.args.exec.num_threads = 1
        size = _lib.size_query("gd_forward_workspace", self.args)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.out.device)
        self.args.exec.workspace, self.args.exec.workspace_bytes = self.workspace.data_ptr(), size
        self.reference, self.size = byref(self.args), c_size_t()
        self.library, self.size_reference = _lib.library(), byref(self.size)
        _lib.check(self.library.gd_forward(self.reference))

    def forward(self) -> None:
        self.library.gd_forward(self.reference)

    def query(self) -> None:
        self.library.gd_forward_workspace(self.reference, self.size_reference)


def layers(device: str, batches: int) -> dict[str, float]:
    inputs = make_inputs(device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    q, k, v, g, beta, initial, offsets = inputs.values()
    c = CCall(inputs)

    def us(call: Callable[[], object]) -> float:
        return chain.host_us(call, batches, synchronize)

    def allocate() -> None:
        torch.empty_like(v), torch.empty_like(initial), torch.empty_like(c.workspace)

    def operator() -> None:
        _ops.chunk_fwd(q, k, v, g, beta, _ops.FINAL_STATE, offsets, initial)

    found = {
        "function": us(lambda: gd.chunk_gated_delta_rule(**inputs, output_final_state=True)),
        "operator": us(operator),
        "allocate": us(allocate),
        "query": us(c.query),
        "forward": us(c.forward),
        "ctypes": us(lambda: c.library.gd_status_name(0)),
    }
    if device == "cuda":
        # No sequences: one launch instead of two. No tokens either: no tensor maps.
        no_sequences = {**inputs, "initial_state": initial[:0], "cu_seqlens": offsets[:1]}
        kept = ("initial_state", "cu_seqlens")
        no_tokens = {name: x if name in kept else x[:, :0] for name, x in no_sequences.items()}
        found["one_launch"] = us(CCall(no_sequences).forward)
        found["no_maps"] = us(CCall(no_tokens).forward)
    return found


def make_step(device: str) -> dict[str, torch.Tensor]:
    """A decode step as engines take it: states of a pool, updated in place, and gates made from raw ones."""
    rows, key_heads, heads, size = (8, 4, 8, 128) if device == "cuda" else (1, 1, 2, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        q, v = torch.randn(rows, 1, key_heads, size, dtype=dtype), torch.randn(rows, 1, heads, size, dtype=dtype)
        gates, slots = torch.randn(rows, 1, heads, dtype=dtype), torch.arange(rows, dtype=torch.int32)
        return {
            "q": q, "k": q.clone(), "v": v, "g": gates, "beta": gates.clone(), "A_log": torch.zeros(heads),
            "dt_bias": torch.zeros(heads), "initial_state": torch.zeros(2 * rows, heads, size, size),
            "initial_state_indices": slots, "out": torch.empty_like(v),
        }  # fmt: skip


def step_args(step: dict[str, torch.Tensor], workspace: torch.Tensor) -> _lib.RecurrentArgs:
    args = _lib.RecurrentArgs()
    for name, tensor in step.items():
        setattr(args if name == "out" else args.inputs, name, segments.describe(tensor, name))
    args.final_state, args.final_state_indices = args.inputs.initial_state, args.inputs.initial_state_indices
    args.inputs.gate, args.inputs.beta_kind, args.inputs.l2norm = _lib.GATE_RAW, _lib.BETA_LOGIT, 1
    if workspace.is_cuda:
        args.exec.device, args.exec.device_index = segments.CUDA, torch.cuda.current_device()
        args.exec.stream = torch.cuda.current_stream().cuda_stream
    else:
        args.exec.num_threads = 1
        args.exec.workspace, args.exec.workspace_bytes = workspace.data_ptr(), workspace.numel()
    return args


def step_layers(device: str, batches: int) -> dict[str, float]:
    step = make_step(device)
    q, k, v, g, beta, a_log, dt_bias, pool, slots, out = step.values()
    options = _ops.GATE_RAW | _ops.BETA_LOGIT | _ops.L2NORM
    workspace = torch.empty(1 << 16, dtype=torch.uint8, device=device)
    library = _lib.library()
    args = step_args(step, workspace)
    no_rows = step_args(
        {n: x[:0] if x.dim() != 1 or n == "initial_state_indices" else x for n, x in step.items()}, workspace
    )
    references = byref(args), byref(no_rows)
    for reference in references:
        _lib.check(library.gd_recurrent(reference))
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def us(call: Callable[[], object]) -> float:
        return gpu.host_us(call, batches, synchronize)

    def function(**more: object) -> object:
        return gd.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=pool, final_state=pool, initial_state_indices=slots,
            final_state_indices=slots, use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, **more,
        )  # fmt: skip

    def direct() -> object:
        return _direct.recurrent(
            q, k, v, g, None, None, beta, None, pool, False, True, True, a_log, dt_bias, True, False, False, None, None,
            True, out, slots, pool, slots, None, None, None, False,
        )  # fmt: skip

    states, a_row = pool[: q.shape[0]], torch.empty_like(out)
    return {
        "function": us(lambda: function(out=out)),
        "function, new o": us(function),
        "function, new o and states": us(
            lambda: gd.fused_recurrent_gated_delta_rule(
                q, k, v, g, beta=beta, initial_state=states, output_final_state=True
            )
        ),
        "direct": us(direct),
        "operator": us(
            lambda: _ops.recurrent_out(
                q, k, v, g, beta, options, None, None, None, a_log, dt_bias, slots, out, pool, slots, True, None, None,
                None,
            )
        ),
        "gd_recurrent": us(lambda: library.gd_recurrent(references[0])),
        "gd_recurrent of no rows": us(lambda: library.gd_recurrent(references[1])),
        "ctypes": us(lambda: library.gd_status_name(0)),
        "torch.add": us(lambda: torch.add(out, out, out=a_row)),
    }  # fmt: skip


def report_step(found: dict[str, float]) -> None:
    call, ctypes = found["gd_recurrent"], found["ctypes"]
    rows = {
        "fused_recurrent_gated_delta_rule, in a pool": found["function"],
        "  Python, to the binding": found["function"] - found["direct"],
        "  the binding": found["direct"] - (call - ctypes),
        "  gd_recurrent": call - ctypes,
        "    launch, or arithmetic": call - found["gd_recurrent of no rows"],
        "fused_recurrent_gated_delta_rule, with a new o": found["function, new o"],
        "fused_recurrent_gated_delta_rule, new o and states": found["function, new o and states"],
        "the operator, in a pool": found["operator"],
        "torch.add(x, x, out=y)": found["torch.add"],
    }
    for name, us in rows.items():
        print(f"{name:52} {us:7.2f}")


def report(found: dict[str, float]) -> None:
    function, operator, ctypes = found["function"], found["operator"], found["ctypes"]
    query, forward = (found[name] - ctypes for name in ("query", "forward"))
    rows = {
        "chunk_gated_delta_rule": function,
        "  Python, to the operator": function - operator,
        "  torch's dispatch, the binding, its allocations": operator - query - forward,
        "    (three torch.empty_like beside it)": found["allocate"],
        "  gd_forward_workspace": query,
        "  gd_forward": forward,
    }
    if "no_maps" in found:
        maps = found["one_launch"] - found["no_maps"]
        launch = found["forward"] - found["one_launch"]
        rows["    each of two launches"] = launch
        rows["    four tensor maps"] = maps
        rows["    checks, plan, device"] = forward - maps - 2 * launch
    for name, us in rows.items():
        print(f"{name:52} {us:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()
    with torch.no_grad():
        found = layers(options.device, options.batches)
        step = step_layers(options.device, options.batches)
    batches = f"{options.batches} batches of {chain.EAGER_CALLS} calls"
    print(f"host time of an eager call on {options.device}, us: median of {batches}")
    report(found)
    report_step(step)


if __name__ == "__main__":
    main()
