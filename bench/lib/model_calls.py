"""What bench.gpu.models times: the paths, models with random weights, and their prefill, decode and training steps."""

from __future__ import annotations

import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Full attention in decode steps: cuDNN would make a plan for every length of the cache, which takes 40 ms.
DECODE_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
GATEDELTA = ("gatedelta", "gatedelta-fused")  # the paths that run on it
MODULE = "transformers.models.qwen3_5.modeling_qwen3_5"
DECODE_STEPS = 8
DECODE_RUNS = 5  # times as many as of other rows: the host is the limit, and its speed varies
ENOUGH_MS = 3e3  # of timed calls
CHECKED_TOKENS, CHECKED_LOGITS = 200, 8  # of the prompt whose logits the paths are compared by


def choose_path(path: str) -> dict[str, str]:
    """Has transformers' Qwen3.5 run on this path, in a process that has not imported it. Returns versions."""
    versions = {}
    if path in (*GATEDELTA, "torch"):
        sys.modules["fla"] = None  # cannot be imported from here on
    else:
        versions["fla"] = importlib.import_module("fla").__version__
    sys.modules["causal_conv1d"] = None
    module = importlib.import_module(MODULE)
    if path in GATEDELTA:
        import gatedelta.transformers

        gatedelta.transformers.patch()
    elif path == "fla-all":
        use_fla_everywhere(module)
    return versions


def use_fla_everywhere(module) -> None:
    """FLA's convolution and gated norm in place of transformers' torch code. Its conv states have another layout, so a
    decode step's convolution stays."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    def convolve(hidden_states, weight, bias=None, activation=None, cu_seq_lens_q=None, **others):
        x = hidden_states.transpose(1, 2)
        return causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q)[0].transpose(1, 2)

    def norm(self, hidden_states, gate):
        return rms_norm_gated(hidden_states, gate, self.weight, None, self.activation, eps=self.variance_epsilon)

    module.causal_conv1d_fn = convolve
    module.Qwen3_5RMSNormGated.forward = norm


def compile_share(index: int, count: int) -> None:
    """From here on this process compiles one of `count` shares of the configurations that Triton's autotuner would try.
    What does not run alone falls back to all of them."""
    from triton.runtime.autotuner import Autotuner

    initialise, run = Autotuner.__init__, Autotuner.run

    def initialise_share(self, fn, arg_names, configs, *args, **kwargs):
        initialise(self, fn, arg_names, configs, *args, **kwargs)
        self.every_config, self.configs = self.configs, self.configs[index::count] or self.configs[:1]

    def run_share(self, *args, **kwargs):
        try:
            return run(self, *args, **kwargs)
        except Exception:
            self.configs = self.every_config
            self.cache.clear()
            return run(self, *args, **kwargs)

    Autotuner.__init__, Autotuner.run = initialise_share, run_share


def call_everything(shape: dict, vocabulary: int, rows: list[dict], device: str = "cuda") -> None:
    """Every row once, on four layers: for kernels that are compiled or tuned when they are called first."""
    model = Model(shape | {"num_hidden_layers": 4}, vocabulary, device)
    for row in rows:
        if row["kind"] == "train":
            model.train(row, packed=True)()
        else:
            with torch.no_grad():
                model.prefill(row)() if row["kind"] == "prefill" else model.decode(row)[0]()
        model.clock.wait()


class Clock:
    """Marks in time: CUDA events on the current stream, or the host's clock."""

    def __init__(self, device: str):
        self.on_gpu = device == "cuda"

    def mark(self) -> object:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def ms(self, begin: object, end: object) -> float:
        return begin.elapsed_time(end) if self.on_gpu else (end - begin) * 1e3


class Mark(torch.autograd.Function):
    """The same tensor; notes the time when its gradient passes."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.note()
        return gradient, None


class LayerTimes:
    """Time inside some layers, forward and backward, while it is a context."""

    def __init__(self, layers: list[torch.nn.Module], clock: Clock):
        self.layers, self.clock = layers, clock
        self.marks: list[object] = []  # begin and end in turns: layers do not overlap
        self.hooks: list = []

    def note(self) -> None:
        self.marks.append(self.clock.mark())

    def begin(self, layer, args, kwargs):
        x = kwargs["hidden_states"]
        if torch.is_grad_enabled() and x.requires_grad:
            kwargs["hidden_states"] = Mark.apply(x, self.note)  # the end of the layer's backward
        self.note()
        return args, kwargs

    def end(self, layer, args, kwargs, result):
        self.note()
        return Mark.apply(result, self.note) if torch.is_grad_enabled() and result.requires_grad else result

    def __enter__(self) -> LayerTimes:
        for layer in self.layers:
            self.hooks.append(layer.register_forward_pre_hook(self.begin, with_kwargs=True))
            self.hooks.append(layer.register_forward_hook(self.end, with_kwargs=True))
        return self

    def __exit__(self, *error) -> None:
        for hook in self.hooks:
            hook.remove()

    def ms(self) -> float:
        return sum(self.clock.ms(begin, end) for begin, end in zip(self.marks[::2], self.marks[1::2]))


class Model:
    def __init__(self, shape: dict, vocabulary: int, device: str, seed: int = 0):
        module = importlib.import_module(MODULE)
        config = module.Qwen3_5TextConfig(
            **shape, vocab_size=vocabulary, tie_word_embeddings=True, attn_implementation="sdpa"
        )
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            self.net = module.Qwen3_5ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        self.device, self.vocabulary, self.clock = device, vocabulary, Clock(device)
        self.layers = [layer for layer in self.net.modules() if type(layer).__name__.endswith("GatedDeltaNet")]
        self.parameters = sum(parameter.numel() for parameter in self.net.parameters())

    def fuse_projections(self) -> None:
        import gatedelta.transformers

        if gatedelta.transformers.fuse_projections(self.net) != len(self.layers):
            raise RuntimeError("the projections of some layers could not be fused")

    def tokens(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randint(self.vocabulary, shape, generator=generator).to(self.device)

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """Of the last tokens of a short prompt, to compare the paths by."""
        found = self.net(self.tokens(1, CHECKED_TOKENS), use_cache=False, logits_to_keep=CHECKED_LOGITS)
        return found.logits.float().cpu()

    def prefill(self, row: dict) -> Callable[[], object]:
        tokens = self.tokens(row["batch"], row["tokens"])
        return lambda: self.net(tokens, use_cache=True, logits_to_keep=1)

    def train(self, row: dict, packed: bool) -> Callable[[], object]:
        """A step on the pack, or on one sequence after the other."""
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-5, fused=self.device == "cuda")
        lengths = row["lengths"]
        packs = [lengths] if packed else [[length] for length in lengths]
        inputs = [(self.tokens(1, sum(pack)), self.pack_arguments(pack)) for pack in packs]

        def step() -> None:
            for tokens, arguments in inputs:
                hidden = self.net.model(tokens, use_cache=False, **arguments).last_hidden_state
                logits = self.net.lm_head(hidden[0, :-1]).float()
                (F.cross_entropy(logits, tokens[0, 1:], reduction="sum") / sum(lengths)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def pack_arguments(self, lengths: list[int]) -> dict:
        """What data collators that pack give a model; nothing for one sequence."""
        if len(lengths) == 1:
            return {}
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(self.device)
        return {"position_ids": positions, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
                "max_length_q": max(lengths), "max_length_k": max(lengths)}  # fmt: skip

    def decode(self, row: dict) -> tuple[Callable[[], object], object]:
        """A step that is always the next one, and its cache."""
        prompt = self.net(self.tokens(row["batch"], row["tokens"]), use_cache=True, logits_to_keep=1)
        tokens, cache = prompt.logits[:, -1].argmax(-1, keepdim=True), prompt.past_key_values

        def step() -> None:
            logits = self.net(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

        return step, cache


def timed(call: Callable[[], object], clock: Clock) -> float:
    begin = clock.mark()
    call()
    end = clock.mark()
    clock.wait()
    return clock.ms(begin, end)


def repeated(model: Model, call: Callable[[], object], repeats: int) -> dict:
    """Medians over calls after a first one: of all, and inside the layers. Fewer calls where they take seconds."""
    call()
    model.clock.wait()
    times, inside = [], []
    while not times or (len(times) < repeats and sum(times) < ENOUGH_MS):
        with LayerTimes(model.layers, model.clock) as layers:
            times.append(timed(call, model.clock))
        inside.append(layers.ms())
    return {"ms": statistics.median(times), "gdn_ms": statistics.median(inside), "runs": len(times)}


@contextmanager
def captured(call: Callable[[], object]) -> Iterator[torch.cuda.CUDAGraph]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        yield graph


def graph_ms(model: Model, call: Callable[[], object], repeats: int) -> float:
    """Of one replay in a row of them."""
    with captured(call) as graph:

        def replays() -> None:
            for _ in range(DECODE_STEPS):
                graph.replay()

        timed(replays, model.clock)
        return statistics.median(timed(replays, model.clock) for _ in range(repeats)) / DECODE_STEPS


def measure_decode(model: Model, row: dict, repeats: int) -> dict:
    step, cache = model.decode(row)
    if row["mode"] == "graph":
        if model.device != "cuda":
            return {"skipped": "no GPU"}
        hidden = torch.randn(row["batch"], 1, model.net.config.hidden_size, device="cuda").bfloat16()

        def layers() -> None:
            for layer in model.layers:
                layer(hidden_states=hidden, cache_params=cache, attention_mask=None)

        return {"ms": graph_ms(model, step, repeats), "gdn_ms": graph_ms(model, layers, repeats), "runs": repeats}

    def steps() -> None:
        for _ in range(DECODE_STEPS):
            step()

    found = repeated(model, steps, DECODE_RUNS * repeats)
    return found | {name: found[name] / DECODE_STEPS for name in ("ms", "gdn_ms")}


def measure(model: Model, row: dict, path: str, repeats: int) -> dict:
    """Times and memory of a row, or why there are none."""
    gc.collect()
    if model.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        if row["kind"] == "train":
            model.net.train()
            found = repeated(model, model.train(row, packed=path != "torch"), repeats)
        else:
            model.net.eval()
            with torch.no_grad():
                if row["kind"] == "decode":
                    with sdpa_kernel(DECODE_ATTENTION):
                        found = measure_decode(model, row, repeats)
                else:
                    found = repeated(model, model.prefill(row), repeats)
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}
    finally:
        model.net.zero_grad()
    if model.device == "cuda" and "skipped" not in found:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found
