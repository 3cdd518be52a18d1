def attn_backend_wrapper(runner, full_attn_backend):
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.attention.linear.utils import resolve_linear_attn_backends

    runner.linear_attn_backends = resolve_linear_attn_backends()
    return GDNAttnBackend(runner)
