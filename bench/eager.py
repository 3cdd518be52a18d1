"""Splits the host time of one eager call into layers, in microseconds.

On a GPU the call is that of eager_call_us in bench/gpu.py. On the CPU it is the smallest call possible, so that little
of it is arithmetic. Each layer is timed on its own, the lower ones through the C ABI with memory allocated beforehand;
the cost of a step between two layers is their difference. On CUDA only host time counts: batches are too short to fill
the launch queue, and the synchronisation between them is not timed.

Usage: python bench/eager.py [--device cpu] [--batches 50]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from ctypes import byref, c_size_t

import chain
import gpu  # finds the package
import segments
import torch
from gatedelta import _lib
from gatedelta import torch as gd
from gatedelta.torch import _ops


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
    batches = f"{options.batches} batches of {chain.EAGER_CALLS} calls"
    print(f"host time of an eager call on {options.device}, us: median of {batches}")
    report(found)


if __name__ == "__main__":
    main()
