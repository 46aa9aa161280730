#!/usr/bin/env python3
"""measure.py LIMITS STEP ENGINE OUT COMMIT: what a GPU takes, with what bounds it and a peer in the same run.

LIMITS, STEP and ENGINE are the programs of limits.cu and step.cu, and freekv-engine. Lines of JSON go to OUT, a table to stdout.
A failure is the exit status, when the rest has been measured. The peer is PyTorch's attention, where this Python has it. Takes
about two minutes on an H100; needs 48 GiB of the host's memory and as much of the device's.
"""
import json
import os
import subprocess
import sys

failures = []


def failed(what):
    """Says so, and the rest goes on."""
    failures.append(what)
    print(what, file=sys.stderr)


def lines_of(*command):
    """What a program says as JSON."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        failed(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def peers():
    """Attention by PyTorch of the same shape as STEP's: microseconds, over buffers that caches do not hold."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention
    except ImportError:
        return
    if not torch.cuda.is_available():
        return failed(f"PyTorch {torch.__version__} sees no device here; it is no peer")
    for batch, tokens in (1, 2048), (4, 2048), (1, 32768), (4, 32768), (1, 131072):
        size = 2 * batch * 8 * tokens * 128
        try:
            query = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
            layers = [torch.randn(2, batch, 8, tokens, 128, device="cuda", dtype=torch.bfloat16)
                      for _ in range(max(2, min(64, 2**29 // size)))]
        except RuntimeError as fault:  # too little memory
            failed(f"attention by PyTorch, {tokens} tokens, batch {batch}: {fault}")
            continue
        for name, backend in ("FlashAttention-2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION):
            def attend():
                with sdpa_kernel(backend):
                    for keys, values in layers:
                        scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            case = f"attention by PyTorch {torch.__version__}, {name}, {tokens} tokens, batch {batch}"
            try:
                attend()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    attend()
                times = []
                for _ in range(11):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    graph.replay()
                    end.record()
                    torch.cuda.synchronize()
                    times.append(1e3 * begin.elapsed_time(end) / len(layers))
            except RuntimeError as fault:  # as where a backend does not have the shape
                failed(f"{case}: {fault}")
                continue
            yield {"bench": "peer", "case": case, "metric": "time of a layer", "value": round(sorted(times)[5], 3), "unit": "us",
                   "device": torch.cuda.get_device_name()}


def steps(step):
    """Captured steps without a model between their layers."""
    for summary, context, batch, similarity, layers in [
            ("window", 32768, 1, 0.95, 16), ("min_max", 32768, 1, 0.95, 16), ("full", 32768, 1, 0.95, 16),
            ("min_max", 32768, 1, 0.5, 16), ("key_subspace", 32768, 1, 0.95, 16), ("key_codes", 32768, 1, 0.95, 16),
            ("window", 32768, 4, 0.95, 8), ("min_max", 32768, 4, 0.95, 8), ("full", 32768, 4, 0.95, 8),
            ("window", 131072, 1, 0.95, 8), ("min_max", 131072, 1, 0.95, 8), ("full", 131072, 1, 0.95, 8)]:
        yield from lines_of(step, context, 4, similarity, batch, summary, layers, 30)


def engines(engine):
    """Whole decoders: time of a step with and without retrieval."""
    for variant, context, batch in ("freekv", 32768, 1), ("full", 32768, 1), ("freekv", 131072, 1), ("full", 131072, 1), ("freekv", 32768, 4):
        for run in lines_of(engine, "--model", "llama-3.1-8b", "--variant", variant, "--context", context, "--batch", batch, "--steps", 128):
            yield {"bench": "engine", "case": f"{run['model']}, {variant}, {context} tokens, batch {batch}", "metric": "time of a step",
                   "value": run["ms_a_step"], "unit": "ms", **run}


def main():
    limits, step, engine, out, commit = sys.argv[1:]
    measured = 0
    with open(out + ".part", "w", encoding="utf-8") as file:
        print("| | | |\n|---|---|---|")
        for found in (lines_of(limits, 8), peers(), steps(step), engines(engine)):
            for line in found:
                print(json.dumps({**line, "commit": commit}), file=file, flush=True)
                measured += 1
                without = line.get("ms_a_step_without_retrieval")
                print(f"| {line['case']} | {line['metric']} | {line['value']:.4g} {line['unit']}" +
                      (f", {line['value'] / without:.3f} of {without:.4g} without retrieval" if without else "") + " |", flush=True)
    if measured > 0:
        os.replace(out + ".part", out)
    sys.exit(f"{len(failures)} of what was to be measured failed, the first: {failures[0].splitlines()[0]}" if failures else 0)


main()
