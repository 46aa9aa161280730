// FreeKV as published, for one shape, of HEAD_DIM: what an engine compiles; and the kernels that other
// policies take beside it.
#include <freekv/backend/cuda/top_k.cuh>
#include <freekv/freekv.cuh>

using namespace freekv;
using namespace freekv::detail;

using pipeline = methods::freekv_paper::pipeline<kv_shape<bfloat16, HEAD_DIM>>::with<cuda_backend>;
using state = layer_state<pipeline::shape_type>;
template class freekv::basic_retrieval_pipeline<pipeline::shape_type, pipeline::pack_type>;
template class freekv::retrieval_step<pipeline::shape_type, pipeline::pack_type>;

void append(pipeline::step& step, const kv_rows<float>& rows) { step.append<float>(0, rows); }

// Layers that select as one, query heads that select each for itself, and pins.
void select_by_other_rows(const state& s, const device::step_view& step,
                          const device::selection_scratch& scratch) {
  device::launch_flag_layer(s, step, nullptr);
  device::launch_pool_heads<mean_softmax>(s, step, scratch, {}, nullptr);
  device::launch_select_by_query_head(s, sticky_top_k{}, step, scratch, {}, nullptr);
  device::launch_select(s, device::union_of_query_heads{}, first_unselected<0>{}, device::already_flagged{},
                        step, scratch, {}, nullptr);
  device::launch_pin_units(s, step, {}, nullptr);
}

// Scores by a summary of codes, a correction by mass, and what units are worth to be pinned.
void judge_by_codes(const state& s, const device::step_view& step, const device::selection_scratch& scratch) {
  const key_codes<dynamic, dynamic> summary{};
  device::launch_score<device::scoring::alone>(s, summary, mean_softmax{}, step, scratch, {}, nullptr);
  device::launch_select(s, top_p{}, first_unselected<0>{}, mass_deficit{}.at(0), step, scratch, {}, nullptr);
  device::launch_append(s, min_max{}, pin_outliers<>{}, cosine_drift{}.at(0), step,
                        device::device_rows<float>{}, {}, {}, nullptr);
}

// Summaries that blocks make.
void summarise_by_blocks(const state& s, const device::step_view& step,
                         const device::append_memory<bfloat16>& memory,
                         const device::selection_scratch& scratch) {
  device::launch_summarise(s, key_codes<dynamic, dynamic>{}, step, {}, memory, nullptr);
  device::launch_summarise(s, key_subspace<24, 3>{}, step, {}, memory, nullptr);
  device::launch_score<device::scoring::alone>(s, key_subspace<24, 3>{}, mean_softmax{}, step, scratch, {},
                                               nullptr);
}

// A coarse summary and a fine one.
void select_in_two_stages(const state& s, const device::step_view& step,
                          const device::selection_scratch& scratch) {
  const coarse_to_fine<min_max, key_sketch<4>> summary{};
  device::launch_score<device::scoring::coarse>(s, summary, mean_softmax{}, step, scratch, {}, nullptr);
  device::launch_keep(s, summary, step, scratch, {}, nullptr);
  device::launch_score<device::scoring::fine>(s, summary, mean_softmax{}, step, scratch, {}, nullptr);
}

// Recall by bulk copies.
struct bulk_copies {
  static constexpr device::recall_tuning tuning{
      .read = device::recall_read::bulk_copies, .threads = 128, .depth = 4, .buffer_bytes = 2048};
};
void recall_by_bulk_copies(const state& s, const device::step_view& step,
                           const device::selection_scratch& scratch) {
  device::launch_recall<bulk_copies>(s, identity{}, step, scratch, nullptr);
}

// Selection from rows of scores.
void select_from_rows(const device::score_rows& rows) {
  device::launch_top_k(rows, device::top_k_scratch<device::select_by::block_radix>{}, nullptr);
  device::launch_select_from_rows(rows, device::by_best_scores{}, nullptr);
}

// Attention to a cache of the engine's own.
void attend_to_engine(const device::paged_cache<bfloat16>& cache, const device::paged_cache<fp8_e4m3>& in_fp8,
                      const device::attention_scratch_memory& attended) {
  device::attend_paged<HEAD_DIM>(cache, {}, attended, nullptr);
  device::attend_paged<HEAD_DIM, device::attend_paged_by_tensor_cores>(cache, {}, attended, nullptr);
  device::attend_paged<HEAD_DIM, device::attend_paged_by_tensor_cores>(in_fp8, {}, attended, nullptr);
}

// Attention by FMA, which a pipeline of F32 has, and of pages that are encoded by tensor cores.
void attend_by_both(const state& s, const device::step_view& step,
                    const device::attention_scratch_memory& attended) {
  constexpr auto by = device::multiplies::tensor_cores;
  device::launch_attend<device::multiplies::fma>(s, identity{}, step, {}, device::rows_attending::all, false,
                                                 1, {}, attended, nullptr);
  device::launch_attend<by>(s, int4_channel{}, step, {}, device::rows_attending::all, false, 1, {}, attended,
                            nullptr);
}

// Tables for an engine's own kernel.
void list_attended(const state& s, const device::step_view& step) {
  device::launch_tables(s, step, {}, {}, nullptr);
}

// What a store that is encoded takes beside it.
void keep_encoded(const state& s, const device::step_view& step,
                  const device::append_memory<bfloat16>& memory, const device::selection_scratch& selected,
                  const device::attention_scratch_memory& attended) {
  const int4_channel codec;  // which takes more registers than the others
  device::launch_encode(s, codec, step, {}, memory.encoding, nullptr);
  device::launch_recall(s, codec, step, selected, nullptr);
  device::launch_attend(s, codec, step, {}, device::rows_attending::all, false, 1, {}, attended, nullptr);
  device::launch_unit_log_masses(s, codec, step, {}, {}, nullptr);
  device::launch_prefill(s, codec, step, {}, {}, {}, attended, nullptr);
  device::launch_fill(device::all_layers<state>{}, codec, {}, nullptr);
  device::launch_reopen(device::all_layers<state>{}, codec, 0, {}, nullptr);
}
