#!/usr/bin/env bash
# What the main job is asked for besides, the recorder and the basis tool in a size of seconds:
# sections_test.sh PROGRAMS REPLAY MODEL FOLDER.
set -euo pipefail
programs=$1 replay=$2 model=$3 folder=$4
texts=$(cd "$(dirname "$0")/../../examples/eval/texts" && pwd)
rm -rf "$folder" && mkdir -p "$folder"
common=(--model "$model" --text "$texts/hacker-folklore.txt" --threads 1)  # of which several wait for each other by spinning

python3 -B "$texts/../tasks.py" "$folder/made.jsonl" --lengths 300 --prompts 1 --tasks needles multivalue variables
"$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/made" \
  --section tasks --tasks "$folder/made.jsonl" --variant streaming_llm --variant quest --variant freekv_long_inputs --budget 256 --commit smoke
for _ in 1 2; do sed 's/^{/{"stop": "\\n", /' "$texts/tasks.jsonl"; done >"$folder/stops.jsonl"
"$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/chat" \
  --section tasks --tasks "$folder/stops.jsonl" --variant streaming_llm --budget 256 --chat --samples 3 --temperature 0.8 \
  --top-p 0.9 --commit smoke
for layer in $(seq 0 29); do echo "$layer 0 complete"; done >"$folder/heads.txt"
for layer in $(seq 1 29); do echo "$layer 4"; done >"$folder/voters.txt"
"$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/full" \
  --full --true-mass 0 1 --section quality --section budgets --section taus --section poolings --section sources --section queries --section lengths --section stages --variant freekv --variant fasa --variant dapq --variant epi_cache --variant razor_attention \
  --variant razor_attention_compensated --variant compress_kv --head-list "$folder/heads.txt" "compress_kv=$folder/voters.txt" --prompt 500 --steps 4 --deep-steps 4 --budget 256 --budgets 256 320 --taus 0.5 1 \
  --lengths 400 500 --rounds 1 --timed-steps 2 --commit smoke
"$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/together" \
  --section batch --section draft --batch 3 --draft 4 --variant freekv --variant freekv_key_codes_deficit --prompt 500 \
  --steps 12 --budget 256 --commit smoke
"$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/papers" \
  --section quality --section hard_kv --section arkv --section budgets --budgets 256 --deep-steps 2 \
  --variant streaming_llm --variant freekv_key_codes_units --correction always --prompt 500 --steps 4 --budget 256 --commit smoke
"$programs/freekv-compare" "${common[@]}" --needle-text "$texts/genesis.txt" --cache "$folder/cache" --out "$folder/drafts" \
  --section draft --draft 2 --variant snapkv --variant magicpig --prompt 300 --steps 2 --budget 256 --commit smoke 2>"$folder/drafts.err"
[[ $(grep -c "left out of drafts" "$folder/drafts.err") == 2 ]]
"$programs/freekv-record" "${common[@]}" --prompt 300 --steps 20 --layers 3,12 --out "$folder/traces"
"$programs/freekv-basis" --model "$model" --threads 1 --text "$texts/genesis.txt" --tokens 300 --rank 24 --out "$folder/basis.safetensors"
"$programs/freekv-basis" --model "$model" --threads 1 --text "$texts/genesis.txt" --tokens 300 --rank 24 --pairs --out "$folder/pairs.safetensors"
"$programs/freekv-basis" --model "$model" --threads 1 --text "$texts/genesis.txt" "$texts/technical.txt" --tokens 300 \
  --codebooks "$folder/codebooks.safetensors"
for variant in full streaming_llm quest freekv freekv_chunk_means freekv_key_subspace; do
  "$replay" "$folder/traces/layer-12.safetensors" --variant $variant --k 2 --out "$folder/$variant.safetensors" >"$folder/$variant.json"
done
"$replay" "$folder/traces/layer-12.safetensors" --variant shadowkv --k 8 --pinned 2 >"$folder/shadowkv.json"  # the trace has the rotation
"$replay" "$folder/traces/layer-3.safetensors" --variant freekv_key_subspace --k 2 --basis "$folder/basis.safetensors" >"$folder/basis.json"
"$replay" "$folder/traces/layer-3.safetensors" --variant fasa --k 40 --basis "$folder/pairs.safetensors" >"$folder/pairs.json"

python3 - "$folder" <<'PYTHON'
import json, math, sys
from pathlib import Path

folder = Path(sys.argv[1])


def results(name):
    return [json.loads(line) for line in (folder / name / "results.jsonl").read_text().splitlines()]


variants = ["full", "streaming_llm", "quest", "freekv", "freekv_chunk_means", "freekv_key_subspace"]
assert {(l["case"] == "freekv_long_inputs", round(l["tau"], 3)) for l in results("made")} == {(True, 0.8), (False, 0.9)}
made = {(l["group"], l["case"], l["metric"]): l for l in results("made") if l["bench"] == "task_group"}
assert [group for group, case, metric in made if (case, metric) == ("full", "right")] == ["needles, 300", "multivalue, 300", "variables, 300"]
assert made["needles, 300", "full", "right"]["n"] == 8 and made["variables, 300", "full", "right"]["prompts"] == 1
for (group, case, metric), line in made.items():
    assert metric not in ("p_full", "p_quest") or 0 < line["value"] <= 1
    assert metric != "loss" or line["value"] > 0
losses = {case: made["needles, 300", case, "loss"]["value"] for case in ("quest", "streaming_llm")}
assert abs(made["needles, 300", "streaming_llm", "loss_over_quest"]["value"] + losses["quest"] - losses["streaming_llm"]) < 1e-9
assert ("needles, 300", "quest", "loss_over_quest") not in made
assert ("needles, 300", "streaming_llm", "p_quest") in made and ("needles, 300", "quest", "p_quest") not in made
asked = [l for l in results("made") if l["bench"] == "task" and l["case"] == "full"]
assert [l["question"] for l in asked] == [*range(8), 0, 0, 1] and all(l["loss"] > 0 for l in asked)
chat = results("chat")
sampled = [l for l in chat if l["bench"] == "task" and "samples" in l]
assert len(sampled) == 8 and all(len(l["samples"]) == 3 and 0 <= l["right_samples"] <= 3 for l in sampled)
of_full = [l["samples"] for l in sampled if l["case"] == "full"]
assert of_full[:2] != of_full[2:]  # the same questions again, and other random numbers
assert not any("\n" in text.strip() for l in sampled for text in l["samples"])
assert len({text for l in sampled for text in l["samples"]}) > len(sampled)
passes = {(l["case"], l["k"]): l["value"] for l in chat if l["metric"] == "pass"}
average = {l["case"]: l["value"] for l in chat if l["metric"] == "average"}
for case in ("full", "streaming_llm"):
    assert abs(passes[case, 1] - average[case]) < 1e-9 and passes[case, 1] <= passes[case, 2] <= passes[case, 3]

full = results("full")


def of(bench, metric, case, key):
    return {l[key]: l["value"] for l in full if (l["bench"], l["metric"], l["case"]) == (bench, metric, case)}


truths = [text + more for more in ("", ", pages more: 1") for text in ("true page mass", "true mass of 4 tokens")]
assert {l["case"] for l in full if l["bench"] == "quality"} == {"full", "freekv", "fasa", "dapq", "epi_cache", "razor_attention", "razor_attention_compensated", "compress_kv", *truths}
kept = {l["case"]: l["value"] for l in full if (l["bench"], l["metric"]) == ("quality", "mass_kept")}
assert kept["freekv"] < kept[truths[0]] < kept[truths[1]] < kept[truths[3]] < 1 and kept[truths[0]] < kept[truths[2]]
over = [(l["case"], l["truth"]) for l in full if l["metric"] == "divergence_over_truth"]
assert len(set(over)) == len(over) == 7 * 4 + 4 * 3 and ("freekv", truths[3]) in over
corrected = {l["case"]: l["value"] for l in results("papers") if (l["bench"], l["metric"]) == ("quality", "corrected")}
assert set(corrected) == {"full", "streaming_llm", "freekv_key_codes_units", "freekv_key_codes, always", "freekv_key_codes_units, always"}
assert {l["case"] for l in results("papers") if l["bench"] == "budget"} == set(corrected)
assert {l["case"] for l in results("drafts")} == {"full", "llama.cpp, flash attention on"}
assert corrected["freekv_key_codes, always"] == corrected["freekv_key_codes_units, always"] == 1 > corrected["freekv_key_codes_units"]
heads = [l["by_head"] for l in full if (l["bench"], l["case"]) == ("layer", "razor_attention")]
assert len(heads) == 29 and all(abs(head[0] - 1) < 1e-5 > head[2] - 1 for head in heads)  # head 0 keeps everything
heads = [l["by_head"] for l in full if (l["bench"], l["case"]) == ("layer", "razor_attention_compensated")]
assert len(heads) == 29 and all(abs(head[0] - 1) < 1e-5 for head in heads)
took = {case: {l["metric"]: l["value"] for l in full if (l["bench"], l["case"]) == ("stage", case)} for case in ("full", "fasa", "freekv")}
assert all(list(of_case) == ["append", "correct", "attend", "speculate"] and min(of_case.values()) > 0 for of_case in took.values())
assert took["full"]["correct"] < took["fasa"]["correct"]  # which corrects always
cosines = {l["metric"]: l for l in full if l["bench"] == "query_cosine_steps"}
assert list(cosines) == ["least", "middle", "most", "below_tau"] and {len(l["by_step"]) for l in cosines.values()} == {3}
assert cosines["least"]["value"] <= cosines["middle"]["value"] <= cosines["most"]["value"] and 0 <= cosines["below_tau"]["value"] <= 1
assert list(of("budget", "mass_kept", "freekv", "budget")) == [256, 320]
assert of("budget", "mass_kept", "freekv", "budget")[256] < of("budget", "mass_kept", "freekv", "budget")[320]
for variant in ("dapq", "epi_cache"):
    assert of("budget", "mass_kept", variant, "budget")[256] < of("budget", "mass_kept", variant, "budget")[320]
assert of("tau", "corrected", "freekv", "tau")[0.5] <= of("tau", "corrected", "freekv", "tau")[1] == 1
assert set(of("length", "attention_seconds", "freekv", "length")) == {400, 500}

together = results("together")
stock = "llama.cpp, flash attention on"
both = ["freekv", "freekv_key_codes_deficit"]
assert list(dict.fromkeys(l["case"] for l in together)) == [stock, "full", *both]
for case in (stock, "full", *both):
    parts = {metric: [l["value"] for l in together if (l["bench"], l["case"], l["metric"]) == ("batch", case, metric)]
             for metric in ("loss_alone", "loss", "logit_difference")}
    assert all(len(values) == 3 for values in parts.values()), case
    # No more than llama.cpp's kernels round otherwise for several rows: texts that saw each other would lose more.
    assert all(abs(a - b) < 0.1 for a, b in zip(parts["loss_alone"], parts["loss"])), case
    assert max(parts["logit_difference"]) < 3, case
drafts = {(l["case"], l["metric"], l["draft"]): l["value"] for l in together if l["bench"] == "draft"}
for case in (stock, "full", *both):
    assert drafts[case, "kept", 1] == 1 < drafts[case, "kept", 4] == drafts["full", "kept", 4] <= 4, case
    assert drafts[case, "tokens_per_second", 4] > 0, case
assert abs(math.log(drafts["full", "perplexity", 4] / drafts["full", "perplexity", 1])) < 0.1
assert abs(drafts["full", "mass_kept", 4] - 1) < 1e-5 and drafts["full", "slices_recalled", 4] == 0
for case in both:
    assert 0 < drafts[case, "mass_kept", 4] < 1 and 0 <= drafts[case, "corrected", 4] <= 1, case
    assert 0 < drafts[case, "slices_critical", 1] <= drafts[case, "slices_recalled", 1], case

papers = {(l["bench"], l["case"], l["metric"], l.get("budget"), l.get("quarter")): l["value"] for l in results("papers")}
tokens = {(case, budget): value for (bench, case, metric, budget, _), value in papers.items() if (bench, metric) == ("hard_kv", "tokens_attended")}
assert tokens["hard_kv, p 0.9", 256] < 256 < tokens["hard_kv, p 0.9", 512] == tokens["hard_kv, p 0.6", 1024] == 502.5
assert tokens["equal budgets, as many as p 0.9", 200] == 202.5  # the least that sink and window leave
lost = {case: sum(papers["hard_kv", case, "log_sum_exp_lost", 256, quarter] for quarter in range(4))
        for case in ("hard_kv, p 0.9", "hard_kv_merge", "hard_kv_pairs")}
assert 0 < lost["hard_kv_merge"] < min(lost["hard_kv, p 0.9"], lost["hard_kv_pairs"])
assert all(papers["hard_kv", "temperatures", metric, 256, None] > 0 for metric in ("mean", "spread"))
coded = [papers["arkv", case, "coded", 256, None] for case in ("arkv_origin", "arkv", "arkv_split")]
assert coded[0] == 0 < coded[1] < coded[2] < 0.3

replays = {case: json.loads((folder / f"{case}.json").read_text()) for case in variants}
assert abs(replays["full"]["mass_kept"] - 1) < 1e-5
assert replays["streaming_llm"]["mass_kept"] < replays["freekv_key_subspace"]["mass_kept"] < 1
assert replays["quest"]["correction_rate"] == 1
assert json.loads((folder / "basis.json").read_text())["settings"]["basis"].endswith("basis.safetensors")
pairs = (folder / "pairs.safetensors").read_bytes()
rows = memoryview(pairs[8 + int.from_bytes(pairs[:8], "little"):]).cast("f")
assert set(rows) == {0, 1} and sum(rows) == 30 * 3 * 24  # layers, KV heads and rows: a number of a key each
assert 0 < json.loads((folder / "pairs.json").read_text())["mass_kept"] < 1
print("sections, recorder, basis tool and replay: as expected")
PYTHON
