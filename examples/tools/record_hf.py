"""Records queries, keys and values of a Hugging Face model's layers on a text: a trace a layer, for freekv-replay.

    python examples/tools/record_hf.py --model NAME_OR_PATH --text FILE --prompt 1024 --steps 128 --layers 0 5 --out FOLDER

The text is teacher-forced: what is recorded is what the model's attention is given, after RoPE and QK-norm, for any
model whose attention goes through transformers' AttentionInterface (4.48 or later). Needs torch and transformers.
"""

import argparse
import json
import math
import os
import signal
import struct
import sys
import tempfile

ELEMENTS = {"f32": ("F32", 4), "f16": ("F16", 2), "bf16": ("BF16", 2)}  # as safetensors names them, and their bytes
RECORDING = "freekv_recording"  # the attention implementation's name


class Refusal(Exception):
    """One sentence with a remedy."""


def write_safetensors(path, tensors, metadata):
    """Writes {name: (element, shape, bytes)}, element among ELEMENTS, and {text: text}; the file appears complete or
    not at all."""
    header, begin = {"__metadata__": metadata}, 0
    for name, (element, shape, data) in tensors.items():
        dtype, width = ELEMENTS[element]
        if len(data) != math.prod(shape) * width:
            raise ValueError(f"{name} has {len(data)} bytes for shape {tuple(shape)} of {dtype}")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    handle, temporary = tempfile.mkstemp(prefix=".freekv-", suffix=".tmp", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for _, _, data in tensors.values():
                file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's are private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def arguments(argv):
    parser = argparse.ArgumentParser(
        prog="record_hf.py", description="Records queries, keys and values of a Hugging Face model's layers on a text "
        "as traces for freekv-replay.")
    parser.add_argument("--model", required=True, help="name on the hub, or a folder with config.json and weights")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", help="text; where the model comes without a tokenizer its bytes are "
                        "the token ids")
    source.add_argument("--tokens", metavar="FILE", help="token ids instead of a text, separated by white space")
    parser.add_argument("--prompt", type=int, default=1024, metavar="N", help="tokens of the prompt (%(default)s)")
    parser.add_argument("--steps", type=int, default=128, metavar="M",
                        help="tokens after it, a decode step each (%(default)s)")
    parser.add_argument("--layers", type=int, nargs="+", required=True, metavar="L", help="layers, by number")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="layer L goes to layer-L.safetensors")
    parser.add_argument("--dtype", choices=ELEMENTS, default="f16", help="of the traces (%(default)s)")
    parser.add_argument("--compute", choices=ELEMENTS, default="f32", help="that the model computes in (%(default)s)")
    parser.add_argument("--device", default="cpu", help="that the model computes on, such as cuda (%(default)s)")
    parser.add_argument("--chunk", type=int, default=1024, metavar="C",
                        help="tokens that go through the model at a time (%(default)s)")
    chosen = parser.parse_args(argv)
    if chosen.prompt < 0 or chosen.steps < 0 or chosen.prompt + chosen.steps < 1:
        raise Refusal("--prompt and --steps must be 0 or more, and not both 0")
    if chosen.chunk < 1:
        raise Refusal(f"--chunk {chosen.chunk} is below 1; give the tokens that fit in memory at a time")
    return chosen


def needed_modules():
    """torch and transformers, or a sentence that says how to come by them."""
    try:
        import torch
        import transformers
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError as fault:
        raise Refusal(f"recording needs torch and transformers 4.48 or later, and {fault.name or 'one of them'} cannot "
                      f"be imported ({fault}); run pip install torch transformers") from fault
    try:  # a later part of the interface: who makes the mask
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
        AttentionMaskInterface.register(RECORDING, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    except ImportError:
        pass  # before it models made masks that sdpa takes under any name
    return torch, transformers, AttentionInterface, sdpa_attention_forward


def load(what, call):
    """`call()`, whose faults are many and long, as a sentence."""
    try:
        return call()
    except Exception as fault:  # noqa: BLE001: transformers throws whatever its parts throw
        raise Refusal(f"{what} cannot be loaded: {str(fault).strip().splitlines()[0] if str(fault).strip() else fault!r}"
                      ) from fault


def token_ids(chosen, transformers, vocabulary):
    """The first prompt + steps of them."""
    try:
        with open(chosen.text or chosen.tokens, "rb") as file:
            content = file.read()
    except OSError as fault:
        raise Refusal(f'"{chosen.text or chosen.tokens}" cannot be read: {fault.strerror}') from fault
    if chosen.tokens:
        try:
            ids = [int(word) for word in content.split()]
        except ValueError as fault:
            raise Refusal(f'"{chosen.tokens}" holds what is no token id: {fault}') from fault
    else:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.model)
            ids = list(tokenizer(content.decode("utf-8", errors="replace"))["input_ids"])
        except Exception:  # noqa: BLE001: as in load
            ids = []
        if len(set(ids)) <= 1 < len(set(content)):  # for a model without one, some versions make an empty tokenizer
            ids = list(content)
            print(f"{chosen.model} comes without a tokenizer that can be loaded: the text's bytes are the token ids",
                  file=sys.stderr)
    wanted = chosen.prompt + chosen.steps
    if len(ids) < wanted:
        raise Refusal(f'"{chosen.text or chosen.tokens}" has {len(ids)} tokens, fewer than --prompt {chosen.prompt} and '
                      f"--steps {chosen.steps} need; give a longer one")
    ids = ids[:wanted]
    for token in ids:
        if not 0 <= token < vocabulary:
            raise Refusal(f"token {token} is outside the model's vocabulary of {vocabulary}")
    return ids


class Recorder:
    """An attention that keeps what chosen layers are given, and then attends as sdpa does."""

    def __init__(self, torch, attend, layers, element):
        self.torch, self.attend = torch, attend
        self.dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[element]
        self.rows = {layer: {"q": [], "k": [], "v": []} for layer in layers}
        self.notes = {layer: {} for layer in layers}

    def __call__(self, module, query, key, value, attention_mask, **options):
        for name, words in (("softcap", "a soft cap of its scores"), ("s_aux", "sink logits")):
            if options.get(name) is not None:
                raise Refusal(f"the model attends with {words}, which sdpa leaves out, so that layers behind would be "
                              "given other rows; record it with freekv-record")
        layer = getattr(module, "layer_idx", None)
        if layer in self.rows:
            new = query.shape[2]  # keys and values hold those of earlier chunks before them
            for name, rows in (("q", query), ("k", key), ("v", value)):
                self.rows[layer][name].append(self.rounded(layer, rows[:, :, rows.shape[2] - new:]))
            self.notes[layer] = {name: options.get(name) for name in ("scaling", "sliding_window")}
        return self.attend(module, query, key, value, attention_mask, **options)

    def rounded(self, layer, rows):
        """(1, heads, tokens, head_dim) as (tokens, heads, head_dim) of the trace's element."""
        torch = self.torch
        kept = rows.detach().to(self.dtype)
        if bool((torch.isinf(kept) & ~torch.isinf(rows)).any()):
            raise Refusal(f"layer {layer} has a number of magnitude {float(rows.abs().max()):g}, beyond the trace's "
                          "element; choose --dtype bf16 or f32")
        return kept[0].transpose(0, 1).contiguous().cpu()

    def tensors(self, layer, tokens, element):
        """What write_safetensors takes."""
        result = {}
        for name, parts in self.rows[layer].items():
            if not parts:
                raise Refusal(f"layer {layer} has no attention that goes through transformers' AttentionInterface; "
                              "choose another layer")
            rows = self.torch.cat(parts)
            if rows.shape[0] != tokens:
                raise Refusal(f"layer {layer} attended to {rows.shape[0]} rows of {name} for {tokens} tokens: more than "
                              "one part of the model has a layer of this number")
            result[name] = (element, tuple(rows.shape), rows.view(self.torch.uint8).numpy().tobytes())
        if result["k"][1] != result["v"][1]:
            raise Refusal(f"layer {layer} has keys of shape {result['k'][1]} and values of {result['v'][1]}; a trace's "
                          "agree")
        return result


def metadata_of(chosen, layer, notes):
    """What a trace says of itself. A scale that is the model's own is what freekv-replay scales by."""
    metadata = {"prompt_len": str(chosen.prompt), "layer": str(layer),
                "model": os.path.basename(os.path.normpath(chosen.model)),
                "text": os.path.basename(chosen.text or chosen.tokens)}
    if notes.get("scaling") is not None:
        metadata["scale"] = repr(float(notes["scaling"]))
    if notes.get("sliding_window") is not None:
        print(f"layer {layer} attends with a sliding window: give freekv-replay --sliding-window "
              f"{notes['sliding_window']}", file=sys.stderr)
    return metadata


def record(chosen):
    torch, transformers, interface, sdpa = needed_modules()
    config = load(f'"{chosen.model}"', lambda: transformers.AutoConfig.from_pretrained(chosen.model))
    text_config = config.get_text_config()
    for layer in chosen.layers:
        if not 0 <= layer < text_config.num_hidden_layers:
            raise Refusal(f"--layers: the model has layers 0 to {text_config.num_hidden_layers - 1}, so none numbered "
                          f"{layer}")
    ids = token_ids(chosen, transformers, text_config.vocab_size)
    made = not os.path.isdir(chosen.out)
    os.makedirs(chosen.out, exist_ok=True)  # before the long work
    try:
        record_into(chosen, ids, torch, transformers, interface, sdpa)
    except BaseException:
        if made and not os.listdir(chosen.out):
            os.rmdir(chosen.out)
        raise


def record_into(chosen, ids, torch, transformers, interface, sdpa):
    """Records into the folder, which is there."""
    recorder = Recorder(torch, sdpa, chosen.layers, chosen.dtype)
    interface.register(RECORDING, recorder)
    # Without a language model's head: its logits would be most of the memory.
    # Loaded as this type, and not turned to it later, which would round the rotation's frequencies too.
    version = [int(part) for part in transformers.__version__.split(".")[:2]]
    compute = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[chosen.compute]
    typed = {"dtype" if version >= [4, 56] else "torch_dtype": compute}
    model = load(f'"{chosen.model}"', lambda: transformers.AutoModel.from_pretrained(
        chosen.model, attn_implementation=RECORDING, **typed))
    model = load(f'"{chosen.model}" on {chosen.device}', lambda: model.to(chosen.device).eval())
    cache = None
    with torch.no_grad():
        for begin in range(0, len(ids), chosen.chunk):
            if sys.stderr.isatty():
                print(f"\rrecord_hf.py: token {begin} of {len(ids)}", end="", file=sys.stderr, flush=True)
            chunk = torch.tensor([ids[begin:begin + chosen.chunk]], device=chosen.device)
            try:
                cache = model(input_ids=chunk, past_key_values=cache, use_cache=True).past_key_values
            except RuntimeError as fault:  # of the device, such as too little memory
                raise Refusal(f"tokens from {begin} on cannot go through the model: "
                              f"{(str(fault).splitlines() or [repr(fault)])[0]}; a smaller --chunk takes less memory") from fault
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    for layer in sorted(recorder.rows):
        tensors = recorder.tensors(layer, len(ids), chosen.dtype)
        path = os.path.join(chosen.out, f"layer-{layer}.safetensors")
        write_safetensors(path, tensors, metadata_of(chosen, layer, recorder.notes[layer]))
        print(path)


def leave_by_exception(number, frame):
    """A signal's handler: what is unfinished is taken away on the way out."""
    sys.exit(128 + number)


def main(argv):
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, leave_by_exception)
    try:
        record(arguments(argv))
        return 0
    except (Refusal, OSError) as fault:
        print(f"record_hf.py: {fault}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
