#!/usr/bin/env bash
# The main job, the recorder and the basis tool in a size of seconds: smoke.sh PROGRAMS REPLAY MODEL FOLDER.
set -euo pipefail
programs=$1 replay=$2 model=$3 folder=$4
texts=$(cd "$(dirname "$0")/../../examples/llama_cpp/texts" && pwd)
rm -rf "$folder" && mkdir -p "$folder"
common=(--model "$model" --text "$texts/hacker-folklore.txt")

"$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/results" \
  --prompt 500 --steps 12 --budget 256 --needle-tokens 400 --needle-budgets 256 --basis-tokens 300 --rounds 1 --timed-steps 2 \
  --commit smoke
"$programs/freekv-record" "${common[@]}" --prompt 300 --steps 20 --layers 3,12 --out "$folder/traces"
"$programs/freekv-basis" --model "$model" --text "$texts/genesis.txt" --tokens 300 --rank 24 --out "$folder/basis.safetensors"
for variant in full streaming_llm quest freekv freekv_chunk_means freekv_key_subspace; do
  "$replay" "$folder/traces/layer-12.safetensors" --variant $variant --k 2 --out "$folder/$variant.safetensors" >"$folder/$variant.json"
done
"$replay" "$folder/traces/layer-3.safetensors" --variant freekv_key_subspace --k 2 --basis "$folder/basis.safetensors" >"$folder/basis.json"

# A file that is no model, a text too short, and options that cannot be get one sentence and exit code 2.
for wrong in "--model $0" "--text $0 --prompt 50000" "--variant nonsense" "--budget 100"; do
  status=0
  # shellcheck disable=SC2086
  "$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/wrong" $wrong \
    >"$folder/wrong.out" 2>"$folder/wrong.err" || status=$?
  [[ $status == 2 && ! -s $folder/wrong.out && $(wc -l <"$folder/wrong.err") == 1 ]] ||
    { echo "freekv-compare $wrong: exit $status"; cat "$folder/wrong.out" "$folder/wrong.err"; exit 1; }
done

python3 - "$folder" <<'PYTHON'
import json, math, sys
from pathlib import Path

folder = Path(sys.argv[1])
lines = [json.loads(line) for line in (folder / "results/results.jsonl").read_text().splitlines()]
value = {(l["bench"], l["case"], l["metric"]): l["value"] for l in lines}
cases = ["full", "streaming_llm", "quest", "freekv", "freekv_chunk_means", "freekv_key_subspace",
         "freekv_key_subspace, other text's basis"]
for case in cases:
    assert 1 < value["quality", case, "perplexity"] < 1e4, case
    assert 0 < value["quality", case, "mass_kept"] <= 1.0001, case
    assert value["needle", case, "loss_per_digit"] > 0, case
    assert value["speed", case, "tokens_per_second"] > 0, case
assert value["quality", "full", "top1_agreement"] == 1
assert value["quality", "full", "attention_error"] == 0
assert value["quality", "quest", "corrected"] == 1
assert 0 < value["quality", "freekv", "corrected"] < 1
assert value["quality", "streaming_llm", "slices_recalled"] == 0 < value["quality", "freekv", "slices_recalled"]
assert value["quality", "streaming_llm", "mass_kept"] < value["quality", "freekv_key_subspace", "mass_kept"]
assert value["quality", "freekv", "fast_tier_bytes"] < value["quality", "full", "fast_tier_bytes"]
for name in ("llama.cpp, flash attention on", "llama.cpp, flash attention off"):
    assert value["speed", name, "tokens_per_second"] > 0
table = (folder / "results/table.txt").read_text()
assert all(table.count(case + " ") >= 3 for case in cases)

replays = {case: json.loads((folder / f"{case}.json").read_text()) for case in cases[:-1]}
assert abs(replays["full"]["mass_kept"] - 1) < 1e-5
assert replays["streaming_llm"]["mass_kept"] < replays["freekv_key_subspace"]["mass_kept"] < 1
assert replays["quest"]["correction_rate"] == 1
assert json.loads((folder / "basis.json").read_text())["settings"]["basis"].endswith("basis.safetensors")
print("main job, recorder, basis tool and replay: as expected")
PYTHON
