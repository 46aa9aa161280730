// FreeKV as published, for one shape: what an engine compiles.
#include <freekv/freekv.hpp>

using pipeline = freekv::methods::freekv_paper::pipeline<freekv::kv_shape<freekv::bfloat16, 128>>;
template class freekv::basic_retrieval_pipeline<pipeline::shape_type, pipeline::pack_type>;
template class freekv::retrieval_step<pipeline::shape_type, pipeline::pack_type>;

auto report(pipeline& p) { return p.report(0)[freekv::sequence_id{0}]; }
void append(pipeline::step& step, const freekv::kv_rows<float>& rows) { step.append<float>(0, rows); }
