"""What docs/serving.md promises: its test of restored prefixes, and that padding touches nothing."""

from __future__ import annotations

import re

import pytest

from tools import dev_paths

torch = pytest.importorskip("torch")

import gatedelta  # noqa: E402
from gatedelta import fused_recurrent_gated_delta_rule  # noqa: E402

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or gatedelta.info()["cuda_devices"] == 0, reason="no GPU, or none that is supported"
)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_sample_of_a_restored_prefix(device):
    text = (dev_paths.ROOT / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"^```python\n(import torch\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    names = {}
    exec(compile(code, "docs/serving.md", "exec"), names)
    names["test_restored_prefix"](device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_padded_batch_touches_its_own_slots_only(device, tokens):
    """Rows beyond the batch, by -1, and the same rows in a pack, by repeated offsets: the same bits and slots."""
    generator = torch.Generator().manual_seed(0)
    rows, live = 5, 3

    def randn(*shape: int):
        return torch.randn(rows, tokens, 2, *shape, generator=generator).to(device)

    inputs = {name: randn(128).bfloat16() for name in ("q", "k", "v")} | {
        "g": -randn().abs(),
        "beta": randn().sigmoid(),
    }
    for x in inputs.values():
        x[live:] = torch.nan
    pool = torch.full((9, 2, 128, 128), torch.nan, device=device)
    slots = torch.tensor([7, 2, 4, -1, -1], dtype=torch.int32, device=device)
    pool[slots[:live].long()] = torch.randn(live, 2, 128, 128, generator=generator).to(device)
    before = pool.clone()
    in_place = {"initial_state_indices": slots, "final_state_indices": slots, "use_qk_l2norm_in_kernel": True}
    o, _ = fused_recurrent_gated_delta_rule(**inputs, initial_state=pool, final_state=pool, **in_place)
    assert o[:live].isfinite().all() and (o[live:] == 0).all()
    others = [slot for slot in range(9) if slot not in slots.tolist()]
    assert pool[others].isnan().all() and pool[slots[:live].long()].isfinite().all()

    packed = {name: x.flatten(0, 1)[None] for name, x in inputs.items()}
    offsets = torch.tensor([0, 1, 2, 3, 3, 3], dtype=torch.int32, device=device) * tokens
    again = before.clone()
    o_packed, _ = fused_recurrent_gated_delta_rule(
        **packed, cu_seqlens=offsets, initial_state=again, final_state=again, **in_place
    )
    assert torch.equal(o_packed[0].view_as(o), o) and torch.equal(again.nan_to_num(9), pool.nan_to_num(9))
