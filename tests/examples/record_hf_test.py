"""What examples/tools/record_hf.py writes, freekv-replay reads: its writer always, its recording where torch and transformers
are installed.

    python3 record_hf_test.py examples/tools/record_hf.py freekv-replay
"""

import importlib.util
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

SCRIPT, REPLAY = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
spec = importlib.util.spec_from_file_location("record_hf", SCRIPT)
record_hf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(record_hf)

try:
    import torch
    import transformers

    MISSING = ""
except ImportError as fault:
    MISSING = f"recording needs torch and transformers ({fault})"


def read_safetensors(path):
    """{name: (dtype, shape, bytes)} and metadata, by code that is not the writer's."""
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    metadata = header.pop("__metadata__")
    tensors = {name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}
    assert sum(len(t[2]) for t in tensors.values()) == len(data)
    return tensors, metadata


def floats(tensor):
    dtype, shape, data = tensor
    count = math.prod(shape)
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[2 * i:2 * i + 2])[0] for i in range(count)]
    return list(struct.unpack(f"<{count}{'f' if dtype == 'F32' else 'e'}", data))


def packed(values, element):
    if element == "bf16":
        return b"".join(struct.pack("<f", x)[2:] for x in values)
    return struct.pack(f"<{len(values)}{'f' if element == 'f32' else 'e'}", *values)


def attention(q, k, v, token, head, group, heads, d):
    """Of one query head over all tokens up to its own, in float64."""
    query = q[(token * heads * group + head) * d:][:d]
    rows = [((t * heads + head // group) * d) for t in range(token + 1)]
    scores = [sum(a * b for a, b in zip(query, k[row:row + d])) / math.sqrt(d) for row in rows]
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    return [sum(w * v[row + i] for w, row in zip(weights, rows)) / sum(weights) for i in range(d)]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


class Folder(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="freekv-test-")
        self.addCleanup(scratch.cleanup)
        self.folder = scratch.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def stored(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content)
        return self.path(name)

    def replayed(self, trace, *options):
        """The JSON object, and the tensors where there is --out."""
        end = run(REPLAY, trace, *options)
        self.assertEqual((end.returncode, end.stderr), (0, ""))
        return json.loads(end.stdout)

    def refused(self, *options, **environment):
        """The sentence."""
        end = run(sys.executable, SCRIPT, *options, env={**os.environ, **environment})
        self.assertEqual((end.returncode, end.stdout), (2, ""), end.stderr)
        sentence = end.stderr.splitlines()[-1]
        self.assertNotIn("Traceback", end.stderr)
        self.assertTrue(sentence.startswith("record_hf.py: "), sentence)
        return sentence


class Writer(Folder):
    def test_a_written_trace_is_replayed_as_full_attention_over_its_numbers(self):
        tokens, heads, group, d, prompt = 20, 2, 3, 64, 15
        dice = random.Random(3)
        for element in record_hf.ELEMENTS:
            with self.subTest(element):
                shapes = {"q": (tokens, heads * group, d), "k": (tokens, heads, d), "v": (tokens, heads, d)}
                tensors = {name: (element, shape, packed([dice.gauss(0, 1) for _ in range(math.prod(shape))], element))
                           for name, shape in shapes.items()}
                path = self.path("trace.safetensors")
                record_hf.write_safetensors(path, tensors, {"prompt_len": str(prompt), "layer": "7", "text": 'a "b"\n'})
                written, metadata = read_safetensors(path)
                self.assertEqual(metadata["text"], 'a "b"\n')
                for name, (_, shape, data) in tensors.items():
                    self.assertEqual(written[name], (element.upper(), list(shape), data))
                with open(path, "rb") as file:
                    self.assertEqual(struct.unpack("<Q", file.read(8))[0] % 8, 0, "the data is not aligned")

                found = self.replayed(path, "--variant", "full", "--page", "8", "--out", self.path("out"))
                self.assertEqual(found["settings"]["dtype"], element.upper())
                self.assertEqual((found["settings"]["tokens"], found["settings"]["prompt_len"]), (tokens, prompt))
                self.assertEqual((found["settings"]["query_heads"], found["settings"]["kv_heads"]), (6, 2))
                q, k, v = (floats(written[name]) for name in "qkv")
                out = floats(read_safetensors(self.path("out"))[0]["out"])
                for step, head in ((0, 0), (4, 5), (2, 3)):
                    wanted = attention(q, k, v, prompt + step, head, group, heads, d)
                    got = out[(step * heads * group + head) * d:][:d]
                    for a, b in zip(got, wanted):
                        self.assertAlmostEqual(a, b, delta=1e-5)
                layers = self.replayed(self.folder, "--page", "8")["layers"]
                self.assertEqual([layer["layer"] for layer in layers], [7])

    def test_bytes_that_are_not_those_of_the_shape_are_refused_and_nothing_is_left(self):
        with self.assertRaisesRegex(ValueError, "q has 3 bytes"):
            record_hf.write_safetensors(self.path("trace"), {"q": ("f16", (1, 1, 2), b"abc")}, {})
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_signal_takes_away_the_unfinished_file(self):
        code = f"""
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("record_hf", {SCRIPT!r})
record_hf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(record_hf)

class Ended(dict):
    def values(self):  # asked for when the file is there
        assert [name for name in os.listdir(sys.argv[1]) if name.startswith(".freekv-")]
        os.kill(os.getpid(), int(sys.argv[2]))
        return super().values()

record_hf.arguments = lambda argv: None
record_hf.record = lambda chosen: record_hf.write_safetensors(
    os.path.join(sys.argv[1], "trace"), Ended(q=("f16", (1,), b"ab")), {{}})
sys.exit(record_hf.main([]))
"""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            end = subprocess.run([sys.executable, "-B", "-c", code, self.folder, str(int(number))],
                                 capture_output=True, text=True)
            self.assertNotEqual(end.returncode, 0)
            self.assertNotIn("AssertionError", end.stderr)
            self.assertEqual(os.listdir(self.folder), [], number)

    def test_an_older_file_is_replaced_and_a_failed_write_leaves_it(self):
        path = self.stored("trace", b"an older file")
        with self.assertRaises(TypeError):
            record_hf.write_safetensors(path, {"q": ("f16", (1, 1, 1), [b"a", b"b"])}, {})
        with open(path, "rb") as file:
            self.assertEqual(file.read(), b"an older file")
        self.assertEqual(os.listdir(self.folder), ["trace"])
        record_hf.write_safetensors(path, {"q": ("f16", (1, 1, 1), b"ab")}, {})
        self.assertEqual(read_safetensors(path)[0], {"q": ("F16", [1, 1, 1], b"ab")})
        self.assertEqual(os.listdir(self.folder), ["trace"])


class Attention(Folder):
    """What the recorder makes of the options that an attention is given; without torch."""

    def test_attention_that_sdpa_does_not_compute_is_refused_in_any_layer(self):
        import types
        kinds = types.SimpleNamespace(float32=None, float16=None, bfloat16=None)
        recorder = record_hf.Recorder(kinds, lambda *_, **__: "attended", [5], "f16")
        module = types.SimpleNamespace(layer_idx=0)
        self.assertEqual(recorder(module, 1, 2, 3, None, scaling=0.1, softcap=None), "attended")
        for options in ({"softcap": 50.0}, {"s_aux": [0.5]}):
            with self.assertRaisesRegex(record_hf.Refusal, "freekv-record"):
                recorder(module, 1, 2, 3, None, **options)

    def test_a_scale_is_the_traces(self):
        chosen = record_hf.arguments(["--model", "a/b", "--text", "t", "--layers", "3", "--out", "o"])
        self.assertEqual(record_hf.metadata_of(chosen, 3, {"scaling": 0.0625})["scale"], "0.0625")
        self.assertNotIn("scale", record_hf.metadata_of(chosen, 3, {}))


class CommandLine(Folder):
    def test_without_torch_a_sentence_says_what_to_install(self):
        self.stored("torch.py", b"raise ImportError('hidden for this test', name='torch')")
        sentence = self.refused("--model", "m", "--text", "t", "--layers", "0", "--out", self.path("out"),
                                PYTHONPATH=self.folder)
        self.assertIn("torch", sentence)
        self.assertIn("pip install torch transformers", sentence)
        self.assertFalse(os.path.exists(self.path("out")))

    def test_numbers_that_cannot_be_are_refused(self):
        needed = ("--model", "m", "--text", "t", "--layers", "0", "--out", self.path("out"))
        self.assertIn("not both 0", self.refused(*needed, "--prompt", "0", "--steps", "0"))
        self.assertIn("0 or more", self.refused(*needed, "--prompt", "-1"))
        self.assertIn("--chunk 0", self.refused(*needed, "--chunk", "0"))
        self.assertIn("--text", self.refused("--model", "m", "--layers", "0", "--out", "x"))
        self.assertIn("--tokens", self.refused(*needed, "--tokens", "t"))


@unittest.skipIf(MISSING, MISSING)
class Recording(Folder):
    """On small models of random weights: 3 layers, 6 query heads, 2 KV heads, head_dim 64."""

    shape = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 3,
             "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
    prompt, steps = 150, 10

    def model(self, kind):
        torch.manual_seed(5)
        config = getattr(transformers, kind + "Config")(**self.shape)
        model = getattr(transformers, kind + "Model")(config).eval()
        model.save_pretrained(self.path(kind))
        return model

    def recorded(self, *options):
        end = run(sys.executable, SCRIPT, "--prompt", str(self.prompt), "--steps", str(self.steps), *options)
        self.assertEqual(end.returncode, 0, end.stderr)
        return end

    def test_a_replay_of_the_recording_is_the_models_own_attention(self):
        dice = random.Random(1)
        ids = [dice.randrange(300) for _ in range(self.prompt + self.steps)]
        tokens = self.stored("tokens", " ".join(map(str, ids)).encode() + b"\n 1 2 3")
        for kind in ("Llama", "Qwen3"):  # the latter normalises queries and keys
            model = self.model(kind)
            outputs = {}
            for layer, block in enumerate(model.layers):
                block.self_attn.o_proj.register_forward_pre_hook(
                    lambda _, inputs, layer=layer: outputs.__setitem__(layer, inputs[0][0]))
            with torch.no_grad():
                model(input_ids=torch.tensor([ids]))
            for chunk in ("1000", "37"):
                with self.subTest(kind + ", chunks of " + chunk):
                    out = self.path(kind + chunk)
                    end = self.recorded("--model", self.path(kind), "--tokens", tokens, "--layers", "2", "0", "--out",
                                        out, "--dtype", "f32", "--chunk", chunk)
                    paths = [os.path.join(out, f"layer-{layer}.safetensors") for layer in (0, 2)]
                    self.assertEqual(end.stdout.splitlines(), paths)
                    found = self.replayed(out, "--variant", "full", "--out", self.path("replayed"))
                    self.assertEqual([layer["layer"] for layer in found["layers"]], [0, 2])
                    for layer, path in zip((0, 2), paths):
                        replayed = read_safetensors(os.path.join(self.path("replayed"), os.path.basename(path)))[0]["out"]
                        self.assertEqual(replayed[1], [self.steps, 6, 64])
                        got = torch.tensor(floats(replayed)).reshape(self.steps, -1)
                        torch.testing.assert_close(got, outputs[layer][self.prompt:], rtol=1e-4, atol=1e-5)

    def test_a_text_is_bytes_for_a_model_without_tokenizer(self):
        for kind in ("Llama", "Qwen3"):
            self.model(kind)
            text = ("In the beginning God created the heaven and the earth. " * 4).encode()
            end = self.recorded("--model", self.path(kind), "--text", self.stored("text", text), "--layers", "1",
                                "--out", self.path("from-text"), "--dtype", "bf16")
            self.assertIn("bytes", end.stderr)
            self.recorded("--model", self.path(kind), "--tokens", self.stored("tokens", " ".join(map(str, text)).encode()),
                          "--layers", "1", "--out", self.path("from-tokens"), "--dtype", "bf16")
            one, other = (read_safetensors(os.path.join(self.path(name), "layer-1.safetensors"))
                          for name in ("from-text", "from-tokens"))
            self.assertEqual(one[0], other[0])
            self.assertEqual(one[1], {"prompt_len": "150", "layer": "1", "model": kind, "text": "text", "scale": "0.125"})
            self.assertEqual(self.replayed(self.path("from-text"))["layers"][0]["dtype"], "BF16")

    def test_a_head_scale_of_the_models_own_is_written(self):
        torch.manual_seed(5)
        config = transformers.GraniteConfig(**self.shape, attention_multiplier=0.25)
        transformers.GraniteModel(config).save_pretrained(self.path("Granite"))
        tokens = self.stored("tokens", b"1 " * 200)
        self.recorded("--model", self.path("Granite"), "--tokens", tokens, "--layers", "0", "--out", self.path("out"))
        path = os.path.join(self.path("out"), "layer-0.safetensors")
        self.assertEqual(read_safetensors(path)[1]["scale"], "0.25")

    def test_what_cannot_be_recorded_is_refused_with_the_number(self):
        self.model("Llama")
        tokens = self.stored("tokens", b"1 2 3 299 300")

        def refused(*options):
            return self.refused("--model", self.path("Llama"), "--out", self.path("out"), "--steps", "1", *options)

        self.assertIn("0 to 2", refused("--tokens", tokens, "--prompt", "3", "--layers", "0", "3"))
        self.assertIn("has 5 tokens", refused("--tokens", tokens, "--prompt", "5", "--layers", "0"))
        self.assertIn("token 300", refused("--tokens", tokens, "--prompt", "4", "--layers", "0"))
        self.assertIn("no token id", refused("--tokens", self.stored("words", b"1 two"), "--prompt", "1", "--layers", "0"))
        self.assertIn("absent", refused("--tokens", self.path("absent"), "--layers", "0"))
        self.assertFalse(os.path.exists(self.path("out")))
        self.assertIn("cannot be loaded", self.refused("--model", self.path("nowhere"), "--tokens", tokens, "--layers",
                                                       "0", "--out", self.path("out")))


if __name__ == "__main__":
    if MISSING:
        print("skipped:", MISSING)
    unittest.main(argv=sys.argv[:1])
