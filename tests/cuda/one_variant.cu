// FreeKV as published, for one shape: what an engine compiles.
#include <freekv/freekv.cuh>

using pipeline =
    freekv::variants::freekv::pipeline<freekv::kv_shape<freekv::bfloat16, 128>>::with<freekv::cuda_backend>;
template class freekv::basic_retrieval_pipeline<pipeline::shape_type, pipeline::pack_type>;

void append(pipeline& p, const freekv::new_rows<float>& rows) { p.append<float>(0, rows); }

// What layers that select as one, query heads that select each for itself, and pins take beside it.
void select_by_other_rows(const freekv::layer_state<pipeline::shape_type>& s,
                          const freekv::device::step_view& step,
                          const freekv::device::selection_scratch& scratch) {
  freekv::device::launch_flag_layer(s, step, nullptr);
  freekv::device::launch_pool_heads<freekv::mean_softmax>(s, step, scratch, {}, nullptr);
  freekv::device::launch_select_by_query_head(s, freekv::top_k{}, step, scratch, {}, nullptr);
  freekv::device::launch_pin_units(s, step, {}, nullptr);
}
