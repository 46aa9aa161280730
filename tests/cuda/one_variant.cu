// FreeKV as published, for one shape: what an engine compiles.
#include <freekv/freekv.cuh>

using pipeline =
    freekv::variants::freekv::pipeline<freekv::kv_shape<freekv::bfloat16, 128>>::with<freekv::cuda_backend>;
template class freekv::basic_retrieval_pipeline<pipeline::shape_type, pipeline::pack_type>;

void append(pipeline& p, const freekv::new_rows<float>& rows) { p.append<float>(0, rows); }
