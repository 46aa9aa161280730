#!/usr/bin/env bash
# The main job in a size of seconds, what it refuses and how it ends: job_test.sh PROGRAMS MODEL FOLDER.
set -euo pipefail
programs=$1 model=$2 folder=$3
texts=$(cd "$(dirname "$0")/../../examples/eval/texts" && pwd)
rm -rf "$folder" && mkdir -p "$folder"
common=(--model "$model" --text "$texts/hacker-folklore.txt" --threads 1)  # of which several wait for each other by spinning

"$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/results" \
  --calibration "$texts/technical.txt" --prompt 500 --steps 12 --budget 256 --needle-tokens 400 --needle-budgets 256 \
  --basis-tokens 300 --rounds 1 --timed-steps 2 --pair-seconds 2 --generate 12 --temperature 0.7 --tasks "$texts/tasks.jsonl" --commit smoke \
  --own-continuation 16 --more-texts "$texts/genesis.txt"

# A file that is no model, a text too short, and options that cannot be get one sentence and exit code 2.
for wrong in "--model $0" "--text $0 --prompt 50000" "--variant nonsense" "--budget 100" "--variant razor_attention" \
  "--section nonsense" "--section generate" "--section continuation" "--own-continuation 3" "--tasks $0 --section tasks" "--temperature -1" "--top-p 0.5" "--top-p 0 --temperature 1" \
  "--samples 2" "--section batch" "--batch 1" \
  "--batch 100000" "--batch 4 --prompt 16000" "--section draft" "--draft 1" "--draft 13 --steps 12" \
  "--section stages --prompt 50000" "--prompt 2147483647" "--section queries --steps 1" "--complete-layers -1" "--basis-tokens 0" \
  "--section hard_kv --complete-layers 30" "--section frontier --frontier-summary key_signatures" "--correction always=0.3" \
  "--correction verified_share=0.1,3.9" "--correction every_n_steps=1e20" "--head-list snapkv=$0" \
  "--text $texts/../texts/genesis.txt"; do  # the last with rows that would learn another text's keys of itself
  status=0
  # shellcheck disable=SC2086
  "$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/wrong" $wrong \
    >"$folder/wrong.out" 2>"$folder/wrong.err" || status=$?
  [[ $status == 2 && ! -s $folder/wrong.out && $(wc -l <"$folder/wrong.err") == 1 ]] ||
    { echo "freekv-compare $wrong: exit $status"; cat "$folder/wrong.out" "$folder/wrong.err"; exit 1; }
done

# A model whose weights are damaged gets a sentence before the long work, with the processor and how llama.cpp was built.
cp "$model" "$folder/damaged.gguf"
size=$(stat -c %s "$model")
head -c 1000000 /dev/zero | tr '\0' '\377' | dd of="$folder/damaged.gguf" bs=64K oflag=seek_bytes seek=$((size - 2000000)) conv=notrunc status=none
status=0
"$programs/freekv-compare" --model "$folder/damaged.gguf" --text "$texts/hacker-folklore.txt" --threads 1 --needle-text "$texts/genesis.txt" \
  --cache "" --out "$folder/damaged" >"$folder/damaged.out" 2>"$folder/damaged.err" || status=$?
[[ $status == 2 && ! -s $folder/damaged.out && $(wc -l <"$folder/damaged.err") == 1 ]] &&
  grep -q "wrong logits.*The processor is .*llama.cpp was built .*GGML_NATIVE=OFF" "$folder/damaged.err" ||
  { echo "a damaged model: exit $status"; cat "$folder/damaged.out" "$folder/damaged.err"; exit 1; }
rm "$folder/damaged.gguf"

# A signal ends the program that runs as $killed, and it leaves a line that says where: "PROGRAM: segmentation fault.. while PATTERN".
ends_saying() {  # PROGRAM PATTERN
  kill -SEGV "$killed"
  status=0
  wait "$killed" || status=$?
  [[ $status == 139 ]] && tail -1 "$folder/killed.err" | grep -q "^$1: segmentation fault (SIGSEGV) while $2" ||
    { echo "$1, killed: exit $status"; cat "$folder/killed.err"; exit 1; }
}
# In the middle of the job, and the lines measured by then are there.
rm -rf "$folder/killed"
"$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/killed" \
  --calibration "$texts/technical.txt" --prompt 500 --steps 3000 --budget 256 --needle-tokens 400 --needle-budgets 256 \
  --basis-tokens 300 --variant freekv --commit smoke >"$folder/killed.out" 2>"$folder/killed.err" &
killed=$!
until grep -q "quality of f" "$folder/killed.err"; do
  kill -0 "$killed" || { echo "ended before it was killed"; cat "$folder/killed.err"; exit 1; }
  sleep 0.1
done
ends_saying freekv-compare \
  "measuring quality: quality of f[a-z]*, [0-9]* % done; what was measured by then is in '.*/killed/results.jsonl.part'"
grep -q '"bench":"needle".*"case":"freekv"' "$folder/killed/results.jsonl.part"
grep -q "8 facts in" "$folder/killed/table.txt.part"

# What examples/run.sh compiles for a model, and what it is told of a file that is none.
[[ $("$programs/freekv-model-shape" "$model") == "64 half" ]]
status=0
"$programs/freekv-model-shape" "$0" >"$folder/wrong.out" 2>"$folder/wrong.err" || status=$?
[[ $status == 2 && ! -s $folder/wrong.out && $(wc -l <"$folder/wrong.err") == 1 ]]
mkfifo "$folder/fifo.gguf"  # of which nobody writes the header
"$programs/freekv-model-shape" "$folder/fifo.gguf" >"$folder/killed.out" 2>"$folder/killed.err" &
killed=$!
sleep 1
ends_saying freekv-model-shape "reading a model's header: .*/fifo.gguf$"

python3 - "$folder" <<'PYTHON'
import json, math, sys
from pathlib import Path

folder = Path(sys.argv[1])


def results(name):
    return [json.loads(line) for line in (folder / name / "results.jsonl").read_text().splitlines()]


lines = results("results")
value = {(l["bench"], l["case"], l["metric"]): l["value"] for l in lines}
cases = ["full", "streaming_llm", "quest", "freekv", "freekv_chunk_means", "freekv_key_subspace",
         "freekv_key_subspace, other text's basis", "freekv_key_codes",
         "freekv_key_codes, other text's codebooks", "freekv_key_codes_sticky"]
for case in cases:
    assert 1 < value["quality", case, "perplexity"] < 1e4, case
    assert 0 < value["quality", case, "mass_kept"] <= 1.0001, case
    assert value["needle", case, "loss_per_digit"] > 0, case
    assert value["speed", case, "tokens_per_second"] > 0, case
    assert value["generate", case, "tokens_per_second"] > 0, case
    assert 0 <= value["generate", case, "same_tokens"] <= 1, case
    assert 0 <= value["tasks", case, "right"] <= 1, case
assert value["quality", "full", "top1_agreement"] == 1
assert value["quality", "full", "attention_error"] == 0
for bench in "quality", "continuation":
    assert value[bench, "full", "divergence"] == value[bench, "full", "divergence_99"] == 0
    assert value[bench, "full", "top1_agreement"] == 1
    for case in cases[1:]:
        assert 0 < value[bench, case, "divergence_low"] <= value[bench, case, "divergence"] <= value[bench, case, "divergence_high"]
        assert value[bench, case, "divergence"] <= value[bench, case, "divergence_99"], case
over_quest = {case: [value["quality", case, "divergence_over_quest" + end] for end in ("_low", "", "_high")]
              for case in cases if ("quality", case, "divergence_over_quest") in value}
assert list(over_quest) == [case for case in cases if case not in ("full", "quest")]
for case, (low, mean, high) in over_quest.items():
    assert low <= mean <= high and abs(mean - value["quality", case, "divergence"] + value["quality", "quest", "divergence"]) < 1e-9
assert {l["n"] for l in lines if l["bench"] == "quality"} == {24}  # 12 tokens of two texts
assert 0 < value["continuation", "full", "loss"] < math.log(value["quality", "full", "perplexity"])  # its own choice
parts = [(l["first"], l["end"]) for l in lines if (l["bench"], l["case"], l["metric"]) == ("continuation", "freekv", "loss_at")]
assert parts == [(0, 2), (2, 4), (4, 8), (8, 16)]
assert value["generate", "full", "first_difference"] == 12 and value["generate", "full", "same_tokens"] == 1
assert all((folder / f"results/generated-{case}.txt").stat().st_size > 0 for case in ("full", "freekv"))
assert value["tasks", "full", "answers_right"] == 2  # facts that stand in the prompts
tasks = [l for l in lines if l["bench"] == "task" and l["case"] == "full"]
assert [l["task"] for l in tasks] == [1, 2, 3, 4, 5] and tasks[1]["answered"].startswith("73951") and len(tasks[2]["losses"]) == 3
assert value["quality", "quest", "corrected"] == 1
assert 0 < value["quality", "freekv", "corrected"] < 1
assert 0 < value["quality", "freekv", "slices_critical"] <= value["quality", "freekv", "slices_recalled"]
# All but what a page that becomes a candidate of the next step displaces.
assert 0.95 * value["quality", "quest", "slices_recalled"] < value["quality", "quest", "slices_critical"] <= value["quality", "quest", "slices_recalled"]
assert value["quality", "streaming_llm", "slices_recalled"] == 0 < value["quality", "freekv", "slices_recalled"]
assert value["quality", "streaming_llm", "mass_kept"] < value["quality", "freekv_key_subspace", "mass_kept"]
assert value["quality", "freekv", "fast_tier_bytes"] < value["quality", "full", "fast_tier_bytes"]
for name in ("llama.cpp, flash attention on", "llama.cpp, flash attention off"):
    assert value["speed", name, "tokens_per_second"] > 0
pairs = {(l["case"], l["metric"]): l for l in lines if l["bench"] == "speed" and "n" in l}
assert {case for case, metric in pairs if metric == "over_stock"} == set(cases)
assert {case for case, metric in pairs if metric == "over_freekv"} == {c for c in cases if c.startswith("freekv_")}
assert all(l["n"] % 2 == 0 and l["n"] > 0 and 0.1 < l["value"] < 10 for l in pairs.values())
assert all(l["n"] < 6 or l["low"] <= l["value"] <= l["high"] for l in pairs.values())
table = (folder / "results/table.txt").read_text()
assert f"medians of {pairs['full', 'over_stock']['n']} pairs of 2 tokens" in table
assert all(table.count(case + " ") >= 3 for case in cases)
in_short = [line.split("  ")[0] for line in table[table.index("\nin short"):].splitlines()[1:]]
assert in_short == ["in short", "full attention", "freekv, as published", "freekv_key_codes_sticky, recommended"]
print("main job: as expected")
PYTHON
