"""What freekv-record writes: record_test.py RECORD REPLAY MODEL TEXT FOLDER."""
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

record, replay, model, text, folder = sys.argv[1:]
shutil.rmtree(folder, ignore_errors=True)
prompt, steps = 60, 4
end = subprocess.run([record, "--model", model, "--text", text, "--threads", "1", "--prompt", str(prompt), "--steps",
                      str(steps), "--layers", "3,12", "--out", folder], capture_output=True, text=True)
assert end.returncode == 0, end.stderr

for layer in (3, 12):
    content = (Path(folder) / f"layer-{layer}.safetensors").read_bytes()
    length, = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    metadata = header.pop("__metadata__")
    # SmolLM2-135M, a GGUF file of Llama's family.
    assert metadata.pop("prompt_len") == str(prompt)
    assert metadata.pop("layer") == str(layer)
    assert "SmolLM2" in metadata.pop("model").replace(" ", "").replace("Smollm2", "SmolLM2")
    assert metadata.pop("text") == Path(text).name
    assert float(metadata.pop("rope_base")) == 100000
    assert metadata.pop("rope_pairs") == "neighbours"
    assert metadata.pop("scale") == "0.125"
    assert not metadata, metadata
    assert {name: (t["dtype"], t["shape"]) for name, t in header.items()} == {
        "q": ("F16", [prompt + steps, 9, 64]), "k": ("F16", [prompt + steps, 3, 64]),
        "v": ("F16", [prompt + steps, 3, 64])}, header

# A codec that rebuilds keys needs the rotation, which the trace has.
replayed = [replay, str(Path(folder) / "layer-12.safetensors"), "--variant", "shadowkv", "--page", "8", "--sink", "8",
            "--window", "16", "--key-rank", "160"]
end = subprocess.run(replayed, capture_output=True, text=True)
assert end.returncode == 0, end.stderr
error = json.loads(end.stdout)["error_of_codec"]["relative_l2_mean"]
end = subprocess.run(replayed + ["--rope-pairs", "halves"], capture_output=True, text=True)
wrong = json.loads(end.stdout)["error_of_codec"]["relative_l2_mean"]
assert error < 0.1 and wrong > 1.5 * error, (error, wrong)  # keys turned by another rotation are rebuilt less well
print("passed")
