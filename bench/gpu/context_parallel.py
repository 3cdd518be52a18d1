"""Times the stages of context parallelism on one GPU: a sequence in as many parts as there would be cards, one part
after the other, against the whole sequence in one call. From the stages' times and stated rates of the links it
predicts what 2, 4 and 8 cards would take; nothing of that is measured, and the record says so.

Every part of a stage is one captured graph; times are medians of replays. results/SCHEMA.md describes the output.

Usage: python -m bench.gpu.context_parallel [--tokens 32768,131072,524288] [--heads 16/64] [--output FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from gatedelta import __version__
from gatedelta._operators import stages as _stages
from gatedelta.context_parallel import schemes

from tools import records

DEVICE = torch.device("cuda")
DIM = 128
CARDS = (2, 4, 8)
# Assumed, not measured: bytes per second of NCCL's collectives over NVLink at the sizes that travel, seconds of each.
GATHER_RATE, SMALL_RATE, LATENCY = 250e9, 150e9, 20e-6


def make_inputs(tokens: int, hk: int, hv: int, fading: bool) -> dict[str, torch.Tensor]:
    """The benchmark's inputs: unit keys, gates that decay by 3.2 a chunk, or (not fading) none that decay."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=DEVICE)

    gates = (
        torch.nn.functional.logsigmoid(normal(1, tokens, hv)) / 16
        if fading
        else torch.zeros(1, tokens, hv, device=DEVICE)
    )
    return {
        "q": torch.nn.functional.normalize(normal(1, tokens, hk, DIM), dim=-1).bfloat16(),
        "k": torch.nn.functional.normalize(normal(1, tokens, hk, DIM), dim=-1).bfloat16(),
        "v": normal(1, tokens, hv, DIM).bfloat16(),
        "g": gates,
        "beta": normal(1, tokens, hv).sigmoid(),
        "do": normal(1, tokens, hv, DIM).bfloat16(),
    }


def milliseconds(work, replays: int = 9) -> float:
    """Of a captured graph of it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            work()
        times = []
        for _ in range(replays + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
    del graph
    return statistics.median(times[2:])


def part_times(tokens: int, hk: int, hv: int, fading: bool, parts: int) -> dict[str, float]:
    """The stages of one part of so many tokens; `parts`: segments that are merged."""
    x = make_inputs(tokens, hk, hv, fading)
    rule, do = {name: x[name] for name in ("q", "k", "v", "g", "beta")}, x["do"]
    options = _stages.Options()
    exact = not fading
    state = torch.zeros(1, hv, DIM, DIM, device=DEVICE)
    _, saved = _stages.forward(**rule, options=options, initial_state=state)
    values = torch.randn(parts, hv, DIM, DIM, device=DEVICE)
    transitions = torch.randn(parts, hv, DIM, DIM, device=DEVICE) / DIM
    first, count = (torch.tensor([i], dtype=torch.int32, device=DEVICE) for i in (0, parts - 1))
    result = {
        "summary": milliseconds(
            lambda: _stages.summary(
                x["k"], x["v"], x["g"], x["beta"], options, exact=exact, q=x["q"], saved=saved, prepared=False
            )
        ),
        "forward": milliseconds(
            lambda: _stages.forward(**rule, options=options, initial_state=state, saved=saved, prepared=True)
        ),
        "merge": milliseconds(lambda: _stages.merge(values, transitions, first, count)),
        "backward_summary": milliseconds(
            lambda: _stages.backward_summary(x["q"], x["k"], x["g"], x["beta"], do, options, exact=exact, saved=saved)
        ),
        "backward": milliseconds(
            lambda: _stages.backward(**rule, do=do, options=options, initial_state=state, dht=state, saved=saved)
        ),
    }
    return {name: round(value, 4) for name, value in result.items()}


def whole_times(tokens: int, hk: int, hv: int, fading: bool) -> dict[str, float]:
    x = make_inputs(tokens, hk, hv, fading)
    do = x.pop("do")
    options = _stages.Options()
    _, saved = _stages.forward(**x, options=options)
    forward = milliseconds(lambda: _stages.forward(**x, options=options, saved=saved))
    backward = milliseconds(lambda: _stages.backward(**x, do=do, options=options, saved=saved))
    return {"forward": round(forward, 4), "backward": round(backward, 4)}


def travel_ms(cards: int, hv: int, fading: bool, back: bool) -> float:
    """Predicted."""
    scheme = "neighbour" if fading else schemes.choose("auto", cards, 1, hv, DIM, DIM)
    size = schemes.bytes_received(scheme, cards, 1, hv, DIM, DIM, back)
    rate = GATHER_RATE if scheme == "gather" else SMALL_RATE
    return 1e3 * (size / rate + (2 if scheme == "scatter" else 1) * LATENCY)


def measure(tokens: int, hk: int, hv: int, fading: bool) -> dict:
    whole = whole_times(tokens, hk, hv, fading)
    parts = {cards: part_times(tokens // cards, hk, hv, fading, cards) for cards in CARDS}
    eight = parts[CARDS[-1]]
    merge = 0 if fading else eight["merge"]
    row = {
        "hk": hk,
        "hv": hv,
        "tokens": tokens,
        "heads": "fade" if fading else "last",
        "whole_ms": whole,
        "part_ms": {str(cards): times for cards, times in parts.items()},
        # Eight parts in sequence against one call.
        "forward_ratio": round(8 * (eight["summary"] + merge + eight["forward"]) / whole["forward"], 3),
        "backward_ratio": round(8 * (eight["backward_summary"] + merge + eight["backward"]) / whole["backward"], 3),
        "predicted": {},
    }
    for cards, times in parts.items():
        merge = 0 if fading else times["merge"]
        forward = times["summary"] + merge + travel_ms(cards, hv, fading, False) + times["forward"]
        backward = times["backward_summary"] + merge + travel_ms(cards, hv, fading, True) + times["backward"]
        row["predicted"][str(cards)] = {
            "forward_ms": round(forward, 3),
            "backward_ms": round(backward, 3),
            "speedup": round((whole["forward"] + whole["backward"]) / (forward + backward), 2),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", default="32768,131072,524288")
    parser.add_argument("--heads", default="16/64")
    parser.add_argument("--output", type=Path, default=Path("build/bench/context_parallel.json"))
    options = parser.parse_args()
    hk, hv = map(int, options.heads.split("/"))
    rows = []
    for tokens in map(int, options.tokens.split(",")):
        for fading in (False, True):
            rows.append(measure(tokens, hk, hv, fading))
            row = rows[-1]
            print(
                f"{hk}/{hv} {tokens} heads {row['heads']}: one call {row['whole_ms']}, 8 parts in sequence "
                f"{row['forward_ratio']}x forward, {row['backward_ratio']}x backward; part {row['part_ms']['8']}; "
                f"predicted {row['predicted']}",
                flush=True,
            )
            torch.cuda.empty_cache()
            header = {
                "command": "bench/gpu/context_parallel.py",
                "device": torch.cuda.get_device_name(),
                "date": time.strftime("%Y-%m-%d"),
                "versions": {"gatedelta": __version__, "torch": torch.__version__},
                "predicted": {
                    "note": "times of 2, 4 and 8 cards are predictions from one card's stages; none was measured",
                    "gather_bytes_per_s": GATHER_RATE,
                    "other_bytes_per_s": SMALL_RATE,
                    "seconds_per_collective": LATENCY,
                },
            }
            records.write(options.output, {"header": header, "rows": rows})


if __name__ == "__main__":
    main()
